"""Power loss on SQLite: disk images that a power cut may leave, and whether all acknowledged tasks are there.

The store does real work on Python's own SQLite, and each statement of its writer is recorded. The same
statements, with the same settings, then run on a virtual file system that records every write and sync. From
that, disk images are made as a power cut may leave them, and the store is opened on each.
"""

import argparse
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
from gpubroker_server.adapters.sql.store import SqlStore, migrate
from gpubroker_server.adapters.sql.system_tables import SQLITE_NOW
from gpubroker_server.core.domain.units import Term
from msgspec import Struct

from tests.chaos.database import Checker, Reader
from tests.chaos.disk import Answered, Disk, Image, crashes
from tests.chaos.evidence import Evidence, add_seeds, on_database, run_seeds
from tests.chaos.operations import OPERATIONS
from tests.chaos.scene import Scene
from tests.chaos.sweep import without_startup_checks
from tests.contracts.scenes import next_term

FILE = "gpubroker.db"
SETTINGS = (
    "PRAGMA busy_timeout = 5000",
    "PRAGMA locking_mode = EXCLUSIVE",  # only here: otherwise SQLite needs a VFS with shared memory
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = {}",
    "PRAGMA fullfsync = ON",
    "PRAGMA cache_size = -32768",
)
"""The settings of `adapters/sql/sqlite.py`."""
SUMMED = (
    "images", "different", "acknowledged", "lost", "stale",
    "normal_images", "normal_acknowledged", "normal_lost", "normal_stale",
)  # fmt: skip
_SUBMITS = 3
"""Tasks submitted after each operation."""
_POSITION = "SELECT position FROM log_head"


class Statement(Struct, frozen=True):
    """A statement of the writer, and the position of the log when it was answered."""

    text: str
    values: Sequence[Any]
    position: int


@dataclass
class Recording:
    """The statements of the writer, and the tasks that were acknowledged."""

    before: bytes = b""
    """The database file at the beginning."""
    statements: list[Statement] = field(default_factory=list)
    acknowledged: list[tuple[int, str]] = field(default_factory=list)
    """(number of statements answered before, id of the acknowledged task)"""


@dataclass
class Outcome:
    """The result of a number of power cuts."""

    images: int = 0
    different: int = 0
    """Distinct images."""
    acknowledged: int = 0
    """Acknowledged tasks, summed over all images."""
    lost: int = 0
    """Acknowledged tasks that are missing."""
    stale: int = 0
    """Images in which anything that was answered is missing."""
    wrong: list[str] = field(default_factory=list)


class _RecordedConnection:
    """The writer's connection; records each of its statements."""

    def __init__(self, connection: sqlite3.Connection, into: Recording, scene: Scene) -> None:
        self._connection, self._into, self._scene = connection, into, scene
        self._known: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, text: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        self.record_acknowledged()
        answer = self._connection.execute(text, values)
        position = self._into.statements[-1].position if self._into.statements else 0
        if text == "COMMIT":
            [(position,)] = self._connection.execute(_POSITION)
        self._into.statements.append(Statement(text, values, position))
        return answer

    def record_acknowledged(self) -> None:
        new = self._scene.accepted - self._known
        self._into.acknowledged += [(len(self._into.statements), id) for id in sorted(new)]
        self._known |= new


def work(seed: int, folder: Path) -> Recording:
    """Run every operation once, in random order, with submits in between. Nothing is pruned, since the rows
    are compared with the whole log."""
    path = folder / FILE
    migrate(f"sqlite:///{path}", "head")
    return asyncio.run(_work(Random(f"{seed}/work"), path, Recording(path.read_bytes())))


async def _work(chance: Random, path: Path, recording: Recording) -> Recording:
    known = database.open_database(f"sqlite:///{path}")
    store = SqlStore(known)
    try:
        scene = await Scene.on(store, Term(0))
        session: Any = known.session
        session._connection = recorded = _RecordedConnection(session._connection, recording, scene)
        scene.term = await next_term(store)
        await scene.commit(scene.node_answers())
        names = sorted(name for name, operation in OPERATIONS.items() if not operation.prunes)
        for number, name in enumerate(chance.sample(names, len(names))):
            operation, id = OPERATIONS[name], f"t{number:03}"
            await operation.before(scene, id)
            await operation.act(scene, id)
            for n in range(_SUBMITS):
                await scene.submit(f"{id}-new-{n}")
            await scene.finish()
        recorded.record_acknowledged()
    finally:
        await store.close()
    return recording


def _now(*_values: Any) -> float:
    return time.time()


