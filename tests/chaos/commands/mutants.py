"""Plant faults."""

import argparse
import sys

from tests.chaos import mutants
from tests.chaos.commands.batches import add_no_evidence


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=int, help="only so many of them")
    add_no_evidence(parser)


def run(chosen: argparse.Namespace) -> None:
    planted = mutants.MUTANTS[: chosen.first]
    if broken := mutants.unhealthy(planted):
        sys.exit(f"these fail without any mutant: {broken}")
    tried: dict[str, str] = {}
    for mutant, is_seen in mutants.try_all(planted):
        tried[mutant.name] = mutant.test if is_seen else ""
        print(f"{mutant.name}: {f'seen by {mutant.test}' if is_seen else 'NOT SEEN'}", flush=True)
    if not chosen.no_evidence:
        mutants.keep(tried)
    if not all(tried.values()):
        sys.exit(1)
