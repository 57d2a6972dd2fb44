"""Open the function of a run, call it, and bring back its outcome, whatever user code does."""

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle

from gpubroker.runtime.messages import Outcome, RunOrder, failed
from gpubroker.runtime.outcome import describe, raised, succeeded, trace_of

PLAIN_FUNCTION = "__gpubroker_function__"
"""Attribute under which a decorated task keeps the function itself."""


_MOST_PLACES = 6
"""So many directories are named, a line each, of those that are not Python's own."""


class CannotOpen(Exception):
    """The function or its arguments cannot be had; `outcome` is what the run ends with."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.fault.message if outcome.fault else "")
        self.outcome = outcome


class Call(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def opened(order: RunOrder) -> Call:
    """The function of an entrypoint, or a pickled one, with its arguments. Raises CannotOpen."""
    return _opened_function(order) if order.kind == "function" else _opened_entrypoint(order)


def called(call: Call, order: RunOrder) -> Outcome:
    """Run it to its end, in this thread."""
    try:
        value = call.function(*call.args, **call.kwargs)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except BaseException as fault:
        return raised(fault)
    return succeeded(value, order.result_format, order.result_limit_bytes)


async def _awaited(value: Any) -> Any:
    return await value


def _opened_entrypoint(order: RunOrder) -> Call:
    module_name, _, path = order.entrypoint.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for name in path.split("."):
            target = getattr(target, name)
    except BaseException as fault:
        raise CannotOpen(_import_failed(order.entrypoint, fault)) from None
    function = getattr(target, PLAIN_FUNCTION, target)
    if not callable(function):
        raise CannotOpen(
            failed("import_failed", f"{order.entrypoint} is a {type(target).__name__}, no function")
        )
    _check_home(order.entrypoint, function)
    try:
        given = json.loads(order.arguments or b"{}")
        return Call(function, tuple(given.get("args", ())), dict(given.get("kwargs", {})))
    except (ValueError, TypeError, AttributeError) as fault:
        message = f"the arguments are not {{'args': [...], 'kwargs': {{...}}}}: {describe(fault)}"
        raise CannotOpen(failed("corrupt_order", message)) from None


def _check_home(entrypoint: str, function: Any) -> None:
    """An allowed module opens its own functions and those of its package, not all that it imports."""
    module_name, _, path = entrypoint.partition(":")
    home = getattr(function, "__module__", None) or "builtins"
    if home == module_name or home.startswith(f"{module_name}."):
        return
    raise CannotOpen(
        failed(
            "import_failed",
            f"{entrypoint} is defined in {home}, and {module_name} only imports it; submit it as "
            f"{home}:{path}, or call it from a function of {module_name}",
        )
    )


def _opened_function(order: RunOrder) -> Call:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if order.python and order.python != here:
        raise CannotOpen(
            failed(
                "import_failed",
                f"the function was pickled by Python {order.python} and this node runs {here}; submit it "
                f"from Python {here}, or submit an entrypoint",
            )
        )
    try:
        function, args, kwargs = cloudpickle.loads(order.arguments)
        return Call(function, tuple(args), dict(kwargs))
    except BaseException as fault:
        message = (
            f"the pickled function cannot be opened here: {describe(fault)}; put its module into the "
            "service's task_path, or let it travel too: cloudpickle.register_pickle_by_value(module)"
        )
        raise CannotOpen(failed("import_failed", message, trace_of(fault))) from None


def _import_failed(entrypoint: str, fault: BaseException) -> Outcome:
    paths = [path for path in sys.path if path and not path.startswith(sys.base_prefix)]
    places = "".join(f"\n  {path}" for path in paths[:_MOST_PLACES])
    message = (
        f"cannot import {entrypoint}: {describe(fault)}; modules are looked for in these directories, the "
        f"operator's task_path first, and in those of Python itself:{places}"
    )
    return failed("import_failed", message, trace_of(fault))
