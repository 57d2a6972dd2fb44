"""A small disk that the disk guard of a real node looks after, and what has to become of its files."""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from gpubroker import Broker
from gpubroker.wire.nodes import NodeDisk

from tests.chaos.database import Reader
from tests.e2e.service_process import until
from tests.mounts import mounted

KIB = 1024
ROOTS = "logs", "databases", "checkpoints", "copies"
DAY = 86_400.0
COPY = ["find", "-type", "f", "!", "-name", "not-copied", "-printf", r"%s %P\0"]
OLD = ["logs/old.log", "databases/empty.db", "checkpoints/job/step-1", "copies/copied"]
"""What goes, in this order, until the disk has room again."""
KEPT = {
    "logs/open.log", "logs/young.log", "logs/link.log", "databases/rows.db", "databases/journal.db",
    "databases/journal.db-journal", "checkpoints/job/step-2", "copies/not-copied",
}  # fmt: skip


class GuardedDisk:
    def __init__(self, place: Path) -> None:
        """The machine's own disk closes the node from 96 % on."""
        self.place = place
        for root in ROOTS:
            (place / root).mkdir()

    @property
    def settings(self) -> dict[str, Any]:
        roots: list[dict[str, Any]] = [{"path": str(self.place / name), "class": name} for name in ROOTS]
        roots[-1] |= {"class": "redundant", "sync_command": COPY}
        levels = {"warn_percent": 90, "clean_percent": 95, "block_percent": 96}
        return {"disk": {**levels, "roots": roots}}

    def is_cleaned(self, broker: Broker, audited: Callable[[], Sequence[str]]) -> None:
        """Filled, it closes its node; the guard shows what would go, deletes that and nothing else, and the
        node is open again. `audited`: what the audit log says of it."""
        self._fill()
        until(lambda: any(one.ready for one in broker.nodes()), "its node answers")
        [node] = (one.name for one in broker.nodes())
        before = len(audited())
        until(lambda: "block" in _levels_told(broker), "the disk is full")
        waiting = broker.submit("tests.e2e.work:add", 1, 2, cpu=0.1)
        until(lambda: broker.explain(waiting).reason == "DiskFull", "nothing starts there")
        with (self.place / "logs" / "open.log").open():
            until(lambda: _dry_runs(broker) != [], "the guard's own first pass, which deletes nothing")
            would_go = _cleaned(broker, node)
            assert not would_go.deleted
            assert [file.path for file in would_go.files] == self._paths(OLD)
            assert (self._left(), len(audited())) == ({*OLD, *KEPT}, before)

            gone = _cleaned(broker, node, dry_run=False)
        assert (gone.deleted, gone.files) == (True, would_go.files)
        assert self._left() == KEPT
        assert list(audited())[before:] == [f"{node}:{path}" for path in self._paths(OLD)]
        assert broker.result(waiting) == 3

    def _paths(self, names: Sequence[str]) -> list[str]:
        return [str(self.place / name) for name in names]

    def _left(self) -> set[str]:
        found = (path for path in self.place.rglob("*") if path.is_file() or path.is_symlink())
        return {str(path.relative_to(self.place)) for path in found}

    def _fill(self) -> None:
        """With 7900 of 8192 KiB, of which 527 have to go. What may go has 608; without the last 408."""
        self._put("logs/old.log", 200, days=10)
        self._put("logs/open.log", 200, days=10)
        (self.place / "logs/link.log").symlink_to(self._put("../precious.log", 1, days=10))
        for name, rows in (("empty", 0), ("rows", 1), ("journal", 0)):
            with closing(sqlite3.connect(self._put(f"databases/{name}.db", 0, days=10))) as database:
                database.execute("CREATE TABLE run (n)")
                database.executemany("INSERT INTO run VALUES (?)", [(n,) for n in range(rows)])
                database.commit()
            _age(self.place / f"databases/{name}.db", days=10)
        self._put("databases/journal.db-journal", 0, days=10)
        for step in (1, 2):
            self._put(f"checkpoints/job/step-{step}", 200, days=20 - step)
        self._put("copies/copied", 200, days=10)
        self._put("copies/not-copied", 200, days=10)
        disk = shutil.disk_usage(self.place)
        self._put("logs/young.log", 7900 - disk.used // KIB, days=6)

    def _put(self, name: str, kib: int, *, days: float) -> Path:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(kib * KIB))
        _age(path, days=days)
        return path


def _age(path: Path, *, days: float) -> None:
    at = time.time() - days * DAY
    os.utime(path, (at, at))


def _cleaned(broker: Broker, node: str, *, dry_run: bool = True) -> NodeDisk:
    answer = broker.clean(node, dry_run=dry_run)
    assert not answer.message
    return answer


def _dry_runs(broker: Broker) -> list[Any]:
    return [event for event in broker.events(last=100) if event.kind == "fleet.DISK_DRY_RUN"]


def _levels_told(broker: Broker) -> set[str]:
    events = broker.events(last=100)
    return {event.fields["level"] for event in events if event.kind == "fleet.DISK_SPACE_LOW"}


def audited(url: str) -> Callable[[], list[str]]:
    """Subjects of the deletions in the audit log of this database, in their order."""

    def subjects() -> list[str]:
        with closing(Reader(url)) as reader:
            found = reader.rows("SELECT subject FROM audit WHERE action = 'disk.delete' ORDER BY id")
        return [subject for (subject,) in found]

    return subjects


@contextmanager
def guarded_disk(place: Path) -> Iterator[GuardedDisk]:
    with mounted(place, "-t", "tmpfs", "-o", "size=8m", "none"):
        yield GuardedDisk(place)
