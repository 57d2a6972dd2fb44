"""Decode the service's JSON to the types of `gpubroker.wire`, by field name.

Values are not validated: a newer service may send fields and values that this version does not know, and an
older one may leave fields out.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Struct, structs

from gpubroker.wire.answered import Answered, KnownState, Raw, Time
from gpubroker.wire.answered import Page as Answer

T = TypeVar("T")
S = TypeVar("S", bound=Struct)

__all__ = ["KnownState", "Page", "Raw", "a_page", "decode", "page_of"]


class Page(Answer[T], frozen=True):
    """A part of a list, or all of it."""

    def _repr_html_(self) -> str | None:
        """Return the table that notebooks show; None for items of which there is none."""
        from gpubroker.notebook import html_of_list

        return html_of_list(self.items)


def page_of(model: type[S], raw: Raw, **given: Any) -> Page[S]:
    """Return the items of a list or page, each decoded as `decode` does."""
    return a_page((decode(model, item, **given) for item in raw["items"]), raw.get("next_cursor"), raw)


def a_page(items: Iterable[T], next_cursor: str | None = None, raw: Raw | None = None) -> Page[T]:
    """Return these items as one page of a list."""
    page = Page(tuple(items), next_cursor, next_cursor is not None)
    return page if raw is None else page.with_raw(raw)


def decode(model: type[S], raw: Raw, **given: Any) -> S:
    """Return a value of the model, filled by field name; the fields in `given` win over the answer.

    The type of a field determines how its value is read. A field that the service did not send has its
    default, or the empty value of its type: None, an empty text, no items.
    """
    values = {name: value for name, value in given.items() if name in model.__struct_fields__}
    for name, sent_as, read, nothing in _readers_of(model):
        if name not in values:
            value = raw.get(sent_as)
            if value is not None:
                values[name] = read(value)
            elif nothing is not NODEFAULT:
                values[name] = nothing() if callable(nothing) else nothing
    made = model(**values)
    if isinstance(made, Answered):
        made.with_raw(raw).__dict__.update((name, given[name]) for name in given.keys() - values.keys())
    return made


@cache
def _readers_of(model: type[Any]) -> tuple[tuple[str, str, Callable[[Any], Any], Any], ...]:
    """Return for each field its name, its name in JSON, the function that reads its value, and its value if
    nothing was sent: a value, a function that makes one, or NODEFAULT, which leaves it to the model."""
    hints = get_type_hints(model)
    return tuple(
        (
            known.name,
            known.encode_name,
            _reader_of(hints[known.name]),
            _nothing_of(hints[known.name], known),
        )
        for known in structs.fields(model)
    )


def _reader_of(hint: Any) -> Callable[[Any], Any]:
    """Return the function that makes a value of this type from JSON that is not null."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _reader_of(next(part for part in parts if part is not NoneType))
    if origin is tuple:
        read_item = _reader_of(parts[0])
        return lambda value: tuple(map(read_item, value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        read_value = _reader_of(parts[1])
        return lambda value: {name: read_value(entry) for name, entry in value.items()}
    if not isinstance(hint, type):
        return _unchanged
    if issubclass(hint, Time):
        return lambda value: hint.fromisoformat(value) if isinstance(value, str) else value
    if issubclass(hint, Struct):
        return lambda value: decode(hint, value)
    return hint if issubclass(hint, StrEnum) else _unchanged


def _nothing_of(hint: Any, known: structs.FieldInfo) -> Any:
    if not known.required:
        return NODEFAULT
    origin = get_origin(hint)
    if origin in (Union, UnionType) and NoneType in get_args(hint):
        return None
    if origin is tuple:
        return ()
    if origin is Literal:
        return ""
    if not isinstance(hint, type):
        return dict if origin is not None else None
    if issubclass(hint, KnownState):
        return hint["UNKNOWN"]
    if issubclass(hint, Struct):
        return lambda: decode(hint, {})
    return hint() if hint in (str, int, float, bool) else None


def _unchanged(value: Any) -> Any:
    return value
