"""From the JSON of the service to models, by name. Nothing is checked: newer services say more."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from typing import Any, TypeVar, get_args, get_origin

T = TypeVar("T")
Raw = Mapping[str, Any]

_TIMES = frozenset({"at", "as_of", "not_before"})
"""Fields that are times though their names do not end in `_at`."""


def filled(model: type[T], raw: Raw, **read: Any) -> T:
    """Fill a model from an answer by name; `read` holds the fields that are models themselves. Lists become
    tuples where the model says so: what a task returned stays what it is."""
    given: dict[str, Any] = {"raw": raw}
    for wanted in fields(model):  # type: ignore[arg-type]  # every model here is a dataclass
        name = wanted.name
        value = read.get(name, raw.get(name))
        if isinstance(value, str) and (name.endswith("_at") or name in _TIMES):
            given[name] = datetime.fromisoformat(value)
        elif value is not None:
            given[name] = tuple(value) if isinstance(value, list) and _is_tuple(wanted.type) else value
        elif wanted.default is MISSING and wanted.default_factory is MISSING:
            given[name] = ""
    return model(**given)


def _is_tuple(annotation: Any) -> bool:
    """A tuple, or nothing."""
    return tuple in {get_origin(part) for part in (annotation, *get_args(annotation))}


def optional(model: type[T], raw: Raw | None) -> T | None:
    return None if raw is None else _read(model, raw)


def each(model: type[T], raws: Sequence[Raw] | None) -> tuple[T, ...]:
    return tuple(_read(model, raw) for raw in raws or ())


def _read(model: type[T], raw: Raw) -> T:
    """As the model itself reads an answer, where it has models within."""
    of: Callable[[Raw], T] | None = getattr(model, "of", None)
    return filled(model, raw) if of is None else of(raw)
