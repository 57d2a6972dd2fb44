"""Decorators: `task` makes a function a task, `inference` makes it ask a model.

A pickled task function refers to this module, so importing it loads no HTTP client.
"""

import asyncio
import inspect
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary

from gpubroker.errors import BrokerError, WrongArgument
from gpubroker.models.inference import InferOptions
from gpubroker.runtime.invoke import PLAIN_FUNCTION
from gpubroker.runtime.task import environment
from gpubroker.tasks.submission import DEFAULTS, SubmitOptions, check_options
from gpubroker.transport.connection import TASK_VARIABLE, TOKEN_VARIABLE

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gpubroker.broker import AsyncBroker, Broker
    from gpubroker.tasks.task import Task

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
R_co = TypeVar("R_co", covariant=True)

CHILD_TTL_SECONDS = 600.0
"""The longest wait for the start of a task that a run awaits, if its options say nothing."""


class TaskFunction(Protocol[P, R_co]):
    """A function that can be called, and submitted as a task of the service that `Broker()` finds."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> "Task":
        """Queue a run of the function with these arguments."""

    def map(self, items: Iterable[Any], *args: Any, **options: Any) -> Iterator[R_co]:
        """Run the function for each item, and iterate over the results, as `Broker.map`."""

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function in this process, as the call of the function itself does."""


