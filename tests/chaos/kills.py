"""kill -9 of whatever there is, again and again, while clients submit; then everything is accounted for.

One batch is one service with a database of its own. A batch is known by its seed: one that the evidence holds
already is not run again.
"""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.databases import DURABILITY, a_database
from tests.chaos.load import Load
from tests.chaos.rig import DEVICE_MB, RIGS, Rig
from tests.chaos.verdict import Verdict, judge


@dataclass(frozen=True)
class Batch:
    database: str
    engine: str
    seed: int
    kills: int
    tasks_per_kill: int


def run(batch: Batch) -> dict[str, Any]:
    """The record of this batch for the evidence. What is wrong is in it in words."""
    with (
        tempfile.TemporaryDirectory(prefix="gpb-chaos-") as place,
        a_database(batch.database, Path(place)) as url,
    ):
        rig = RIGS[batch.engine](Path(place), url)
        chance = Random(f"{batch.seed}/{batch.engine}/{batch.database}")
        load = Load(rig.homes, rig.folder / "told", rig.kind(), f"{batch.seed}")
        try:
            rig.start()
            with rig.watch:
                asyncio.run(_fire(batch, rig, load, chance))
                rig.settle()
        finally:
            rig.stop()
        found = judge(url, rig.folder, load.contradictions, DEVICE_MB)
        return _record(batch, rig, found)


async def _fire(batch: Batch, rig: Rig, load: Load, chance: Random) -> None:
    for target in by_turns(rig.targets, chance):
        if sum(rig.kills.values()) >= batch.kills:
            return
        submitting = asyncio.create_task(load.submit(batch.tasks_per_kill))
        await load.reaches(load.accepted + chance.randrange(batch.tasks_per_kill))
        await asyncio.to_thread(rig.kill, target, chance)
        await submitting


def by_turns(targets: Sequence[str], chance: Random) -> Iterator[str]:
    while True:
        yield from chance.sample(targets, len(targets))


def _record(batch: Batch, rig: Rig, found: Verdict) -> dict[str, Any]:
    return {
        "seed": batch.seed,
        "engine": batch.engine,
        "durability": DURABILITY[batch.database],
        "kills": dict(sorted(rig.kills.items())),
        "acknowledged": found.acknowledged,
        "lost": found.lost,
        "accepted_twice": found.accepted_twice,
        "double_leased_mb": found.double_leased_mb,
        "started_twice": found.started_twice,
        "released_early": found.released_early,
        "leases_left": found.leases_left,
        "events": found.events,
        "runs_seen": found.runs,
        "wrong": found.wrong,
    }
