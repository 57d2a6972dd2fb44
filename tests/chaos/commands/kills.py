"""Kill processes under load, and count what is lost."""

import argparse
import sys
import time

from tests.chaos import kills
from tests.chaos.commands.batches import add_batches
from tests.chaos.databases import DURABILITY
from tests.chaos.evidence import Evidence
from tests.chaos.rig import RIGS

SUMMED = (
    "kills", "acknowledged", "lost", "accepted_twice", "double_leased_mb", "started_twice", "released_early",
    "leases_left", "events", "runs_seen",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--database", choices=sorted(DURABILITY), required=True)
    parser.add_argument("--engine", choices=sorted(RIGS), default="simulated")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tasks-per-kill", type=int, default=105)
    add_batches(parser, "a service and a database")


def run(chosen: argparse.Namespace) -> None:
    evidence = Evidence(f"kills-{chosen.database}", SUMMED, trials=("kills", "acknowledged"))
    for seed in range(chosen.seed, chosen.seed + chosen.batches):
        if not chosen.no_evidence and evidence.has(seed=seed, engine=chosen.engine):
            continue
        batch = kills.Batch(chosen.database, chosen.engine, seed, chosen.kills, chosen.tasks_per_kill)
        began = time.monotonic()
        record = kills.run(batch)
        print(f"{time.monotonic() - began:.0f} s: {record}", flush=True)
        if not chosen.no_evidence:
            evidence.add(record, database=chosen.database)
        if record["wrong"]:
            sys.exit(1)
