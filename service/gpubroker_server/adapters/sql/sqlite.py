"""SQLite: one file, one process, one writing connection.

The file uses WAL with synchronous=FULL: a commit is on disk when it returns. Many versions of SQLite can
damage a database if connections write and checkpoint at the same time (docs/decisions/0014). Therefore one
connection does both, and a lock file keeps other processes out.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import bindparam, column
from sqlalchemy import values as values_list
from sqlalchemy.dialects import sqlite

from gpubroker_server.adapters.clock import WallClock
from gpubroker_server.adapters.sql.session import (
    ConstraintFailed,
    DatabaseRefused,
    Found,
    GuardMissed,
    Row,
    Rows,
    SetStatement,
)
from gpubroker_server.adapters.sql.system_tables import SQLITE_NOW, check_schema
from gpubroker_server.core.domain.units import Instant, Position, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import Clock, StaleTerm, StoreExhausted, StoreUnavailable, Unstorable

APPLICATION_ID = 0x67706272
"""The id in the header of a gpubroker database: `gpbr` in ASCII."""

_OLDEST = (3, 38, 0)
_TAKE_HEAD = "UPDATE log_head SET position = position + ? WHERE id = 1 RETURNING position, compatible_from"
_BUSY_MS = 5000
_MAGIC = b"SQLite format 3\0"
_DIALECT: Any = sqlite.dialect(paramstyle="qmark")
_LENGTHS = (1000, 64, 16, 4, 1)
"""The numbers of rows that a statement may have. There are few, because SQLite prepares a statement for each.
SQLite takes 32,766 values in a statement: a thousand rows of 32 columns."""


def sqlite_chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Yield the rows in pieces whose lengths are in `_LENGTHS`."""
    start, rows_left = 0, len(rows)
    if rows_left in _LENGTHS:
        yield rows
        return
    while rows_left:
        length = next(length for length in _LENGTHS if length <= rows_left)
        yield rows[start : start + length]
        start, rows_left = start + length, rows_left - length


@cache
def sqlite_text(statement: SetStatement, length: int) -> str:
    """Return the SQL of the statement, with question marks for `length` rows."""
    names = [column(c.name, c.type) for c in statement.columns]
    marks = tuple(bindparam(f"{c.name}.value", type_=c.type) for c in statement.columns)
    rows = values_list(*names, name="r").data([marks]).cte("r")
    text = str(statement.build(sqlite.insert, rows).compile(dialect=_DIALECT))
    one_row = f"({', '.join('?' * len(marks))})"
    return text.replace(one_row, ", ".join([one_row] * length), 1)


@cache
def _alike_text(statement: SetStatement, length: int, width: int) -> str:
    """Return the SQL of the statement, with question marks for the tail of an `Alike`, and then for `length`
    heads of `width` columns."""
    text, many = sqlite_text(statement, 1), len(statement.columns)
    one_row = f"VALUES ({', '.join('?' * many)})"
    heads = ", ".join([f"({', '.join('?' * width)})"] * length)
    # SQLite names the columns of VALUES column1, column2 and so on.
    columns = ", ".join([*(f"column{place}" for place in range(1, width + 1)), *"?" * (many - width)])
    rows = f"SELECT {columns} FROM (VALUES {heads})"  # noqa: S608  # marks and names of columns
    return text.replace(one_row, rows, 1)


