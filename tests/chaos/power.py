"""Power cuts on SQLite: what a disk may hold after one, and whether all that was promised is there.

The store does real work on Python's own SQLite, and each statement of its writer is noted. The same
statements, with the same settings, then run on a disk that notes every write and every sync. From that,
disks are made up as a power cut may leave them; on each the store is opened as it is after a crash.
"""

import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import apsw
from gpubroker_server.adapters.sql import database
from gpubroker_server.adapters.sql.columns import SQLITE_NOW
from gpubroker_server.adapters.sql.store import SqlStore, migrate
from gpubroker_server.core.domain.units import Term

from tests.chaos.disk import Disk, Image, Told, crashes
from tests.chaos.operations import OPERATIONS
from tests.chaos.rows import Answers, Rows
from tests.chaos.scene import Scene
from tests.chaos.sweep import migrated_before
from tests.contracts.scenes import next_term

FILE = "gpubroker.db"
SETTINGS = (
    "PRAGMA busy_timeout = 5000",
    "PRAGMA locking_mode = EXCLUSIVE",  # of the notes alone: without it, SQLite wants shared memory of a VFS
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = {}",
    "PRAGMA fullfsync = ON",
    "PRAGMA cache_size = -32768",
)
"""As `adapters/sql/sqlite.py` sets them."""
SUMMED = (
    "images", "different", "promised", "lost", "forgetful",
    "normal_images", "normal_promised", "normal_lost", "normal_forgetful",
)  # fmt: skip
_NEWCOMERS = 3
_POSITION = "SELECT position FROM log_head"


@dataclass(frozen=True, slots=True)
class Sent:
    """A statement of the writer, and what had been promised when its answer was there."""

    text: str
    values: Sequence[Any]
    position: int


@dataclass
class Workload:
    """What the writer was asked, and how much of it is promised by which statement."""

    before: bytes = b""
    """The file when it began."""
    sent: list[Sent] = field(default_factory=list)
    told: list[tuple[int, str]] = field(default_factory=list)
    """(statements answered before, the task that was said to be accepted)"""


@dataclass
class Found:
    """After so many power cuts."""

    images: int = 0
    different: int = 0
    """Of those."""
    promised: int = 0
    """Tasks of which somebody was told, over all images."""
    lost: int = 0
    """Of those."""
    forgetful: int = 0
    """Images in which anything is missing that was answered."""
    wrong: list[str] = field(default_factory=list)


class _Noted:
    """The writer's connection, with each of its statements noted."""

    def __init__(self, connection: sqlite3.Connection, into: Workload, scene: Scene) -> None:
        self._connection, self._into, self._scene = connection, into, scene
        self._known: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, text: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        self.note_promises()
        answer = self._connection.execute(text, values)
        position = self._into.sent[-1].position if self._into.sent else 0
        if text == "COMMIT":
            [(position,)] = self._connection.execute(_POSITION)
        self._into.sent.append(Sent(text, values, position))
        return answer

    def note_promises(self) -> None:
        news = self._scene.accepted - self._known
        self._into.told += [(len(self._into.sent), id) for id in sorted(news)]
        self._known |= news


def work(seed: int, folder: Path) -> Workload:
    """Every operation once, in any order; newcomers among them. But nothing is taken out: after the cut, all
    that is there is held against the whole log."""
    path = folder / FILE
    migrate(f"sqlite:///{path}", "head")
    return asyncio.run(_work(Random(f"{seed}/work"), path, Workload(path.read_bytes())))


async def _work(chance: Random, path: Path, workload: Workload) -> Workload:
    known = database.open_database(f"sqlite:///{path}")
    store = SqlStore(known)
    try:
        scene = await Scene.on(store, Term(0))
        session: Any = known.session
        session._connection = noted = _Noted(session._connection, workload, scene)
        scene.term = await next_term(store)
        await scene.carry(scene.node_answers())
        names = sorted(name for name, operation in OPERATIONS.items() if not operation.takes_out)
        for number, name in enumerate(chance.sample(names, len(names))):
            operation, id = OPERATIONS[name], f"t{number:03}"
            await operation.before(scene, id)
            await operation.act(scene, id)
            for newcomer in range(_NEWCOMERS):
                await scene.submit(f"{id}-new-{newcomer}")
            await scene.finish()
        noted.note_promises()
    finally:
        await store.close()
    return workload


