"""Open and call the function of a run, and return its outcome, whatever user code does."""

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle

from gpubroker.runtime.messages import RunOrder, RunOutcome, failed
from gpubroker.runtime.objects import named_object
from gpubroker.runtime.outcome import Store, describe, raised, succeeded, trace_of
from gpubroker.runtime.task import RunningTask

PLAIN_FUNCTION = "__gpubroker_function__"
"""The attribute under which a decorated task keeps the function itself."""

_MOST_PLACES = 6
"""The most directories, other than Python's own, that an error message names."""


class CannotOpen(Exception):
    """The function or its arguments cannot be opened; the run ends with `outcome`."""

    def __init__(self, outcome: RunOutcome) -> None:
        super().__init__(outcome.fault.message if outcome.fault else "")
        self.outcome = outcome


class Invocation(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def opened(order: RunOrder) -> Invocation:
    """Return the function of an entrypoint, or a pickled one, with its arguments. Raises CannotOpen."""
    return _opened_function(order) if order.kind == "function" else _opened_entrypoint(order)


def called(call: Invocation, order: RunOrder, store: Store, task: RunningTask) -> RunOutcome:
    """Call the function in this thread and return its outcome. `store` takes a result that is too large."""
    try:
        value = call.function(*call.args, **call.kwargs)
        if inspect.isawaitable(value):
            import asyncio  # takes as long as all other imports of an environment's process

            value = asyncio.run(_awaited(value))
    except SystemExit as leave:
        # As a program would end: 0 and None say success, and after a stop notice only that it obeyed.
        if leave.code not in (None, 0):
            return raised(leave)
        if task.should_stop:
            return RunOutcome("stopped")
        value = None
    except BaseException as fault:
        return raised(fault)
    return succeeded(value, order.result_format, order.result_limit_bytes, store)


def with_objects(call: Invocation, fetch: Callable[[str], Any]) -> Invocation:
    """Return the call with objects in place of the arguments that name them. Raises what `fetch` raises."""
    args = tuple(with_object(value, fetch) for value in call.args)
    return Invocation(
        call.function, args, {name: with_object(value, fetch) for name, value in call.kwargs.items()}
    )


def with_object(value: Any, fetch: Callable[[str], Any]) -> Any:
    id = named_object(value)
    return value if id is None else fetch(id)


async def _awaited(value: Any) -> Any:
    return await value


def _opened_entrypoint(order: RunOrder) -> Invocation:
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
            failed("import_failed", f"{order.entrypoint} is a {type(target).__name__}, not a function")
        )
    _check_home(order.entrypoint, function)
    try:
        given = json.loads(order.arguments or b"{}")
        return Invocation(function, tuple(given.get("args", ())), dict(given.get("kwargs", {})))
    except (ValueError, TypeError, AttributeError) as fault:
        message = f"the arguments are not {{'args': [...], 'kwargs': {{...}}}}: {describe(fault)}"
        raise CannotOpen(failed("corrupt_order", message)) from None


def _check_home(entrypoint: str, function: Any) -> None:
    """Refuse a function that its module only imports: permission for a module covers its own functions and
    those of its package. Raises CannotOpen."""
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


def _opened_function(order: RunOrder) -> Invocation:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if order.python and order.python != version:
        raise CannotOpen(
            failed(
                "import_failed",
                f"the function was pickled by Python {order.python} and this node runs {version}; submit it "
                f"from Python {version}, or submit an entrypoint",
            )
        )
    try:
        function, args, kwargs = cloudpickle.loads(order.arguments)
        return Invocation(getattr(function, PLAIN_FUNCTION, function), tuple(args), dict(kwargs))
    except BaseException as fault:
        message = f"the pickled function cannot be opened here: {describe(fault)}; {_how_to_bring(fault)}"
        raise CannotOpen(failed("import_failed", message, trace_of(fault))) from None


def _how_to_bring(fault: BaseException) -> str:
    """Return what to do so that the module which a function needs can be imported."""
    name = fault.name if isinstance(fault, ModuleNotFoundError) and fault.name else ""
    module = f"module {name.partition('.')[0]}" if name else "its module"
    named = f'modules=["{name.partition(".")[0]}"]' if name else "modules=[...]"
    return (
        f'send the directory that {module} is in with the task: upload="." (--upload); let it travel with a '
        f"function: {named}; or have the operator install it, or put it into task_path"
    )


def _import_failed(entrypoint: str, fault: BaseException) -> RunOutcome:
    message = f"cannot import {entrypoint}: {describe(fault)}"
    if isinstance(fault, ImportError):
        paths = [path for path in sys.path if path and not path.startswith(sys.base_prefix)]
        places = "".join(f"\n  {path}" for path in paths[:_MOST_PLACES])
        first = 'the operator\'s task_path comes first; upload="." (--upload) brings your own directory'
        message += f"\nPython looked in these directories ({first}):{places}"
    return failed("import_failed", message, trace_of(fault))
