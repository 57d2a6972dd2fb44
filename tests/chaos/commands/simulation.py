"""Simulate storms of faults."""

import argparse
import sys
import time

from tests.chaos import simulation
from tests.chaos.commands.batches import add_no_evidence
from tests.chaos.evidence import Evidence


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--steps", type=int, default=simulation.STEPS)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--most-seconds", type=float, help="begin no batch of seeds after so long")
    add_no_evidence(parser)


def run(chosen: argparse.Namespace) -> None:
    simulation.with_fixed_hashes()
    evidence = Evidence("simulation", simulation.SUMMED, trials=("seeds", "acknowledged"))
    began = time.monotonic()
    end = chosen.first + chosen.seeds
    for first in range(chosen.first, end, simulation.BATCH):
        if not chosen.no_evidence and evidence.has(seed=first):
            continue
        if chosen.most_seconds is not None and time.monotonic() - began > chosen.most_seconds:
            break
        seeds = simulation.Seeds(first, min(simulation.BATCH, end - first), chosen.steps)
        record = simulation.run(seeds, chosen.workers)
        print(f"{time.monotonic() - began:.0f} s: {record}", flush=True)
        if not chosen.no_evidence:
            evidence.add(record, steps_per_seed=chosen.steps)
        if record["wrong"]:
            sys.exit(1)
