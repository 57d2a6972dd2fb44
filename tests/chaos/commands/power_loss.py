"""Cut the power of SQLite."""

import argparse

from tests.chaos import power
from tests.chaos.commands.batches import add_batches, try_each
from tests.chaos.evidence import Evidence


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=int, default=250, help="disks to look at, in each batch")
    add_batches(parser, "work")


def run(chosen: argparse.Namespace) -> None:
    evidence = Evidence("power-loss", power.SUMMED, trials=("images",))
    try_each(chosen, evidence, "sqlite", lambda seed: power.run(seed, chosen.images))
