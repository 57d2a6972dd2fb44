"""Many rows in one statement: the one place where the two databases' ways of taking rows differ.

Each step of a statement hands Python's interpreter lock over, and each round trip costs a wake-up, so a
group commit must be few statements however many rows it has. SQLite takes them as VALUES of a few fixed
lengths, PostgreSQL as one JSON parameter, or by COPY where there are many and nothing else happens to them.
All were measured; see docs/decisions/0002 and 0082.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

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

from gpubroker_server.ports.store import Unstorable

Row = tuple[Any, ...]
"""Values in the order of the statement's columns."""


class Alike(NamedTuple):
    """Rows of one statement of which only the first columns differ."""

    heads: Sequence[Row]
    tail: Row


class Rows:
    """Rows of one statement, for which what those that are alike share need be made out only once."""

    def __init__(self, single: Sequence[Row] = ()) -> None:
        self.single: list[Row] = list(single)
        self.alike: list[Alike] = []

    def __len__(self) -> int:
        return len(self.single) + sum(len(alike.heads) for alike in self.alike)

    def __iter__(self) -> Iterator[Row]:
        yield from self.single
        for heads, tail in self.alike:
            for head in heads:
                yield head + tail


_SQLITE: Any = sqlite.dialect(paramstyle="qmark")
_POSTGRES: Any = postgresql.psycopg.dialect()  # type: ignore[no-untyped-call]  # it has no types
_SQLITE_LENGTHS = (1000, 64, 16, 4, 1)
"""Each length is a statement of its own to SQLite, so there are few. Every statement hands Python's lock to
others, who may keep it for milliseconds: what comes by the thousand must not take dozens. With 32 columns a
thousand rows are as many values as SQLite takes."""


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
def sqlite_alike_text(statement: SetStatement, length: int, width: int) -> str:
    """The same with question marks for one tail, and then for `length` heads of `width` columns."""
    text, many = sqlite_text(statement, 1), len(statement.columns)
    one_row = f"VALUES ({', '.join('?' * many)})"
    heads = ", ".join([f"({', '.join('?' * width)})"] * length)
    columns = ", ".join([*(f"column{at}" for at in range(1, width + 1)), *"?" * (many - width)])
    rows = f"SELECT {columns} FROM (VALUES {heads})"  # noqa: S608  # marks and names of columns
    return text.replace(one_row, rows, 1)


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


def copied_text(rows: Rows) -> Iterator[str]:
    """Pieces of what COPY reads: a line for each row, its values set apart by tabs."""
    yield "".join(["\t".join(map(_copied, row)) + "\n" for row in rows.single])
    for heads, tail in rows.alike:
        end = "".join(["\t" + _copied(value) for value in tail]) + "\n"
        yield "".join(["\t".join(map(_copied, head)) + end for head in heads])


def _copied(value: Any) -> str:
    if value is None:
        return "\\N"
    if isinstance(value, str):
        is_plain = "\\" not in value and "\n" not in value and "\t" not in value and "\r" not in value
        return value if is_plain else _escaped(value)
    if isinstance(value, bytes):
        return "\\\\x" + value.hex()
    return str(value)  # numbers and truths, which the server reads as Python writes them


def _escaped(text: str) -> str:
    for character, name in (("\\", "\\"), ("\n", "n"), ("\t", "t"), ("\r", "r")):
        text = text.replace(character, "\\" + name)
    return text


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