class SqliteFile:
    """The file, and the lock that keeps other processes out. Raises DatabaseRefused for a file that is no
    gpubroker database. `clock` gives the database's time and is by default this machine's wall clock."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        if sqlite3.sqlite_version_info < _OLDEST:
            raise DatabaseRefused(
                f"this Python's SQLite is {sqlite3.sqlite_version}; gpubroker needs 3.38 or newer: "
                "use another Python, or PostgreSQL with database_url (or --database-url)"
            )
        self.path = path
        self._now = time.time if clock is None else clock.now
        self._writer: sqlite3.Connection | None = None
        self._lock = _lock(path)
        try:
            _check_header(path)
        except DatabaseRefused:
            self.close()
            raise

    def writer(self) -> sqlite3.Connection:
        """Open the connection that writes and checkpoints, and create the file if there is none. Close the
        connection before you open the next."""
        if self._writer is not None and _is_open(self._writer):
            raise RuntimeError(f"{self.path} already has a writing connection, and may have only one")
        self._writer = self._new_writer()
        return self._writer

    def _new_writer(self) -> sqlite3.Connection:
        with _refusing(self.path):
            if not self.path.exists():
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            connection = _connect(self.path, "rw", self._now)
            # The id is written before WAL is on, so that it is in the file's header and not only in the log.
            if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            [(mode,)] = connection.execute("PRAGMA journal_mode = WAL").fetchall()
            if mode != "wal":
                raise DatabaseRefused(
                    f"{self.path} is on a file system where SQLite's write-ahead log does not work; "
                    "name a file on a local disk with database_url (or --database-url)"
                )
            connection.execute("PRAGMA synchronous = FULL")
            # On macOS a plain fsync leaves data in the cache of the disk.
            connection.execute("PRAGMA fullfsync = ON")
            connection.execute("PRAGMA cache_size = -32768")  # SQLite reads a negative size in KiB.
            return connection

    def reader(self) -> sqlite3.Connection:
        """Open a connection that can neither write nor checkpoint, even when it is the last one to close."""
        return _connect(self.path, "ro", self._now)

    def close(self) -> None:
        os.close(self._lock)


def connect_beside(path: Path) -> sqlite3.Connection:
    """Open a file for reading, even while another process has it open. Raises DatabaseRefused."""
    _check_header(path)
    with _refusing(path):
        return _connect(path, "ro", time.time)


def _connect(path: Path, mode: str, now: Callable[[], float]) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True, isolation_level=None, check_same_thread=False, cached_statements=256,
    )  # fmt: skip
    connection.create_function(SQLITE_NOW, 0, now)
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    return connection


def _is_open(connection: sqlite3.Connection) -> bool:
    try:
        return connection.total_changes >= 0
    except sqlite3.ProgrammingError:
        return False


def _lock(path: Path) -> int:
    """Lock `<file>.lock` until the returned handle is closed. The lock file contains the id of this
    process."""
    with _refusing(path):
        handle = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise DatabaseRefused(
            f"{path} is in use by process {holder}; "
            "stop that one first, or name another file with database_url (or --database-url)"
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _check_header(path: Path) -> None:
    with _refusing(path):
        header = b""
        if path.exists():
            # The file is opened for writing, too: SQLite would open a read-only file, and fail only at the
            # first commit.
            with path.open("r+b") as file:
                header = file.read(100)
    if not header:
        return
    is_sqlite = header.startswith(_MAGIC)
    # SQLite's file format has the application id at byte 68, in big-endian order.
    if not is_sqlite or int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        kind = "the SQLite database of another program" if is_sqlite else "not a SQLite database"
        raise DatabaseRefused(
            f"{path} is not a gpubroker database, it is {kind}; "
            "name another file with database_url (or --database-url), or move it away"
        )


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DatabaseRefused(
            f"cannot open the database {path}: {error.strerror}; "
            "give this user access to it, or name another file with database_url (or --database-url)"
        ) from None
    except sqlite3.Error as error:
        denied = not os.access(path, os.R_OK | os.W_OK) or not os.access(path.parent, os.W_OK)
        remedy = "give this user access to it" if denied else "restore it from a backup"
        raise DatabaseRefused(
            f"cannot open the database {path}: {error}; {remedy}, or name another file with "
            "database_url (or --database-url)"
        ) from None


class SqliteSession:
    """The writer's connection to a file."""

    server = ""

    def __init__(self, connection: sqlite3.Connection, clock: Clock | None = None) -> None:
        self._connection = connection
        self._connection.create_function(SQLITE_NOW, 0, self.now)
        self._clock = clock or WallClock()

    def begin(self) -> None:
        self._execute("BEGIN IMMEDIATE")

    def write(self, statement: SetStatement, rows: Sequence[Row] | Rows) -> None:
        before = self._connection.total_changes
        single, alike = (rows.single, rows.alike) if isinstance(rows, Rows) else (rows, ())
        for chunk in sqlite_chunks(single):
            self._execute(sqlite_text(statement, len(chunk)), list(chain.from_iterable(chunk)))
        for heads, tail in alike:
            for chunk in sqlite_chunks(heads):
                text = _alike_text(statement, len(chunk), len(chunk[0]))
                self._execute(text, [*tail, *chain.from_iterable(chunk)])
        written = self._connection.total_changes - before
        if statement.exact and written != len(rows):
            raise GuardMissed(statement, len(rows), written)

    def fetch(self, statement: SetStatement, rows: Sequence[Row]) -> Found:
        rows_found: list[Sequence[Any]] = []
        for chunk in sqlite_chunks(rows):
            rows_found += self._execute(sqlite_text(statement, len(chunk)), list(chain.from_iterable(chunk)))
        return rows_found

    def fetch_later(self, statement: SetStatement, rows: Sequence[Row]) -> Callable[[], Found]:
        rows_found = self.fetch(statement, rows)
        return lambda: rows_found

    def require_term(self, term: Term) -> None:
        # BEGIN IMMEDIATE took the file's only write lock, so the term cannot change before the commit.
        [(current, holder)] = self._execute("SELECT term, holder FROM leadership WHERE id = 1")
        if current != term:
            raise StaleTerm(f"term {term} is over: {holder} leads term {current}; stop leading")

    def take_positions(self, events: int) -> tuple[Position, Instant]:
        [(last, compatible_from)] = self._execute(_TAKE_HEAD, [events])
        check_schema(compatible_from)
        return Position(last - events + 1), self.now()

    def commit(self) -> None:
        self._execute("COMMIT")

    def rollback(self) -> None:
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.rollback()

    def has_event(self, event: Event) -> bool:
        rows_found = self._execute(
            "SELECT kind, key, version, at FROM event WHERE position = ?", [event.position]
        )
        return rows_found == [(event.kind, event.key, event.version, event.at)]

    def now(self) -> Instant:
        return self._clock.now()

    def end_stuck_sessions(self) -> None:
        """Do nothing: no other process has the file open."""

    def notify_resigned(self) -> None:
        """Do nothing: no other process listens."""

    def end_terms(self) -> None:
        """End the lease of the last leader. This process holds the lock on the file, so the last leader has
        ended and no process need wait for its lease."""
        self._execute("UPDATE leadership SET lease_until = 0 WHERE lease_until > 0")

    def reconnect(self) -> None:
        """Do nothing: a file is never disconnected."""

    def on_idle(self) -> None:
        """Shrink the write-ahead log, unless a reader needs it."""
        with suppress(sqlite3.Error):
            # Without a timeout the checkpoint gives up at once if a reader is in its way.
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")

    def close(self) -> None:
        with suppress(sqlite3.Error):  # The next start reads what stays in the log.
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    def _execute(self, text: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(text, values).fetchall()
        except sqlite3.IntegrityError as error:
            raise ConstraintFailed(str(error)) from error
        except (sqlite3.DataError, UnicodeError, OverflowError) as error:
            raise Unstorable(f"a value cannot be stored: {error}") from error
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise StoreExhausted("disk full: the disk of the database") from error
            raise StoreUnavailable(f"the database cannot be written: {error}") from error
