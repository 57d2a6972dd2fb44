"""Wake up leaders that slept past their lease."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.chaos import zombies
from tests.chaos.commands.batches import add_no_evidence, keep
from tests.chaos.databases import a_database
from tests.chaos.evidence import Evidence


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pauses", type=int, default=60, help="in the middle of writes")
    parser.add_argument("--orders", type=int, default=60, help="that are sent late to agents on real Ray")
    parser.add_argument("--seed", type=int, default=1)
    add_no_evidence(parser)


def run(chosen: argparse.Namespace) -> None:
    done = [record for record in (_wake_writers(chosen), _wake_senders(chosen)) if record is not None]
    if any(record["wrong"] or record.get("accepted") for record in done):
        sys.exit(1)


def _wake_writers(chosen: argparse.Namespace) -> dict[str, Any] | None:
    """None if none are wanted, or the evidence has them."""
    evidence = Evidence("zombies", ("pauses", "refused", "accepted"), trials=("pauses",))
    if not chosen.pauses or (not chosen.no_evidence and evidence.has(seed=chosen.seed)):
        return None
    with tempfile.TemporaryDirectory() as folder, a_database("postgres", Path(folder)) as url:
        woken = zombies.Zombies(url).wake(chosen.pauses, chosen.seed)
    return keep(chosen, evidence, zombies.record(chosen.seed, chosen.pauses, woken), "postgres")


def _wake_senders(chosen: argparse.Namespace) -> dict[str, Any] | None:
    evidence = Evidence("zombies-orders", ("sleepers", "sent", "refused"), trials=("sent",))
    if not chosen.orders or (not chosen.no_evidence and evidence.has(seed=chosen.seed)):
        return None
    from tests.chaos import late_orders  # with Ray, which the sleepers above are forked without

    return keep(chosen, evidence, late_orders.run(chosen.seed, chosen.orders), "postgres")
