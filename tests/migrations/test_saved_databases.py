"""Every kind of event and row that an earlier release has written is read as that release read it."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from gpubroker_server.adapters.sql.store import SqlStore, migrate
from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.holders import External, Model, WorkerSeat
from gpubroker_server.core.domain.task import Move, Task
from gpubroker_server.core.domain.units import Position, Seconds, TaskId
from gpubroker_server.core.world.payload import HOLDER_FIELDS, fields_of_holder
from gpubroker_server.core.world.world import World
from msgspec import Struct
from msgspec.structs import replace

from tests.builders import GIB
from tests.chaos.scene import Scene
from tests.contracts.lived_in import live_in
from tests.contracts.scenes import opened, picture, replayed
from tests.core.gangs import bundles
from tests.e2e.released import unpacked
from tests.e2e.service_process import ROOT, environment
from tests.migrations.saved.read import read

SAVED = Path(__file__).parent / "saved"
RELEASES = ("0.2.0", "569b27b1")
"""The last release, and a commit after it."""
KINDS = {
    "task.submitted", "task.admitted", "task.started", "task.changed", "task.stopping", "task.requeued",
    "task.succeeded", "task.failed", "lease.reserved", "lease.held", "lease.overused", "lease.quarantined",
    "lease.released", "pledge.made", "pledge.consumed", "request.made", "request.done", "node.seen",
    "device.seen", "estimate.learned", "estimate.forgotten", "memory.fragmented",
}  # fmt: skip
LATER_KINDS = {
    "cordon.changed", "queue.paused", "queue.resumed", "stream.changed", "stream.removed",
    "worker_set.formed", "worker_set.changed", "worker_set.over",
}  # fmt: skip
"""Release 0.2.0 does not write them."""


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved(release: str, tmp_path: Path) -> str:
    """The URL of a copy at the newest schema."""
    path = tmp_path / "gpubroker.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((SAVED / f"{release}.sql").read_text())
    migrate(f"sqlite:///{path}", "head")
    return f"sqlite:///{path}"


def read_by(release: str) -> dict[str, Any]:
    """What that release read from it."""
    known: dict[str, Any] = json.loads((SAVED / f"{release}.json").read_text())
    return known


def assert_has(found: Any, expected: Any) -> None:
    """Fields that were added since are left out of the comparison."""
    match expected:
        case dict() if isinstance(found, Struct):
            for name, value in expected.items():
                assert_has(getattr(_having(found, name), name), value)
        case list():
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert_has(one, other)
        case _:
            assert (found.decode() if isinstance(found, bytes) else found) == expected


def _having(found: Struct, name: str) -> Struct:
    """Return what has the field: earlier releases have those of holders beside the others."""
    if isinstance(found, Task) and name in HOLDER_FIELDS:
        return fields_of_holder(found.holder)
    return found


async def test_rows_of_an_earlier_release_have_their_values(release: str, saved: str) -> None:
    expected = read_by(release)
    specs = expected.pop("specs")
    kinds = set(expected.pop("kinds"))
    assert kinds == (KINDS if release == "0.2.0" else KINDS | LATER_KINDS)
    async with opened(saved) as store:
        snapshot = await store.snapshot()
        for part, values in expected.items():
            assert values, f"{release} has saved no {part}"
            assert_has(getattr(snapshot, part), values)
        found = await store.specs([TaskId(id) for id in specs])
        for id, values in specs.items():
            assert_has(found[TaskId(id)], values)


async def test_events_of_an_earlier_release_make_the_world_of_its_rows(saved: str) -> None:
    async with opened(saved) as store:
        world = World()
        fill(world, await store.snapshot())
        assert picture(replayed(await store.events(Position(0), 10_000))) == picture(world)


async def live_with_holders(store: SqlStore) -> None:
    """Leave a task with each kind of holder in the database, and changes of those that change."""
    await live_in(store)
    scene = await Scene.on(store, (await store.leader()).term)
    model = Model("main", "llm", steps=("a",))
    await scene.submit("model", gpu_mb=GIB, priority=90, holder=model)
    await scene.submit("lease", gpu_mb=GIB, priority=90, holder=External(Seconds(60.0), 4711))
    await scene.submit("worker", priority=90, holder=WorkerSeat(TaskId("worker")))
    await scene.submit("inference", gpus=0, gpu_mb=None, answered_by="llm")
    await scene.submit("waits", bundles=bundles(2, gpu_mb=GIB), priority=90)
    await scene.commit(scene.plan())
    loaded = replace(model, pinned=True, load_seconds=Seconds(4.0))
    started = write_move(scene.task("model"), Move.STARTED, started_at=scene.now, holder=loaded)
    await scene.commit([Decision("model", "loaded", tasks=(started,))])
    await scene.commit(scene.apply_reports(*scene.starts("waits"), *scene.gets_ready("waits")))


FOLLOWERS = ("0.2.0", "569b27b1")


def software_of(release: str, folder: Path) -> str:
    """Return where to import from what that release reads a log with."""
    if release == "0.2.0":
        return unpacked(folder)
    with zipfile.ZipFile(ROOT / f"tests/releases/{release}.zip") as archive:
        archive.extractall(folder)
    return f"{folder / 'service'}:{folder / 'client'}"


@pytest.mark.parametrize("release", FOLLOWERS)
async def test_an_earlier_release_reads_the_log_of_this_one(release: str, tmp_path: Path) -> None:
    """Its processes follow the log while a cluster is upgraded process by process."""
    url = f"sqlite:///{tmp_path / 'gpubroker.db'}"
    migrate(url, "head")
    async with opened(url) as store:
        await live_with_holders(store)
    expected = json.loads(json.dumps(await read(url)))
    tasks = expected["tasks"]
    assert {"gang", "running", "model", "lease", "worker", "inference", "waits"} <= tasks.keys()
    assert (tasks["model"]["model"]["pinned"], tasks["lease"]["external"]["pid"]) == (True, 4711)
    assert (tasks["worker"]["array"], len(tasks["waits"]["members"])) == ("worker", 2)
    if release == "0.2.0":
        tasks["worker"]["array"] = None  # it does not know arrays
    found = await asyncio.to_thread(
        cast("Any", subprocess.run),
        [sys.executable, SAVED / "read.py", url],
        env=environment(PYTHONPATH=software_of(release, tmp_path / "released")),
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == expected
