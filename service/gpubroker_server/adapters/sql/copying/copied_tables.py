"""Copy every table of a database into another, and compare each copy by its number of rows and by a digest of
its rows."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, delete, func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from gpubroker_server.adapters.sql.database import MoveMark, read_mark
from gpubroker_server.adapters.sql.session import DatabaseRefused
from gpubroker_server.adapters.sql.system_tables import MoveStage, metadata, relocation

LEAVING_SECONDS = 1.0
"""Time for which other sessions may still exist. The session of a closed connection stays until the server
has ended its process."""

Report = Callable[[str], None]
"""Function that receives lines about the progress, which people read."""

_ROWS_AT_ONCE = 200
_REPORT_EVERY = 100_000
_MADE_BY_MIGRATIONS = {"log_head", "leadership", "installation"}
"""Tables whose one row a new database has, too."""
_LOCKED = "55P03"
"""SQLSTATE of lock_not_available."""
_LAST = "SELECT setval(pg_get_serial_sequence(:table, :column), :last)"
_OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND application_name LIKE 'gpubroker%'
"""


def copying_engine(url: str) -> Engine:
    """Return an engine of a PostgreSQL server for large copies, with connections that wait long for the
    server."""
    from gpubroker_server.adapters.sql import connections

    return create_engine(
        "postgresql+psycopg://", creator=lambda: connections.connect_mover(url), poolclass=NullPool
    )


def take_empty_server(writing: Connection, target: str, named: str, move: str = "") -> None:
    """Lock the database until the end of the transaction, and check that it is empty.

    `named` is the option that names the database. `move` is the id of the move: if this move has broken off
    before, the database need not be empty. Raises DatabaseRefused.
    """
    # While all tables are locked, no other session can write, so an empty table stays empty until the commit.
    writing.execute(text("SET LOCAL lock_timeout = '5s'"))
    for table in copied_tables():
        name = writing.dialect.identifier_preparer.format_table(table)
        writing.execute(text(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE"))
    until = time.monotonic() + LEAVING_SECONDS
    while writing.execute(text(_OTHERS)).scalar_one():
        if time.monotonic() >= until:
            raise DatabaseRefused(
                f"{target} is in use by a gpubroker; stop that one, or name another with {named}"
            )
        time.sleep(0.1)
        # Without this call the server would repeat its first answer within the transaction.
        writing.execute(text("SELECT pg_stat_clear_snapshot()"))
    match read_mark(writing):
        case MoveMark(stage=MoveStage.COMING, move=begun) if begun == move:
            return
        case MoveMark(other=other):
            raise DatabaseRefused(f"{target} has the data of {other}; name an empty database with {named}")
    for table in copied_tables():
        rows = writing.execute(select(func.count()).select_from(table)).scalar_one()
        if table.name not in _MADE_BY_MIGRATIONS and rows:
            raise DatabaseRefused(
                f"{target} is not empty: it has {rows} rows in {table.name}; "
                f"name an empty database with {named} (createdb makes one)"
            )


def copied_tables() -> Sequence[Table]:
    return [table for table in metadata.sorted_tables if table is not relocation]


def copy_all(reading: Connection, writing: Connection, report: Report) -> None:
    """Replace the contents of all copied tables. Raises DatabaseRefused if a row did not arrive as it was
    sent."""
    for table in copied_tables():
        writing.execute(delete(table))
        sent = _Digest()
        _write(writing, table, _sent(_rows(reading, table), sent, table, report))
        arrived = _Digest()
        for row in _rows(writing, table):
            arrived.add(row)
        if (arrived.rows, arrived.sum) != (sent.rows, sent.sum):
            raise DatabaseRefused(
                f"{table.name} did not arrive as it was sent: {sent.rows} rows were sent, {arrived.rows} are "
                "there, or one of them differs; nothing was copied, run the same command again"
            )
        report(f"{table.name}: {sent.rows} rows")


class _Digest:
    """A digest of a set of rows. It is the sum of the rows' digests, so their order makes no difference."""

    def __init__(self) -> None:
        self.rows = 0
        self.sum = 0

    def add(self, row: tuple[Any, ...]) -> None:
        self.rows += 1
        digest = sha256(repr(row).encode()).digest()
        self.sum = (self.sum + int.from_bytes(digest, "big")) % 2**256


def _sent(
    rows: Iterator[tuple[Any, ...]], sent: _Digest, table: Table, report: Report
) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        yield row
        sent.add(row)
        if sent.rows % _REPORT_EVERY == 0:
            report(f"{table.name}: {sent.rows} rows so far")


def _write(writing: Connection, table: Table, rows: Iterator[tuple[Any, ...]]) -> None:
    if writing.dialect.name == "sqlite":
        names = [column.name for column in table.c]
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            writing.execute(insert(table), [dict(zip(names, row, strict=True)) for row in chunk])
        return
    import psycopg
    from psycopg import sql

    columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.c)
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(table.name), columns)
    connection = writing.connection.driver_connection
    assert isinstance(connection, psycopg.Connection)
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)
    # COPY writes keys without the sequence, which would otherwise hand out keys that are taken.
    if (column := table.autoincrement_column) is not None:
        last = writing.execute(select(func.max(column))).scalar_one()
        if last is not None:
            writing.execute(text(_LAST), {"table": table.name, "column": column.name, "last": last})


def _rows(connection: Connection, table: Table) -> Iterator[tuple[Any, ...]]:
    """Return the rows as Python values, which do not depend on the kind of database."""
    result = connection.execute(select(table), execution_options={"yield_per": _ROWS_AT_ONCE})
    return (tuple(row) for row in result)


def _faults() -> tuple[type[Exception], ...]:
    """Return the types of databases' errors, including psycopg's if psycopg was imported."""
    psycopg = sys.modules.get("psycopg")
    return (DBAPIError, psycopg.Error) if psycopg else (DBAPIError,)


@contextmanager
def plain_errors(what: str, named: str) -> Iterator[None]:
    """Raise errors of the database as DatabaseRefused. `what` is the operation that broke off, and `named`
    the option that names the target."""
    try:
        yield
    except _faults() as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if getattr(cause, "sqlstate", None) == _LOCKED:
            raise DatabaseRefused(
                f"the database of {named} is in use; stop what uses it, or name another"
            ) from None
        raise DatabaseRefused(f"{what} broke off: {str(cause).strip()}; run the same command again") from None
