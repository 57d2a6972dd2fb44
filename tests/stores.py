"""The real store on SQLite, cheap enough for a test to have one of its own.

The schema is migrated once in a process; each store has a copy of that file, in memory if there is room
(`tests.places`).
"""

import asyncio
import atexit
import shutil
import tempfile
import time
from asyncio import events
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from gpubroker_server.adapters.sql.database import Database
from gpubroker_server.adapters.sql.session import READERS, Readers
from gpubroker_server.adapters.sql.sqlite import SqliteFile, SqliteSession, connect_beside
from gpubroker_server.adapters.sql.store import SqlStore, migrate
from gpubroker_server.adapters.sql.writer import Work, Writer
from gpubroker_server.core.domain.decisions import AuditNote
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import Clock
from sqlalchemy import Engine, QueuePool, create_engine

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(READERS, thread_name_prefix="gpubroker-reader")
_numbers = count(1)
_free: list["_Place"] = []
_open: set["SqliteStore"] = set()


@cache
def migrated_file() -> Path:
    """Return a database right after its migration, to be copied: all revisions together take a second."""
    folder = Path(tempfile.mkdtemp(prefix="gpb-stores-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    migrate(f"sqlite:///{folder / 'migrated.db'}", "head")
    return folder / "migrated.db"


@cache
def _first_rows() -> Mapping[str, Sequence[Sequence[Any]]]:
    """Return the rows of each table right after the migration."""
    with closing(connect_beside(migrated_file())) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for (name,) in tables}


class _KeptSession(SqliteSession):
    def close(self) -> None:
        """Leave the connection open for the next store."""


class _KeptReaders(Readers):
    """Readers whose threads and connections stay for the next store: most tests are over sooner than a thread
    has started."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._threads = _THREADS

    def close(self) -> None:
        """Leave the threads running for the next store."""


class _Place:
    """A file and its connections, which one store after another uses.

    Opening a file, and having SQLite and SQLAlchemy prepare their statements again, takes longer than most
    tests.
    """

    def __init__(self) -> None:
        self.path = migrated_file().with_name(f"{next(_numbers)}.db")
        shutil.copyfile(migrated_file(), self.path)
        self._clock: Clock | None = None
        file = SqliteFile(self.path, self)
        self._writer = file.writer()
        self._readers = create_engine(
            "sqlite://", creator=file.reader, poolclass=QueuePool, pool_size=READERS, max_overflow=0
        )

    def now(self) -> Instant:
        return Instant(time.time()) if self._clock is None else self._clock.now()

    def database(self, clock: Clock | None) -> Database:
        """Return the database as it was right after its migration, with the time of this clock."""
        self._clock = clock
        return Database(_KeptSession(self._writer, clock), self._readers, "BEGIN", self._release)

    def _release(self) -> None:
        assert not self._writer.in_transaction
        self._writer.execute("BEGIN IMMEDIATE")
        for table, rows in _first_rows().items():
            self._writer.execute(f"DELETE FROM {table}")
            for row in rows:
                marks = ", ".join("?" * len(row))
                self._writer.execute(f"INSERT INTO {table} VALUES ({marks})", row)
        self._writer.execute("COMMIT")
        _free.append(self)


class SqliteStore(SqlStore):
    """A store with a database of its own. `close_stores` closes it if its test has not."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        readers: type[Readers] = _KeptReaders,
        writer: type[Writer] = Writer,
    ) -> None:
        place = _free.pop() if _free else _Place()
        self.path = place.path
        super().__init__(place.database(clock), readers=readers, writer=writer)
        _open.add(self)

    def audited(self) -> list[AuditNote]:
        """Return the audit log without its notes about tokens and terms, with which most tests begin."""
        columns = "at, tenant, actor, action, subject, reason"
        ours = "action NOT LIKE 'token.%' AND action <> 'term.taken'"
        with closing(connect_beside(self.path)) as connection:
            rows = connection.execute(f"SELECT {columns} FROM audit WHERE {ours} ORDER BY id")
            return [AuditNote(*row) for row in rows]

    async def close(self) -> None:
        _open.discard(self)
        self._wake_writer()
        self._close()  # not on a thread, as the service does, which would have to be started


async def close_stores() -> None:
    for store in list(_open):
        await store.close()


def are_stores_open() -> bool:
    return bool(_open)


class _AtOnce(_KeptReaders):
    async def run(self, query: Callable[..., T], *values: Any) -> T:
        return self.query(query, *values)


class _InStep(Writer):
    def start(self) -> None:
        """There is no thread."""

    def put(self, works: Sequence[Work]) -> None:
        self.carry_out(works)

    def answer(self, events: Sequence[Event], works: Sequence[Work]) -> None:
        if works:
            self._deliver(events, works)

    def close(self) -> None:
        """There is nothing to wait for."""


class SteppedStore(SqliteStore):
    """A SqliteStore without threads, for simulations, which have a time of their own.

    A call is over, and all listeners have heard what it wrote, before anything else happens.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock, readers=_AtOnce, writer=_InStep)

    def _hand_over(self, work: Work) -> None:
        # Instead of in the next turn of the event loop: between two turns other things happen.
        self._check_listeners()
        self._writer.put([work])


class _NoLoop(asyncio.AbstractEventLoop):
    """An event loop for calls that are over when they return, and yet make futures."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def get_debug(self) -> bool:
        return False


_NO_LOOP = _NoLoop()  # type: ignore[abstract]  # as little of it as is needed


def at_once(call: Coroutine[Any, Any, T]) -> T:
    """Return the answer of a `SteppedStore`, also where no event loop runs."""
    running = events._get_running_loop()
    events._set_running_loop(_NO_LOOP)
    try:
        call.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    finally:
        events._set_running_loop(running)
    raise AssertionError("it waits")
