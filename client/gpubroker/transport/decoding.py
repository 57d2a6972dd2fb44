"""From the service's JSON to models, by field name. Nothing is validated: a newer service may send more."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any, Generic, Self, TypeVar, get_args, get_origin

T = TypeVar("T")
Raw = Mapping[str, Any]

_TIMES = frozenset({"at", "as_of", "not_before"})
"""Fields that are times although their names do not end in `_at`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the service answered; `raw` is all of it."""

    raw: Raw = field(default_factory=dict, repr=False)


class KnownState(StrEnum):
    """Of states that this version of the SDK knows; any other is UNKNOWN, and `raw["state"]` names it."""

    @classmethod
    def _missing_(cls, _value: object) -> Self:
        return cls["UNKNOWN"]


@dataclass(frozen=True, slots=True)
class Page(Answered, Generic[T]):
    """Some items of a list, and the cursor of the next page; None after the last page."""

    items: tuple[T, ...]
    next_cursor: str | None = None

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def page_of(model: type[T], raw: Raw, **given: Any) -> Page[T]:
    """As `decode` of each item."""
    items = tuple(decode(model, item, **given) for item in raw["items"])
    return Page(items, raw.get("next_cursor"), raw=raw)


def decode(model: type[T], raw: Raw, **given: Any) -> T:
    """Fill a model from an answer by field name; `given` goes before the answer.

    The annotation of a field says what becomes of its value: a model, an enum, a tuple of either, or a tuple.
    A field that the service did not send has its default, and an empty text if it has none.
    """
    values: dict[str, Any] = {"raw": raw} | given
    for name, is_required, read in _fields_of(model):  # type: ignore[arg-type]  # a class is hashable
        if name in values:
            continue
        value = raw.get(name)
        if value is None and is_required:
            value = ""
        if value is not None:
            values[name] = read(value)
    return model(**values)


@cache
def _fields_of(model: type[Any]) -> tuple[tuple[str, bool, Callable[[Any], Any]], ...]:
    """Of each field its name, whether it must be given, and what reads its value."""
    return tuple(
        (known.name, known.default is MISSING and known.default_factory is MISSING, _reader(known))
        for known in fields(model)
    )


def _reader(known: Field[Any]) -> Callable[[Any], Any]:
    if known.name.endswith("_at") or known.name in _TIMES:
        return lambda value: datetime.fromisoformat(value) if isinstance(value, str) else value
    parts = (known.type, *get_args(known.type))
    enum = next((part for part in parts if isinstance(part, type) and issubclass(part, StrEnum)), None)
    if enum is not None:
        return enum
    model = next((part for part in parts if isinstance(part, type) and is_dataclass(part)), None)
    if tuple in [get_origin(part) for part in parts]:
        return tuple if model is None else lambda value: tuple(decode(model, item) for item in value)
    return _unchanged if model is None else lambda value: decode(model, value)


def _unchanged(value: Any) -> Any:
    return value
