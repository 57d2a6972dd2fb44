"""kill -9 of random processes while clients submit tasks; afterwards every promise is checked.

A batch is one service with its own database, identified by its seed.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from tests.chaos.database import DURABILITY, a_database
from tests.chaos.deployment import DEPLOYMENTS, DEVICE_MB, Deployment
from tests.chaos.evidence import Evidence, add_seeds, run_seeds
from tests.chaos.load import Load
from tests.chaos.verdict import judge

SUMMED = (
    "kills", "acknowledged", "lost", "accepted_twice", "double_leased_mb", "started_twice", "released_early",
    "leases_left", "events", "runs_seen",
)  # fmt: skip


class Batch(Struct, frozen=True):
    database: str
    engine: str
    seed: int
    kills: int
    tasks_per_kill: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--database", choices=sorted(DURABILITY), required=True, help="of the service")
    parser.add_argument("--engine", choices=sorted(DEPLOYMENTS), default="simulated", help="what is deployed")
    parser.add_argument("--kills", type=int, default=20, help="kills per batch")
    parser.add_argument("--tasks-per-kill", type=int, default=105, help="tasks submitted per kill")
    add_seeds(parser)


def command(options: argparse.Namespace) -> None:
    evidence = Evidence(f"kill-{options.database}", SUMMED, trials=("kills", "acknowledged"))
    how = options.kills, options.tasks_per_kill
    run_seeds(
        options,
        evidence,
        lambda seed: run(Batch(options.database, options.engine, seed, *how)),
        engine=options.engine,
        database=options.database,
    )


def run(batch: Batch) -> dict[str, Any]:
    """The record of this batch; `wrong` lists what is wrong, in words."""
    with (
        tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place,
        a_database(batch.database, Path(place)) as url,
    ):
        deployment = DEPLOYMENTS[batch.engine](Path(place), url)
        chance = Random(f"{batch.seed}/{batch.engine}/{batch.database}")
        load = Load(deployment.data_dirs, deployment.folder / "answers", deployment.kind(), f"{batch.seed}")
        try:
            deployment.start()
            with deployment.observer:
                asyncio.run(_kill_under_load(batch, deployment, load, chance))
                deployment.drain()
        finally:
            deployment.stop()
        verdict = judge(url, deployment.folder, load.contradictions, DEVICE_MB)
        return {
            "seed": batch.seed,
            "engine": batch.engine,
            "durability": DURABILITY[batch.database],
            "kills": dict(sorted(deployment.kills.items())),
            **verdict.counts("acknowledged", "lost", "accepted_twice", "double_leased_mb"),
            **verdict.counts("started_twice", "released_early", "leases_left", "events", "runs_seen"),
            "wrong": verdict.wrong,
        }


async def _kill_under_load(batch: Batch, deployment: Deployment, load: Load, chance: Random) -> None:
    for target in in_rounds(deployment.targets, chance):
        if sum(deployment.kills.values()) >= batch.kills:
            return
        submitting = asyncio.create_task(load.submit(batch.tasks_per_kill))
        await load.reaches(load.accepted + chance.randrange(batch.tasks_per_kill))
        await asyncio.to_thread(deployment.kill, target, chance)
        await submitting


def in_rounds(targets: Sequence[str], chance: Random) -> Iterator[str]:
    """Every target once, in random order, again and again."""
    while True:
        yield from chance.sample(targets, len(targets))
