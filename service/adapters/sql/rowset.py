"""Many rows in one statement: the one place where the two databases' ways of taking rows differ.

Each step of a statement hands Python's interpreter lock over, and each round trip costs a wake-up, so a
group commit must be few statements however many rows it has. SQLite takes them as VALUES of a few fixed
lengths, PostgreSQL as one JSON parameter. Both were measured; see docs/decisions/0002.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    FromClause,
    LargeBinary,
    bindparam,
    column,
    func,
)
from sqlalchemy import values as values_list
from sqlalchemy.dialects import postgresql, sqlite

from service.ports import Unstorable

Row = tuple[Any, ...]
"""Values in the order of the statement's columns."""

_SQLITE: Any = sqlite.dialect(paramstyle="qmark")
_POSTGRES: Any = postgresql.psycopg.dialect()  # type: ignore[no-untyped-call]  # it has no types
_SQLITE_LENGTHS = (64, 16, 4, 1)
"""Each length is a statement of its own to SQLite, so there are few."""


@dataclass(frozen=True, eq=False)
class SetStatement:
    """One statement over any number of rows of the same columns."""

    name: str
    columns: tuple[Column[Any], ...]
    build: Callable[[Any, FromClause], Any]
    """(the dialect's `insert`, the rows as a table `r`) -> the statement."""
    exact: bool = False
    """Every row given must be written; one that is not was changed or taken by somebody else."""
    copied: str = ""
    """The table into which many rows can be copied as they are, if nothing else happens to them."""
    names: tuple[str, ...] = field(init=False)
    binary: tuple[int, ...] = field(init=False)
    """Places of the columns that hold bytes."""

    def __post_init__(self) -> None:
        # Plain strings: the names of a Table's columns are of a class that is slow as a key.
        object.__setattr__(self, "names", tuple(str(c.name) for c in self.columns))
        places = (at for at, c in enumerate(self.columns) if isinstance(c.type, LargeBinary))
        object.__setattr__(self, "binary", tuple(places))


def sqlite_chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows in pieces for which SQLite has a statement at hand."""
    start, left = 0, len(rows)
    while left:
        length = next(length for length in _SQLITE_LENGTHS if length <= left)
        yield rows[start : start + length]
        start, left = start + length, left - length


@cache
def sqlite_text(statement: SetStatement, length: int) -> str:
    """SQL with `length` rows of question marks, row by row."""
    names = [column(c.name, c.type) for c in statement.columns]
    marks = tuple(bindparam(f"{c.name}.value", type_=c.type) for c in statement.columns)
    rows = values_list(*names, name="r").data([marks]).cte("r")
    text = str(statement.build(sqlite.insert, rows).compile(dialect=_SQLITE))
    one_row = f"({', '.join('?' * len(marks))})"
    return text.replace(one_row, ", ".join([one_row] * length), 1)


@cache
def postgres_text(statement: SetStatement) -> str:
    """SQL with one parameter `rows`: the JSON that `postgres_rows` makes."""
    names: list[ColumnElement[Any]] = [column(c.name, c.type) for c in statement.columns]
    given = func.json_to_recordset(bindparam("rows", type_=JSON()))
    rows = given.table_valued(*names).render_derived(name="r", with_types=True)
    return str(statement.build(postgresql.insert, rows).compile(dialect=_POSTGRES))


@cache
def postgres_copy(statement: SetStatement) -> str:
    """SQL that copies rows into the statement's table; one whose key is taken fails all of them."""
    quoted = _POSTGRES.identifier_preparer.quote
    columns = ", ".join(map(quoted, statement.names))
    return f"COPY {quoted(statement.copied)} ({columns}) FROM STDIN"


def postgres_rows(statement: SetStatement, rows: Sequence[Row]) -> str:
    if statement.binary:
        rows = [_with_hex(row, statement.binary) for row in rows]
    return json_text([dict(zip(statement.names, row, strict=True)) for row in rows])


def json_text(value: Any) -> str:
    """Raises Unstorable for what is no text in any encoding."""
    try:
        return to_json(value).decode()
    except PydanticSerializationError as error:
        raise Unstorable(f"a value cannot be stored: {error}") from error


def _with_hex(row: Row, binary: Sequence[int]) -> Row:
    """PostgreSQL reads bytes inside JSON from their hexadecimal text."""
    plain = list(row)
    for at in binary:
        if plain[at] is not None:
            plain[at] = "\\x" + plain[at].hex()
    return tuple(plain)