def write(recording: Recording, folder: Path, synchronous: str) -> Disk:
    """Run the recorded statements on a disk that records its writes."""
    path = folder / FILE
    path.write_bytes(recording.before)
    disk = Disk(f"recorded-{synchronous}")
    connection = apsw.Connection(str(path), vfs=disk.name)
    connection.create_scalar_function(SQLITE_NOW, _now, 0)
    try:
        for setting in SETTINGS:
            connection.execute(setting.format(synchronous)).fetchall()
        for answered, statement in enumerate(recording.statements, 1):
            connection.execute(statement.text, tuple(statement.values)).fetchall()
            disk.steps.append(Answered(answered))
        disk.steps = list(disk.steps)  # without the steps of closing
    finally:
        connection.close()
    return disk


def cut(recording: Recording, disk: Disk, images: int, chance: Random) -> Outcome:
    """Power cuts: a third right after the answer to a COMMIT, a third during checkpoints of the WAL, the rest
    at any moment."""
    answered = [
        point
        for point, step in enumerate(disk.steps, 1)
        if isinstance(step, Answered) and recording.statements[step.statements - 1].text == "COMMIT"
    ]
    checkpoints = [
        point
        for point, step in enumerate(disk.steps, 1)
        if not isinstance(step, Answered) and step.file == FILE
    ]
    third = images // 3
    points = chance.choices(answered, k=third) + chance.choices(checkpoints, k=third)
    points += [chance.randrange(len(disk.steps) + 1) for _ in range(images - len(points))]
    outcome, seen = Outcome(), set()
    with without_startup_checks():
        for statements, image in crashes(disk.steps, {FILE: recording.before}, points, chance):
            seen.add(hash(tuple(sorted(image.items()))))
            with _folder() as folder:
                _check_image(recording, statements, image, folder, outcome)
    outcome.different = len(seen)
    return outcome


def _check_image(recording: Recording, statements: int, image: Image, folder: Path, outcome: Outcome) -> None:
    for name, content in image.items():
        (folder / name).write_bytes(content)
    outcome.images += 1
    acknowledged = {id for answered, id in recording.acknowledged if answered <= statements}
    outcome.acknowledged += len(acknowledged)
    where = f"image {outcome.images}, after {statements} statements"
    try:
        reader = Reader(f"sqlite:///{folder / FILE}")
        [(integrity,)] = reader.rows("PRAGMA integrity_check")
        lost = acknowledged - {id for (id,) in reader.rows("SELECT id FROM task")}
        [(position,)] = reader.rows(_POSITION)
        wrong = asyncio.run(_check(reader, folder)) if integrity == "ok" else [integrity]
        reader.close()
    except sqlite3.Error as error:
        outcome.wrong.append(f"{where}: {error}")
        return
    outcome.lost += len(lost)
    outcome.stale += bool(lost) or position < (
        recording.statements[statements - 1].position if statements else 0
    )
    outcome.wrong += [f"{where}: {one}" for one in wrong]


async def _check(reader: Reader, folder: Path) -> list[str]:
    store = SqlStore(database.open_database(f"sqlite:///{folder / FILE}"))
    try:
        return await Checker(reader).check(store)
    finally:
        await store.close()


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory if possible: the syncs of this machine's disk do not matter here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="gpb-power-", dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        yield Path(folder)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=int, default=250, help="disk images per batch")
    add_seeds(parser)


def command(options: argparse.Namespace) -> None:
    evidence = Evidence("power-loss", SUMMED, trials=("images",))
    run_seeds(options, evidence, lambda seed: run(seed, options.images), **on_database("sqlite"))


def cut_power(seed: int, images: int, synchronous: str) -> Outcome:
    with _folder() as folder:
        recording = work(seed, folder)
        disk = write(recording, folder, synchronous)
    return cut(recording, disk, images, Random(f"{seed}/{synchronous}"))


def run(seed: int, images: int) -> dict[str, Any]:
    """The record of this batch: with synchronous=FULL, as in the service, and for comparison with NORMAL."""
    full, normal = cut_power(seed, images, "FULL"), cut_power(seed, images // 5, "NORMAL")
    return {
        "seed": seed,
        "sqlite_writes": apsw.sqlite_lib_version(),
        "sqlite_reads": sqlite3.sqlite_version,
        "images": full.images,
        "different": full.different,
        "acknowledged": full.acknowledged,
        "lost": full.lost,
        "stale": full.stale,
        "normal_images": normal.images,
        "normal_acknowledged": normal.acknowledged,
        "normal_lost": normal.lost,
        "normal_stale": normal.stale,
        "wrong": full.wrong[:20] + normal.wrong[:20],
    }
