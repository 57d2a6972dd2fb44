"""Values of a frozen class, and copies of them that differ in some fields, by the thousand."""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def made_at_once(kind: type[T]) -> type[T]:
    """A frozen dataclass with slots whose values are made at less than half the price: filled by plain
    statements while they are of an open twin of the class, not by one call of `object.__setattr__` per field.

    For what is made several times for each task. Refuses a class that fills a field itself.
    """
    twin, _ = _open_twin(kind)
    made: dict[str, Any] = {"_set": object.__setattr__, "_twin": twin, "_kind": kind, "_left_out": MISSING}
    parameters, lines = [], ["_set(self, '__class__', _twin)"]
    for f in fields(kind):  # type: ignore[arg-type]  # it is one
        if not f.init:
            raise TypeError(f"{kind.__name__} fills {f.name} itself; leave @made_at_once out")
        given = f.name
        if f.default is not MISSING:
            made[f"default_{f.name}"] = f.default
            given = f"{f.name}=default_{f.name}"
        elif f.default_factory is not MISSING:
            made[f"default_{f.name}"] = f.default_factory
            given = f"{f.name}=_left_out"
            lines.append(f"if {f.name} is _left_out: {f.name} = default_{f.name}()")
        parameters.append(given)
        lines.append(f"self.{f.name} = {f.name}")
    body = "".join(f"\n    {line}" for line in (*lines, "self.__class__ = _kind"))
    exec(f"def __init__(self, {', '.join(parameters)}):{body}", made)  # noqa: S102  # names of fields alone
    kind.__init__ = made["__init__"]  # type: ignore[method-assign]  # the same parameters, the same effect
    return kind


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
    return type(f"Open{kind.__name__}", kind.__bases__, {"__slots__": kind.__slots__}), names  # type: ignore[attr-defined]
