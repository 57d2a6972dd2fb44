"""Values of a frozen class, and copies of them that differ in some fields, by the thousand."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def copier(kind: type[T]) -> Callable[..., T]:
    """`(value, **changes)` -> what `dataclasses.replace` makes of it, at a tenth of its price.

    `kind` has slots. The copy is filled while it is of an open twin of the class, by one statement that names
    every field, as `dataclasses` itself writes `__init__`. Raises AttributeError for what is no field.
    """
    twin, names = _open_twin(kind)
    into, out_of = (", ".join(f"{whose}.{name}" for name in names) for whose in ("copy", "value"))
    made: dict[str, Any] = {}
    exec(f"def fill(copy, value): {into} = {out_of}", made)  # noqa: S102  # of the names of the fields alone
    fill: Callable[[Any, T], None] = made["fill"]

    def changed(value: T, **changes: Any) -> T:
        copy: Any = twin()
        fill(copy, value)
        for name, changed_to in changes.items():
            setattr(copy, name, changed_to)
        copy.__class__ = kind
        done: T = copy
        return done

    return changed


def maker(kind: type[T]) -> Callable[[Iterable[Any]], T]:
    """(all values, in the order of the fields) -> what `kind` makes of them, at a quarter of its price.

    `kind` has slots, and does nothing else when it is made. Raises ValueError if there are more or fewer.
    """
    twin, names = _open_twin(kind)
    made: dict[str, Any] = {}
    into = ", ".join(f"new.{name}" for name in names)
    exec(f"def fill(new, values): {into}, = values", made)  # noqa: S102  # of the names of the fields alone
    fill: Callable[[Any, Iterable[Any]], None] = made["fill"]

    def make(values: Iterable[Any]) -> T:
        new: Any = twin()
        fill(new, values)
        new.__class__ = kind
        done: T = new
        return done

    return make


def _open_twin(kind: type[T]) -> tuple[type[Any], list[str]]:
    """A class of the same slots whose values can be filled, and the names of its fields."""
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]  # it is one
    return type(f"Open{kind.__name__}", (), {"__slots__": names}), names
