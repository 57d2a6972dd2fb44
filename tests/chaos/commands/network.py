"""Let things go wrong on lines."""

import argparse

from tests.chaos import network
from tests.chaos.commands.batches import add_batches, try_each
from tests.chaos.evidence import Evidence


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=1, help="of all kinds at all places")
    parser.add_argument("--kind", action="append", choices=sorted(network.KINDS))
    parser.add_argument("--place", action="append", choices=sorted(network.PLACES))
    parser.add_argument("--most-seconds", type=float, default=6.0, help="that a fault lasts")
    parser.add_argument("--rest-seconds", type=float, default=4.0, help="between two, at least")
    add_batches(parser, "a service and a database")


def run(chosen: argparse.Namespace) -> None:
    most = chosen.most_seconds
    kinds, places = chosen.kind or tuple(network.KINDS), chosen.place or network.PLACES
    how = chosen.rounds, (most / 6, most / 2, most), kinds, places, chosen.rest_seconds
    evidence = Evidence("network", network.SUMMED, trials=("faults", "acknowledged"))
    try_each(chosen, evidence, "postgres", lambda seed: network.run(network.Faults(seed, *how)))
