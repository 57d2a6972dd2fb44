"""`gpubroker migrate-data`: all of a stopped SQLite service into an empty PostgreSQL database.

1. The file is locked, and both schemas are brought to the newest.
2. In one transaction of the server: every table is locked and found empty, filled with COPY, counted and
   compared by its digest; then the mark `coming` is set, and everything committed together.
3. The file says `gone`; from here on it is never served again.
4. The server's database says `here`, and may be served.

If it is killed before 3, the file is served as before, and the next move starts from the beginning; after 3,
the next move does 4. Objects are files of the data directory and stay there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import errors, sql
from sqlalchemy import Connection, Engine, Table, create_engine, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from gpubroker_server.adapters.sql import connections
from gpubroker_server.adapters.sql.database import (
    MoveMark,
    bring_to,
    file_engine,
    is_file,
    path_of,
    read_mark,
    server_engine,
    set_mark,
)
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.sqlite import SqliteFile
from gpubroker_server.adapters.sql.system_tables import MoveStage, leadership, metadata, relocation

Report = Callable[[str], None]
"""Receives lines about the progress, for people."""

_ROWS_AT_ONCE = 200
_REPORT_EVERY = 100_000
_MADE_BY_MIGRATIONS = {"log_head", "leadership", "installation"}
"""A new database has their one row too."""
_LAST = "SELECT setval(pg_get_serial_sequence(:table, :column), :last)"
_OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND application_name LIKE 'gpubroker%'
"""


def move_data(source: str, target: str, report: Report) -> None:
    """Raises DatabaseRefused: the file is served as before, unless the text says that it is gone."""
    if is_file(target, "--to") or not is_file(source, "--from, or database_url,"):
        raise DatabaseRefused(
            "data moves from a file to a server: --from sqlite:///path --to postgresql://user@host/name"
        )
    path = path_of(source)
    if not path.exists():
        raise DatabaseRefused(f"there is no {path}; name the file of the service with --from")
    file = SqliteFile(path)
    try:
        here, there = file_engine(file), _mover(target)
        bring_to(here, "head", str(path))
        connections.check_server(target, "--to")
        bring_to(server_engine(target), "head", "the database")
        with _plain_errors():
            _move(here, there, str(path.resolve()), connections.display_name(target), report)
    finally:
        file.close()


def _move(here: Engine, there: Engine, source: str, target: str, report: Report) -> None:
    with here.begin() as reading:
        # The lock on the file is ours, so the last leader has ended: do not wait for its lease.
        reading.execute(leadership.update().values(lease_until=0.0))
        mark = read_mark(reading)
        if mark is None or mark.stage is not MoveStage.GONE:
            mark = MoveMark(mark.move if mark else uuid4().hex, MoveStage.LEAVING, target)
            set_mark(reading, mark)
    if mark.stage is not MoveStage.GONE:
        with here.connect() as reading, there.begin() as writing:
            _take(writing, mark.move, target)
            _copy_all(reading, writing, report)
            set_mark(writing, MoveMark(mark.move, MoveStage.COMING, source))
        report(f"everything is in {target}")
        with here.begin() as reading:
            set_mark(reading, MoveMark(mark.move, MoveStage.GONE, target))
    report(f"{source} will not be served any more")
    with there.begin() as writing:
        arrived = read_mark(writing)
        if arrived is None or arrived.move != mark.move:
            raise DatabaseRefused(f"{source} has been moved to {mark.other}, which is not {target}")
        set_mark(writing, MoveMark(mark.move, MoveStage.HERE, source))


def _take(writing: Connection, move: str, target: str) -> None:
    """Lock the database until the end of the transaction, and check that it is empty."""
    writing.execute(text("SET LOCAL lock_timeout = '5s'"))
    for table in _copied():
        writing.execute(text(f"LOCK TABLE {_quoted(writing, table)} IN ACCESS EXCLUSIVE MODE"))
    if writing.execute(text(_OTHERS)).scalar_one():
        raise DatabaseRefused(f"{target} is in use by a gpubroker; stop that one, or name another with --to")
    mark = read_mark(writing)
    if mark is not None and (mark.stage, mark.move) == (MoveStage.COMING, move):
        return
    if mark is not None:
        raise DatabaseRefused(f"{target} has the data of {mark.other}; name an empty database with --to")
    for table in _copied():
        rows = writing.execute(select(func.count()).select_from(table)).scalar_one()
        if table.name not in _MADE_BY_MIGRATIONS and rows:
            raise DatabaseRefused(
                f"{target} is not empty: it has {rows} rows in {table.name}; "
                "name an empty database with --to (createdb makes one)"
            )


def _copied() -> Sequence[Table]:
    return [table for table in metadata.sorted_tables if table is not relocation]


def _copy_all(reading: Connection, writing: Connection, report: Report) -> None:
    for table in _copied():
        writing.execute(text(f"TRUNCATE {_quoted(writing, table)}"))
        sent = _copy(reading, writing, table, report)
        if table.autoincrement_column is not None and sent.rows:
            column = table.autoincrement_column
            last = writing.execute(select(func.max(column))).scalar_one()
            writing.execute(text(_LAST), {"table": table.name, "column": column.name, "last": last})
        arrived = _Digest()
        for row in _rows(writing, table):
            arrived.add(row)
        if (arrived.rows, arrived.sum) != (sent.rows, sent.sum):
            raise DatabaseRefused(
                f"{table.name} did not arrive as it was sent: {sent.rows} rows were sent, {arrived.rows} are "
                "there, or one of them differs; nothing was moved, run the same command again"
            )
        report(f"{table.name}: {sent.rows} rows")


class _Digest:
    """Of a set of rows, in any order: the sum of their digests."""

    def __init__(self) -> None:
        self.rows = 0
        self.sum = 0

    def add(self, row: tuple[Any, ...]) -> None:
        self.rows += 1
        digest = sha256(repr(row).encode()).digest()
        self.sum = (self.sum + int.from_bytes(digest, "big")) % 2**256


def _copy(reading: Connection, writing: Connection, table: Table, report: Report) -> _Digest:
    """The digest of what was sent."""
    sent = _Digest()
    names = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.c)
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(table.name), names)
    connection = writing.connection.driver_connection
    assert isinstance(connection, psycopg.Connection)
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for row in _rows(reading, table):
            copy.write_row(row)
            sent.add(row)
            if sent.rows % _REPORT_EVERY == 0:
                report(f"{table.name}: {sent.rows} rows so far")
    return sent


def _rows(connection: Connection, table: Table) -> Iterator[tuple[Any, ...]]:
    """As Python values, which are the same for both databases."""
    found = connection.execute(select(table), execution_options={"yield_per": _ROWS_AT_ONCE})
    return (tuple(row) for row in found)


def _quoted(connection: Connection, table: Table) -> str:
    return connection.dialect.identifier_preparer.format_table(table)


def _mover(url: str) -> Engine:
    return create_engine(
        "postgresql+psycopg://", creator=lambda: connections.connect_mover(url), poolclass=NullPool
    )


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the database's errors as DatabaseRefused."""
    try:
        yield
    except (DBAPIError, psycopg.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(cause, errors.LockNotAvailable):
            raise DatabaseRefused(
                "the database of --to is in use; stop what uses it, or name another"
            ) from None
        raise DatabaseRefused(
            f"the move broke off: {str(cause).strip()}; what was not moved yet is where it was, so run "
            "the same command again"
        ) from None
