"""Statements over many rows, and the interface of the connection that a group commit needs."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    FromClause,
    LargeBinary,
    bindparam,
    column,
    func,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DataError, DBAPIError

from gpubroker_server.core.domain.units import Instant, Position, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import StoreUnavailable, Unstorable

SETTING: Final = "database_url (or --database-url)"
"""Name of the setting in error messages."""
READERS = 4
"""The number of threads that read, and of their connections. A query takes one thread and one connection."""
CLOSED: Final = "the store is closed"
T = TypeVar("T")

Row = tuple[Any, ...]
"""Values in the order of the statement's columns."""

Found = Sequence[Sequence[Any]]
"""Rows that a statement returned."""

Build = Callable[[Any, FromClause], Any]
"""Function that builds the statement from the dialect's `insert` and the table `r` of the given rows."""


class Alike(NamedTuple):
    """Rows of one statement that differ only in their first columns.

    The tasks of a batch are such rows. To make their rows one by one takes 2.5 times the CPU time (`bench
    batch`).
    """

    heads: Sequence[Row]
    tail: Row


class Rows:
    """The rows of one statement."""

    def __init__(self, single: Sequence[Row] = ()) -> None:
        self.single: list[Row] = list(single)
        self.alike: list[Alike] = []

    def __len__(self) -> int:
        if not self.alike:
            return len(self.single)  # as everywhere but in a batch
        return len(self.single) + sum(len(block.heads) for block in self.alike)

    def __iter__(self) -> Iterator[Row]:
        yield from self.single
        for heads, tail in self.alike:
            for head in heads:
                yield head + tail


@dataclass(frozen=True, eq=False)
class SetStatement:
    """A statement that takes any number of rows with the same columns.

    Each step of a statement releases Python's interpreter lock, and each round trip wakes a thread, so a
    group commit has few statements however many rows it has. SQLite takes the rows as VALUES, PostgreSQL as
    one JSON parameter or by COPY: docs/decisions/0002.
    """

    name: str
    columns: tuple[Column[Any], ...]
    build: Build
    exact: bool = False
    """True if each row must be written. A row that is not written was changed or inserted by another
    process."""
    copied: str = ""
    """The table into which PostgreSQL may COPY many rows, because the statement only inserts."""
    names: tuple[str, ...] = field(init=False)
    binary: tuple[int, ...] = field(init=False)
    """Places of the columns that hold bytes."""

    def __post_init__(self) -> None:
        # The names are plain strings: SQLAlchemy's class for names of a Table's columns is slow as a key.
        object.__setattr__(self, "names", tuple(str(c.name) for c in self.columns))
        places = (place for place, c in enumerate(self.columns) if isinstance(c.type, LargeBinary))
        object.__setattr__(self, "binary", tuple(places))


def over(*columns: Column[Any], exact: bool = False) -> Callable[[Build], SetStatement]:
    """Return a decorator that turns a function which builds SQL into a SetStatement that takes rows of these
    columns."""

    def make(build: Build) -> SetStatement:
        return SetStatement(build.__name__.strip("_").replace("_", " "), columns, build, exact)

    return make


