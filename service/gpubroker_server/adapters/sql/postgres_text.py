"""Statements over many rows in PostgreSQL's words. Needs no psycopg, which a service on SQLite may lack."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import JSON, ColumnElement, bindparam, column, func
from sqlalchemy.dialects import postgresql

from gpubroker_server.adapters.sql.session import Row, SetStatement, json_text

DIALECT: Any = postgresql.psycopg.dialect()  # type: ignore[no-untyped-call]  # it has no types


@cache
def postgres_text(statement: SetStatement) -> str:
    """SQL with one parameter `rows`: the JSON that `postgres_rows` makes."""
    names: list[ColumnElement[Any]] = [column(c.name, c.type) for c in statement.columns]
    given = func.json_to_recordset(bindparam("rows", type_=JSON()))
    rows = given.table_valued(*names).render_derived(name="r", with_types=True)
    return str(statement.build(postgresql.insert, rows).compile(dialect=DIALECT))


def postgres_rows(statement: SetStatement, rows: Sequence[Row]) -> str:
    if statement.binary:
        rows = [_with_hex(row, statement.binary) for row in rows]
    return json_text([dict(zip(statement.names, row, strict=True)) for row in rows])


def _with_hex(row: Row, binary: Sequence[int]) -> Row:
    """PostgreSQL reads bytes inside JSON from their hexadecimal text."""
    plain = list(row)
    for at in binary:
        if plain[at] is not None:
            plain[at] = "\\x" + plain[at].hex()
    return tuple(plain)
