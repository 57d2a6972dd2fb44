"""Convert values to rows and rows to values, by the types of their fields.

A column holds JSON if the field is a Struct, a sequence or a mapping, and otherwise the field itself. A field
that is added to a type and to its table needs no other line.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, TypeVar

from msgspec import Struct, inspect, json
from msgspec.structs import fields

from gpubroker_server.adapters.sql.session import Row, json_text
from gpubroker_server.core.domain.demand import Demand, interned

S = TypeVar("S", bound=Struct)
Change = Callable[[Any], Any]
_JSON = inspect.StructType, inspect.VarTupleType, inspect.TupleType, inspect.DictType
_EMPTY = {inspect.VarTupleType: "[]", inspect.TupleType: "[]", inspect.DictType: "{}"}


@lru_cache(4096)
def demand_of_text(text: str) -> Demand:
    """Return the demand that JSON text holds. Equal demands are one object, because many tasks share few
    demands (`bench restart`)."""
    return interned(json.decode(text, type=Demand))


@lru_cache(4096)
def demand_text(demand: Demand) -> str:
    """Return the demand as JSON. The texts are cached, because many tasks share few demands (`bench
    accept`)."""
    return json_text(demand)


@cache
def columns_of(kind: type[Struct]) -> Mapping[str, tuple[Change | None, Change | None]]:
    """Return, for each field, the functions that read and write its column; None where the column holds the
    field itself."""
    return {field.name: _changes(field.type) for field in fields(kind)}


def _changes(kind: Any) -> tuple[Change | None, Change | None]:
    if kind is Demand:
        return demand_of_text, demand_text
    node = inspect.type_info(kind)
    for part in node.types if isinstance(node, inspect.UnionType) else (node,):
        if isinstance(part, _JSON):
            return json.Decoder(kind).decode, json_text
        if isinstance(part, inspect.EnumType):
            # Drivers choose a conversion by the exact type, which for a StrEnum is not `str`.
            return part.cls, str
        if isinstance(part, inspect.BytesType):
            # PostgreSQL's driver returns a memoryview.
            return bytes, None
    return None, None


def _type_of(kind: type[Struct], name: str) -> Any:
    return next(field.type for field in fields(kind) if field.name == name)


def _empty_text(kind: Any) -> str | None:
    """Return the JSON of an empty value as Python source, for types whose only false value is the empty one.
    Returns None for other types."""
    text = _EMPTY.get(type(inspect.type_info(kind)))
    return None if text is None else repr(text)


def value_of_row(kind: type[S], row: Mapping[str, Any]) -> S:
    """Return the value that a row holds. Fields without a column have their defaults."""
    values = {
        name: row[name] if read is None or row[name] is None else read(row[name])
        for name, (read, _write) in columns_of(kind).items()
        if name in row
    }
    return kind(**values)


def row_writer(
    kind: type[S], names: Iterable[str], rest: Callable[[S], Row] | None = None
) -> Callable[[S], Row]:
    """Return a function that makes rows of values of one type.

    `names` are the columns that hold fields; `rest` computes the columns after these from the whole value.
    The function is compiled, as dataclasses are: a loop over the columns of each row takes twice the time.
    """
    namespace: dict[str, Any] = {"rest": rest}
    parts = []
    for name in names:
        write = columns_of(kind)[name][1]
        if write is None:
            parts.append(f"value.{name}")
            continue
        namespace[f"write_{name}"] = write
        empty = _empty_text(_type_of(kind, name)) if write is json_text else None
        if empty is None:
            parts.append(f"None if value.{name} is None else write_{name}(value.{name})")
        else:
            # Most tasks have no labels, objects and so on, so the literal saves a call.
            parts.append(f"write_{name}(value.{name}) if value.{name} else {empty}")
    if rest is not None:
        parts.append("*rest(value)")
    write_row: Callable[[S], Row] = eval(f"lambda value: ({', '.join(parts)},)", namespace)  # noqa: S307  # our names
    return write_row