class AsyncTaskFunction(Protocol[P, R_co]):
    """An `async def` function whose awaited call runs as a task of the service that `AsyncBroker()` finds."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]: ...

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> "Coroutine[Any, Any, Task]":
        """Queue a run of the function with these arguments, and return the task without waiting for its
        end."""

    def map(self, items: Iterable[Any], *args: Any, **options: Any) -> AsyncIterator[R_co]:
        """Run the function for each item, and iterate over the results, as `AsyncBroker.map`."""

    def local(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """Run the function in this process."""


@overload
def task(  # type: ignore[overload-overlap]  # the first that fits counts
    function: Callable[P, Coroutine[Any, Any, R_co]], /
) -> AsyncTaskFunction[P, R_co]: ...
@overload
def task(function: Callable[P, R_co], /) -> TaskFunction[P, R_co]: ...
@overload
def task(**options: Unpack[SubmitOptions]) -> "_Decorator": ...
def task(function: Callable[..., Any] | None = None, /, **options: Unpack[SubmitOptions]) -> Any:
    """Declare how a function is submitted; `@task` alone is `@task()`.

        @task(gpu_mb=18 * 1024, priority="batch", max_retries=2)
        def fit(epochs: int) -> float: ...

        fit(3)                           # runs here, as fit.local(3)
        queued = fit.submit(3)           # runs as a task
        losses = fit.map([1, 2, 3])      # runs in the workers of an array
        broker.submit(fit, 3, gpus=2)    # the same as submit; these options go before those of the decorator

    An `async def` function runs as a task when its call is awaited, with the resources of the decorator:

        @task(gpu_mb=18 * 1024)
        async def fit(epochs: int) -> float: ...

        loss = await fit(3)              # runs as a task, and waits for its result
        queued = await fit.submit(3)     # only queues it
        loss = await fit.local(3)        # runs here

    If the await is cancelled, the task is cancelled too. Inside a run, the awaited call is a task as well if
    the operator has set `submit_from_tasks`, and it expires if it has not started within
    CHILD_TTL_SECONDS, unless `queue_ttl_seconds` says otherwise: the run keeps its resources while it waits,
    and runs that wait for one another must not wait for ever. Without that setting the function runs in the
    process of the run. An awaited call raises what `AsyncBroker.result` raises.

    The function is pickled, which needs the scope `tasks:code`. The options are those of `Broker.submit`;
    `submit_many` and `simulate` take the function as well. Raises WrongArgument.
    """
    if function is not None and not callable(function):
        raise WrongArgument(f"task() takes its options by name, such as gpus=1, not {function!r}")
    check_options(options)
    for name in ("kwargs", "idempotency_key"):
        if name in options:
            raise WrongArgument(f"{name} belongs to one submit; pass it there, not to the decorator")

    def decorate(function: Callable[..., Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return _run_remotely(function, options)
        submittable: Any = function
        setattr(submittable, DEFAULTS, options)
        submittable.submit = partial(_submit, function)
        submittable.map = partial(_map, function)
        submittable.local = function
        return function

    return decorate if function is None else decorate(function)


class _Decorator(Protocol):
    @overload
    def __call__(  # type: ignore[overload-overlap]  # the first that fits counts
        self, function: Callable[P, Coroutine[Any, Any, R_co]], /
    ) -> AsyncTaskFunction[P, R_co]: ...
    @overload
    def __call__(self, function: Callable[P, R_co], /) -> TaskFunction[P, R_co]: ...


def _submit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Task":
    return _default_broker().submit(function, *args, kwargs=kwargs)


def _map(function: Callable[..., Any], items: Iterable[Any], *args: Any, **options: Any) -> Iterator[Any]:
    return _default_broker().map(function, items, *args, **options)


def _run_remotely(function: Callable[..., Any], options: SubmitOptions) -> Any:
    """Return the function whose awaited call runs `function` as a task. A run opens `function` itself."""

    @wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        if TASK_VARIABLE in environment():
            if not environment().get(TOKEN_VARIABLE):
                return await function(*args, **kwargs)
            ttl_seconds = options.get("queue_ttl_seconds", CHILD_TTL_SECONDS)
            return await _result_of(run, args, {"kwargs": kwargs, "queue_ttl_seconds": ttl_seconds})
        _warn_of_new_meaning(function)
        return await _result_of(run, args, {"kwargs": kwargs})

    async def submit(*args: Any, **kwargs: Any) -> "Task":
        return await _default_async_broker().submit(run, *args, kwargs=kwargs)

    def map_items(items: Iterable[Any], *args: Any, **given: Any) -> AsyncIterator[Any]:
        return _default_async_broker().map(run, items, *args, **given)

    submittable: Any = run
    setattr(submittable, DEFAULTS, options)
    setattr(submittable, PLAIN_FUNCTION, function)
    submittable.submit, submittable.map, submittable.local = submit, map_items, function
    return run


async def _result_of(target: Callable[..., Any], args: Sequence[Any], options: SubmitOptions) -> Any:
    """Submit a run, and return its result. A cancelled wait cancels the task."""
    broker = _default_async_broker()
    queued = await broker.submit(target, *args, **options)
    try:
        return await broker.result(queued)
    except asyncio.CancelledError:
        with suppress(BrokerError):
            await asyncio.shield(broker.cancel(queued, reason="the call that awaited it was cancelled"))
        raise


_warned: set[str] = set()
"""The functions about whose new meaning a warning was given."""


def _warn_of_new_meaning(function: Callable[..., Any]) -> None:
    """Warn once for each function: in gpubroker 0.2 the awaited call ran in this process."""
    name = f"{function.__module__}.{function.__qualname__}"
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"await {function.__name__}(...) runs as a task of the service since gpubroker 0.3; to run it in "
            f"this process as before, await {function.__name__}.local(...)",
            FutureWarning,
            stacklevel=3,
        )


def inference(
    model_name: str,
    *,
    broker: "Broker | AsyncBroker | None" = None,
    **options: Unpack[InferOptions],
) -> Callable[[F], F]:
    """Make a function ask a model with the arrays that it returns.

        @inference(model_name="resnet", model_type="vision", priority="interactive")
        def classify(path: str):
            def process_outputs(outputs):
                return labels[outputs["probabilities"].argmax()]

    The function returns a dict with `inputs`, arrays by name, and optionally `process_outputs`. That function
    is called here with the outputs by name, and the caller gets what it returns; without it, the caller gets
    the outputs. Functions with `async def` are awaited, `process_outputs` too. Without a `broker`, the
    service that `Broker()` finds is asked. The options are those of `Broker.infer`. Raises what
    `Broker.infer` raises, and WrongArgument if the function returns something else.
    """
    if callable(model_name):
        raise WrongArgument('inference needs the name of the model: @inference(model_name="resnet")')

    def decorate(function: F) -> F:
        from gpubroker.broker import AsyncBroker, Broker

        if inspect.iscoroutinefunction(function):
            if isinstance(broker, Broker):
                raise WrongArgument(f"{function.__name__} is an async function and needs an AsyncBroker")
            return _asking_async(function, broker, model_name, options)  # type: ignore[return-value]  # see P
        if isinstance(broker, AsyncBroker):
            raise WrongArgument(f"{function.__name__} is not an async function and needs a Broker")
        return _asking(function, broker, model_name, options)  # type: ignore[return-value]  # see P

    return decorate


def _asking(
    function: Callable[P, Any], broker: "Broker | None", model: str, options: InferOptions
) -> Callable[P, Any]:
    @wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> Any:
        request = _request_of(function, function(*args, **kwargs))
        outputs = (broker or _default_broker()).infer(model, request.inputs, **options)
        return outputs if request.process_outputs is None else request.process_outputs(outputs)

    return ask


def _asking_async(
    function: Callable[P, Any], broker: "AsyncBroker | None", model: str, options: InferOptions
) -> Callable[P, Any]:
    @wraps(function)
    async def ask(*args: P.args, **kwargs: P.kwargs) -> Any:
        request = _request_of(function, await function(*args, **kwargs))
        outputs = await (broker or _default_async_broker()).infer(model, request.inputs, **options)
        if request.process_outputs is None:
            return outputs
        value = request.process_outputs(outputs)
        return await value if inspect.isawaitable(value) else value

    return ask


class _Request(NamedTuple):
    inputs: "Mapping[str, ArrayLike]"
    process_outputs: Callable[[Mapping[str, Any]], Any] | None = None


def _request_of(function: Callable[..., Any], returned: Any) -> _Request:
    """Return the request that a function has returned, with all its fields. Raises WrongArgument if it is no
    request."""
    if isinstance(returned, Mapping) and "inputs" in returned and returned.keys() <= {*_Request._fields}:
        return _Request(**returned)
    found = f"the keys {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else repr(returned)
    raise WrongArgument(
        f"{function.__name__} should return {{'inputs': {{name: array}}}}, optionally with "
        f"'process_outputs'; it returned {found[:200]}"
    )


@cache
def _default_broker() -> "Broker":
    from gpubroker.broker import Broker

    return Broker()


_async_brokers: "WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncBroker]" = WeakKeyDictionary()
"""One broker for each event loop, because connections belong to a loop."""


def _default_async_broker() -> "AsyncBroker":
    from gpubroker.broker import AsyncBroker

    loop = asyncio.get_running_loop()
    if loop not in _async_brokers:
        _async_brokers[loop] = AsyncBroker()
    return _async_brokers[loop]
