"""Ask gateways and brokers to end."""

import argparse

from tests.chaos import stops
from tests.chaos.commands.batches import add_batches, try_each
from tests.chaos.evidence import Evidence


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--tasks-per-stop", type=int, default=40)
    parser.add_argument("--target", action="append", choices=sorted({*stops.TARGETS}))
    add_batches(parser, "a Ray and a database")


def run(chosen: argparse.Namespace) -> None:
    evidence = Evidence("stops", stops.SUMMED, trials=("stops", "acknowledged"))
    how = chosen.stops, chosen.tasks_per_stop, chosen.target or stops.TARGETS
    try_each(chosen, evidence, "postgres", lambda seed: stops.run(stops.Stops(seed, *how)))
