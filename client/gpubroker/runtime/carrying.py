"""Name the part of a value that cannot be pickled or written as JSON: `model.lock`, `argument 2`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import cloudpickle

_DEEPEST = 8
_MAX_PARTS = 1000
"""The most parts of one value that are searched, because an error message is not worth a long search."""

Fails = Callable[[Any], bool]
Part = tuple[str, Any]


def is_not_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # objects may raise anything when they are pickled
        return True
    return False


def is_not_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except Exception:
        return True
    return False


def faulty_part(parts: Iterable[Part], fails: Fails) -> str | None:
    """Return the name of the innermost part that fails, such as `argument 1['model'].lock`; None if each part
    can be carried by itself."""
    faulty = _first(parts, fails)
    if faulty is None:
        return None
    name, value = faulty
    for _ in range(_DEEPEST):
        inner = _first(_parts_of(name, value), fails)
        if inner is None:
            break
        name, value = inner
    return name


def call_parts(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the arguments of a call as parts. The first argument is number 1."""
    yield from ((f"argument {number}", value) for number, value in enumerate(args, start=1))
    yield from ((f"argument {name}", value) for name, value in kwargs.items())


def function_parts(function: Callable[..., Any]) -> Iterator[Part]:
    """Yield what is pickled with a function: the variables that it uses, its defaults, its object."""
    if isinstance(function, partial):
        yield from function_parts(function.func)
        yield from call_parts(function.args, function.keywords)
    elif isinstance(function, MethodType):
        yield "self", function.__self__
    elif isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with suppress(ValueError):  # the variable has no value yet
                yield f"variable {name}", cell.cell_contents
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                yield f"variable {name}", function.__globals__[name]
        yield from ((f"default {value!r:.40}", value) for value in function.__defaults__ or ())
        yield from ((f"default {name}", value) for name, value in (function.__kwdefaults__ or {}).items())


def _first(parts: Iterable[Part], fails: Fails) -> Part | None:
    for number, (name, value) in enumerate(parts):
        if number == _MAX_PARTS:
            return None
        if fails(value):
            return name, value
    return None


def _parts_of(name: str, value: Any) -> Iterator[Part]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{number}]", each) for number, each in enumerate(value))
    elif isinstance(value, FunctionType | MethodType | partial):
        yield from ((f"{inner} of {name}", each) for inner, each in function_parts(value))
    else:
        try:
            fields = vars(value)
        except TypeError:
            return
        yield from ((f"{name}.{field}", each) for field, each in fields.items())


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function looks up, also in the functions and comprehensions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
