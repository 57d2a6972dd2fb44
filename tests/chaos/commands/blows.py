"""Restart PostgreSQL and kill its backends."""

import argparse

from tests.chaos import blows
from tests.chaos.commands.batches import add_batches, try_each
from tests.chaos.evidence import Evidence


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--kills", type=int, default=100, help="of backends, ten at a blow")
    parser.add_argument("--watch-seconds", type=float, default=3.0, help="to take a rate before and after")
    parser.add_argument("--back-seconds", type=float, default=5.0, help="after which all should go on")
    add_batches(parser, "a server and a service")


def run(chosen: argparse.Namespace) -> None:
    trials = ("restarts", "backends_killed", "acknowledged")
    how = chosen.restarts, chosen.kills, chosen.watch_seconds, chosen.back_seconds
    evidence = Evidence("blows", blows.SUMMED, trials=trials)
    try_each(chosen, evidence, "postgres", lambda seed: blows.run(blows.Blows(seed, *how)))