def write(workload: Workload, folder: Path, synchronous: str) -> Disk:
    """Do that work on a disk that takes notes."""
    path = folder / FILE
    path.write_bytes(workload.before)
    disk = Disk(f"noted-{synchronous}")
    connection = apsw.Connection(str(path), vfs=disk.name)
    connection.create_scalar_function(SQLITE_NOW, time.time, 0)
    try:
        for setting in SETTINGS:
            connection.execute(setting.format(synchronous)).fetchall()
        for answered, sent in enumerate(workload.sent, 1):
            connection.execute(sent.text, tuple(sent.values)).fetchall()
            disk.steps.append(Told(answered))
        disk.steps = list(disk.steps)  # what closing does comes after the last power cut
    finally:
        connection.close()
    return disk


def cut(workload: Workload, disk: Disk, images: int, chance: Random) -> Found:
    """So many power cuts: a third when COMMIT was just answered, a third while the log is carried over into
    the file, and the others at any moment."""
    answered = [
        point
        for point, step in enumerate(disk.steps, 1)
        if isinstance(step, Told) and workload.sent[step.statements - 1].text == "COMMIT"
    ]
    carried_over = [
        point for point, step in enumerate(disk.steps, 1) if not isinstance(step, Told) and step.file == FILE
    ]
    third = images // 3
    points = chance.choices(answered, k=third) + chance.choices(carried_over, k=third)
    points += [chance.randrange(len(disk.steps) + 1) for _ in range(images - len(points))]
    found, seen = Found(), set()
    with migrated_before():
        for statements, image in crashes(disk.steps, {FILE: workload.before}, points, chance):
            seen.add(hash(tuple(sorted(image.items()))))
            with _folder() as folder:
                _look_at(workload, statements, image, folder, found)
    found.different = len(seen)
    return found


def _look_at(workload: Workload, statements: int, image: Image, folder: Path, found: Found) -> None:
    for name, content in image.items():
        (folder / name).write_bytes(content)
    found.images += 1
    promised = {id for answered, id in workload.told if answered <= statements}
    found.promised += len(promised)
    where = f"image {found.images}, after {statements} statements"
    try:
        answers = Answers(f"sqlite:///{folder / FILE}")
        [(sound,)] = answers.to("PRAGMA integrity_check")
        lost = promised - {id for (id,) in answers.to("SELECT id FROM task")}
        [(position,)] = answers.to(_POSITION)
        wrong = asyncio.run(_check(answers, folder)) if sound == "ok" else [sound]
        answers.close()
    except sqlite3.Error as error:
        found.wrong.append(f"{where}: {error}")
        return
    found.lost += len(lost)
    found.forgetful += bool(lost) or position < (workload.sent[statements - 1].position if statements else 0)
    found.wrong += [f"{where}: {one}" for one in wrong]


async def _check(answers: Answers, folder: Path) -> list[str]:
    store = SqlStore(database.open_database(f"sqlite:///{folder / FILE}"))
    try:
        return await Rows(answers).check(store)
    finally:
        await store.close()


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory where there is such a place: what a sync is good for is not tried on this machine's disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="gpb-power-", dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        yield Path(folder)


def try_out(seed: int, images: int, synchronous: str) -> Found:
    with _folder() as folder:
        workload = work(seed, folder)
        disk = write(workload, folder, synchronous)
    return cut(workload, disk, images, Random(f"{seed}/{synchronous}"))


def run(seed: int, images: int) -> dict[str, Any]:
    """The record for the evidence: under FULL, as the service does it; and, for comparison, under NORMAL."""
    full, normal = try_out(seed, images, "FULL"), try_out(seed, images // 5, "NORMAL")
    return {
        "seed": seed,
        "sqlite_writes": apsw.sqlite_lib_version(),
        "sqlite_reads": sqlite3.sqlite_version,
        "images": full.images,
        "different": full.different,
        "promised": full.promised,
        "lost": full.lost,
        "forgetful": full.forgetful,
        "normal_images": normal.images,
        "normal_promised": normal.promised,
        "normal_lost": normal.lost,
        "normal_forgetful": normal.forgetful,
        "wrong": full.wrong[:20] + normal.wrong[:20],
    }
