"""What the commands have in common: batches that are known by their seeds, and kept as evidence."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from tests.chaos.databases import DURABILITY
from tests.chaos.evidence import Evidence


def add_batches(parser: argparse.ArgumentParser, each: str) -> None:
    """`each`: what a batch has of its own."""
    parser.add_argument("--seed", type=int, default=1, help="of the first batch; the next ones follow it")
    parser.add_argument("--batches", type=int, default=1, help=f"each with {each} of its own")
    add_no_evidence(parser)


def add_no_evidence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-evidence", action="store_true", help="print the record and keep nothing")


def keep(
    chosen: argparse.Namespace, evidence: Evidence, record: dict[str, Any], database: str
) -> dict[str, Any]:
    print(record, flush=True)
    if not chosen.no_evidence:
        evidence.add(record, database=database, durability=DURABILITY[database])
    return record


def try_each(
    chosen: argparse.Namespace, evidence: Evidence, database: str, run: Callable[[int], dict[str, Any]]
) -> None:
    """A batch for each seed of which there is no evidence yet; the first with something wrong is the last."""
    for seed in range(chosen.seed, chosen.seed + chosen.batches):
        if not chosen.no_evidence and evidence.has(seed=seed):
            continue
        record = keep(chosen, evidence, run(seed), database)
        if record["wrong"] or record.get("forgetful"):
            sys.exit(1)
