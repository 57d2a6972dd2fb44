"""Simulations of several brokers with random faults (tests/simulation/storm.py), in batches of seeds."""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from typing import Any

from msgspec import Struct

from tests.chaos.evidence import Evidence, add_no_evidence
from tests.simulation.storm import StormReport, storm

BATCH = 100
"""Seeds per record."""
STEPS = 200
_SEEDS_PER_JOB = 5
SUMMED = (
    "seeds", "steps", "acknowledged", "lost", "accepted_twice", "double_leased_mb", "leases_left", "terms",
    "events", "virtual_seconds", "faults",
)  # fmt: skip


class Seeds(Struct, frozen=True):
    first: int
    count: int
    steps: int = STEPS

    def jobs(self) -> Iterator[range]:
        end = self.first + self.count
        for begin in range(self.first, end, _SEEDS_PER_JOB):
            yield range(begin, min(begin + _SEEDS_PER_JOB, end))


def with_fixed_hashes() -> None:
    """Restart with a fixed hash seed: the order of a set may decide what is done first, and a seed must give
    the same simulation everywhere."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


def run(seeds: Seeds, workers: int) -> dict[str, Any]:
    """The record of these seeds. Prints the command that repeats a seed that went wrong."""
    if workers == 1:
        return _record(seeds, _reported(storm(seed, seeds.steps) for job in seeds.jobs() for seed in job))
    gc.freeze()
    with ProcessPoolExecutor(workers) as pool:
        submitted = [pool.submit(_several, job, seeds.steps) for job in seeds.jobs()]
        return _record(seeds, _reported(report for done in submitted for report in done.result()))


def _several(seeds: range, steps: int) -> list[StormReport]:
    return [storm(seed, steps) for seed in seeds]


def _reported(reports: Iterable[StormReport]) -> Iterator[StormReport]:
    for report in reports:
        if report.wrong:
            again = f"python -m tests.chaos simulation --first {report.seed} --seeds 1 --no-evidence"
            print(
                f"seed {report.seed} went wrong; repeat it with: {again}",
                *report.wrong,
                sep="\n  ",
                flush=True,
            )
        yield report


def _record(seeds: Seeds, reports: Iterable[StormReport]) -> dict[str, Any]:
    sums, faults = Counter[str](), Counter[str]()
    digest, wrong = sha256(), list[str]()
    for report in reports:
        sums.update({name: getattr(report, name) for name in SUMMED if name not in ("seeds", "faults")})
        faults += report.faults
        digest.update(report.digest.encode())
        wrong += [f"seed {report.seed}: {line}" for line in report.wrong[:3]]
    return {
        "seed": seeds.first,
        "seeds": seeds.count,
        **{name: round(sums[name]) for name in SUMMED if name not in ("seeds", "faults")},
        "faults": dict(sorted(faults.items())),
        "digest": digest.hexdigest(),
        "wrong": wrong[:20],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=10_000, help="simulations to run")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per simulation")
    parser.add_argument("--workers", type=int, default=1, help="parallel processes")
    parser.add_argument("--most-seconds", type=float, help="start no batch of seeds after this time")
    add_no_evidence(parser)


def command(options: argparse.Namespace) -> None:
    with_fixed_hashes()
    evidence = Evidence("simulation", SUMMED, trials=("seeds", "acknowledged"))
    began = time.monotonic()
    end = options.first + options.seeds
    for first in range(options.first, end, BATCH):
        if not options.no_evidence and evidence.has(seed=first):
            continue
        if options.most_seconds is not None and time.monotonic() - began > options.most_seconds:
            break
        seeds = Seeds(first, min(BATCH, end - first), options.steps)
        record = run(seeds, options.workers)
        print(f"{time.monotonic() - began:.0f} s: {record}", flush=True)
        if not options.no_evidence:
            evidence.add(record, steps_per_seed=options.steps)
        if record["wrong"]:
            sys.exit(1)