def json_text(value: Any) -> str:
    """Return the value as JSON. Raises Unstorable for text that UTF-8 cannot encode."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError as error:
        raise Unstorable(f"a value cannot be stored: {error}") from error


POSTGRES: Any = postgresql.psycopg.dialect()  # type: ignore[no-untyped-call]  # it has no types
"""The dialect in which SQL for PostgreSQL is written. It works without psycopg, which a service on SQLite may
lack."""


@cache
def postgres_text(statement: SetStatement) -> str:
    """Return the SQL of the statement. Its one parameter `rows` takes the JSON that `postgres_rows`
    returns."""
    names: list[ColumnElement[Any]] = [column(c.name, c.type) for c in statement.columns]
    records = func.json_to_recordset(bindparam("rows", type_=JSON()))
    rows = records.table_valued(*names).render_derived(name="r", with_types=True)
    return str(statement.build(postgresql.insert, rows).compile(dialect=POSTGRES))


def postgres_rows(statement: SetStatement, rows: Sequence[Row]) -> str:
    if statement.binary:
        rows = [_with_hex(row, statement.binary) for row in rows]
    return json_text([dict(zip(statement.names, row, strict=True)) for row in rows])


def _with_hex(row: Row, binary: Sequence[int]) -> Row:
    """Return the row with bytes as hexadecimal text, from which PostgreSQL reads bytes inside JSON."""
    plain = list(row)
    for place in binary:
        if plain[place] is not None:
            plain[place] = "\\x" + plain[place].hex()
    return tuple(plain)


class DatabaseRefused(Exception):
    """Raised if a database cannot be used. The text says why, and what to do."""


class GuardMissed(Exception):
    """Raised if fewer rows were written than a statement was given, because other processes have changed or
    inserted some of them."""

    def __init__(self, statement: SetStatement, given: int, written: int) -> None:
        super().__init__(f"{statement.name}: {written} of {given} rows written")
        self.statement = statement


class ConstraintFailed(Exception):
    """Raised if a constraint of a table has refused a row."""


class Collided(Exception):
    """Raised if the database has ended the transaction because of a deadlock or a conflict. A retry may
    succeed."""


class ConnectionLost(Exception):
    """Raised if the connection broke before COMMIT was sent. The database kept nothing of the transaction."""


class CommitUnknown(Exception):
    """Raised if the connection broke after COMMIT was sent, so that it is unknown whether the commit
    succeeded."""

    events: Sequence[Event] = ()
    """The events that are in the log if the commit succeeded."""
    notes: Sequence[Row] = ()
    """The rows that are in the audit log if the commit succeeded."""


class Session(Protocol):
    """The one writing connection of a process. Only the writer's thread uses it.

    Errors of the driver are raised as the exceptions of this module, StoreUnavailable or Unstorable. Other
    errors are bugs and pass unchanged. After any error the transaction must be rolled back.
    """

    server: str
    """The identifier and the timeline of the server that this connection writes to. Another server or
    timeline may lack the last commits. Empty for a file, and if the server does not tell."""

    def begin(self) -> None: ...

    def write(self, statement: SetStatement, rows: Sequence[Row] | Rows) -> None:
        """Send rows. Errors of the statement may be raised as late as in `take_positions`, which waits for
        all answers."""

    def fetch(self, statement: SetStatement, rows: Sequence[Row]) -> Found:
        """Send rows, and return the rows of the answer. Works inside a transaction and outside of one."""

    def fetch_later(self, statement: SetStatement, rows: Sequence[Row]) -> Callable[[], Found]:
        """Send rows, and return a function that returns the rows of the answer. After `take_positions` or
        `commit` the function does not wait."""

    def require_term(self, term: Term) -> None:
        """Lock the leader's row until the commit, and check that `term` is the newest and was taken on this
        server. Raises StaleTerm, here or in `take_positions`."""

    def take_positions(self, events: int) -> tuple[Position, Instant]:
        """Lock the head of the log until the commit. Returns the first of `events` new positions, and the
        database's time. Raises Outgrown if only newer software may use the database."""

    def commit(self) -> None: ...

    def rollback(self) -> None:
        """End the transaction, if one is open. Raises nothing."""

    def has_event(self, event: Event) -> bool:
        """Return True if exactly this event is in the log. Waits for a commit that is under way. The time of
        the event distinguishes it from an equal decision of another leader."""

    def now(self) -> Instant: ...

    def end_stuck_sessions(self) -> None:
        """End other gpubroker sessions that stopped in the middle of a transaction and hold locks, if the
        database does not do so by itself."""

    def notify_resigned(self) -> None:
        """Notify listening processes, at the commit, that the leader has resigned."""

    def reconnect(self) -> None:
        """Connect again. Raises StoreUnavailable."""

    def on_idle(self) -> None:
        """Do the upkeep that would delay writes, now that there are none. Raises nothing."""

    def close(self) -> None: ...


def run_on(threads: ThreadPoolExecutor, act: Callable[[], T]) -> asyncio.Future[T]:
    """Have one of the threads run `act`. Raises StoreUnavailable if the threads are shut down, which the
    store's `close` may do at any time in another thread."""
    try:
        return asyncio.get_running_loop().run_in_executor(threads, act)
    except RuntimeError as shut_down:
        raise StoreUnavailable(CLOSED) from shut_down


class Readers:
    """The threads and connections that read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="gpubroker-reader")

    async def run(self, query: Callable[..., T], *values: Any) -> T:
        """Run the query on a thread. Raises StoreUnavailable, Unstorable."""
        return await run_on(self._threads, partial(self.query, query, *values))

    def query(self, query: Callable[..., T], *values: Any) -> T:
        """Run the query, and repeat it once if the connection turns out to be broken: the server may have
        closed a connection that lay in the pool. Raises StoreUnavailable, Unstorable."""
        for attempt in (1, 2):
            try:
                with self._engine.connect() as connection:
                    return query(connection, *values)
            except DataError as error:
                raise Unstorable(f"no row can hold what was asked for: {error.orig}") from error
            except DBAPIError as error:
                if attempt == 1 and error.connection_invalidated:
                    continue
                raise StoreUnavailable(f"the database cannot be read: {error.orig}") from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._threads.shutdown()
        self._engine.dispose()


class Noted(NamedTuple, Generic[T]):
    """The answer of an act, and the rows of the audit log that are written with it. By its first row an act
    is found again after a commit whose outcome is unknown."""

    answer: T
    rows: Sequence[Row] = ()


class SqlPart:
    """A part of the store, which reads and may write in its own transactions."""

    _readers: Readers

    async def _rows(self, query: Executable, values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        return await self._readers.run(read_rows, query, values or {})

    async def _write_alone(self, act: Callable[[Session], T]) -> T:
        raise NotImplementedError

    async def _write_noted(self, act: Callable[[Session], Noted[T]]) -> T:
        """Run an act with its notes in a transaction of its own, exactly once."""
        return (await self._write_alone(act)).answer


def read_rows(connection: Connection, query: Executable, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows as mappings from the names of columns to values."""
    result = connection.execute(query, values)
    names = tuple(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result]
