"""`gpubroker migrate-data`: all of a stopped SQLite service into an empty PostgreSQL database.

1. The file is locked, and both schemas are brought to the newest.
2. In one transaction of the server: every table is locked and found empty, filled with COPY, counted and
   compared by its digest; then the mark `coming` is set, and everything committed together.
3. The file says `gone`; from here on it is never served again.
4. The server's database says `here`, and may be served.

Killed before 3, the file is served as before, and the next move begins anew. Killed after it, the next one
does 4. Objects are files of the data directory, and stay where they are.
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

from gpubroker_server.adapters.sql import connections, tables
from gpubroker_server.adapters.sql.database import file_engine, is_file, path_of, server_engine
from gpubroker_server.adapters.sql.relocation import Mark, read_mark, set_mark
from gpubroker_server.adapters.sql.schema import bring_to
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.sqlite import SqliteFile
from gpubroker_server.adapters.sql.stage import Stage

Tell = Callable[[str], None]
"""Hears what has been done, in words."""

_ROWS_AT_ONCE = 200
_TELL_EVERY = 100_000
_MADE_BY_MIGRATIONS = {"log_head", "leadership", "installation"}
"""Their one row is there in a new database as well."""
_LAST = "SELECT setval(pg_get_serial_sequence(:table, :column), :last)"
_OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND application_name LIKE 'gpubroker%'
"""


def move_data(source: str, target: str, tell: Tell) -> None:
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
        with _told_in_words():
            _move(here, there, str(path.resolve()), connections.told(target), tell)
    finally:
        file.close()


def _move(here: Engine, there: Engine, source: str, target: str, tell: Tell) -> None:
    with here.begin() as reading:
        # The lock on the file is ours: whoever led has ended, and nobody need wait for a lease of his.
        reading.execute(tables.leadership.update().values(lease_until=0.0))
        mark = read_mark(reading)
        if mark is None or mark.stage is not Stage.GONE:
            mark = Mark(mark.move if mark else uuid4().hex, Stage.LEAVING, target)
            set_mark(reading, mark)
    if mark.stage is not Stage.GONE:
        with here.connect() as reading, there.begin() as writing:
            _take(writing, mark.move, target)
            _copy_all(reading, writing, tell)
            set_mark(writing, Mark(mark.move, Stage.COMING, source))
        tell(f"everything is in {target}")
        with here.begin() as reading:
            set_mark(reading, Mark(mark.move, Stage.GONE, target))
    tell(f"{source} is not served any more")
    with there.begin() as writing:
        arrived = read_mark(writing)
        if arrived is None or arrived.move != mark.move:
            raise DatabaseRefused(f"{source} has been moved to {mark.other}, which is not {target}")
        set_mark(writing, Mark(mark.move, Stage.HERE, source))


def _take(writing: Connection, move: str, target: str) -> None:
    """Keep all others out until the end of the transaction, and make sure that nothing is lost here."""
    writing.execute(text("SET LOCAL lock_timeout = '5s'"))
    for table in _copied():
        writing.execute(text(f"LOCK TABLE {_quoted(writing, table)} IN ACCESS EXCLUSIVE MODE"))
    if writing.execute(text(_OTHERS)).scalar_one():
        raise DatabaseRefused(f"{target} is in use by a gpubroker; stop that one, or name another with --to")
    mark = read_mark(writing)
    if mark is not None and (mark.stage, mark.move) == (Stage.COMING, move):
        return
    if mark is not None:
        raise DatabaseRefused(f"{target} has what came from {mark.other}; name an empty database with --to")
    for table in _copied():
        rows = writing.execute(select(func.count()).select_from(table)).scalar_one()
        if table.name not in _MADE_BY_MIGRATIONS and rows:
            raise DatabaseRefused(
                f"{target} is not empty: it has {rows} rows in {table.name}; "
                "name an empty database with --to (createdb makes one)"
            )


def _copied() -> Sequence[Table]:
    return [table for table in tables.metadata.sorted_tables if table is not tables.relocation]


def _copy_all(reading: Connection, writing: Connection, tell: Tell) -> None:
    for table in _copied():
        writing.execute(text(f"TRUNCATE {_quoted(writing, table)}"))
        sent = _copy(reading, writing, table, tell)
        if table.autoincrement_column is not None and sent.rows:
            column = table.autoincrement_column
            last = writing.execute(select(func.max(column))).scalar_one()
            writing.execute(text(_LAST), {"table": table.name, "column": column.name, "last": last})
        arrived = _Digest()
        for row in _rows(writing, table):
            arrived.add(row)
        if (arrived.rows, arrived.sum) != (sent.rows, sent.sum):
            raise DatabaseRefused(
                f"{table.name} did not arrive as it was sent: {sent.rows} rows were, {arrived.rows} are "
                "there, or one of them differs; nothing was moved"
            )
        tell(f"{table.name}: {sent.rows} rows")


class _Digest:
    """Of a set of rows, in whatever order: the sum of theirs."""

    def __init__(self) -> None:
        self.rows = 0
        self.sum = 0

    def add(self, row: tuple[Any, ...]) -> None:
        self.rows += 1
        digest = sha256(repr(row).encode()).digest()
        self.sum = (self.sum + int.from_bytes(digest, "big")) % 2**256


def _copy(reading: Connection, writing: Connection, table: Table, tell: Tell) -> _Digest:
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
            if sent.rows % _TELL_EVERY == 0:
                tell(f"{table.name}: {sent.rows} rows so far")
    return sent


def _rows(connection: Connection, table: Table) -> Iterator[tuple[Any, ...]]:
    """As values of Python, which are the same for both databases."""
    found = connection.execute(select(table), execution_options={"yield_per": _ROWS_AT_ONCE})
    return (tuple(row) for row in found)


def _quoted(connection: Connection, table: Table) -> str:
    return connection.dialect.identifier_preparer.format_table(table)


def _mover(url: str) -> Engine:
    return create_engine(
        "postgresql+psycopg://", creator=lambda: connections.connect_mover(url), poolclass=NullPool
    )


@contextmanager
def _told_in_words() -> Iterator[None]:
    """What a database says against it, and what to do."""
    try:
        yield
    except (DBAPIError, psycopg.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(cause, errors.LockNotAvailable):
            raise DatabaseRefused("somebody uses the database of --to; end that, or name another") from None
        raise DatabaseRefused(
            f"the move broke off: {str(cause).strip()}; what was not moved yet is where it was, so run "
            "the same command again"
        ) from None
