"""Decorators: `task` makes a function a task, `inference` makes it ask a model.

A pickled task function refers to this module, so importing it loads no HTTP client.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

from gpubroker.errors import WrongArgument
from gpubroker.models.inference import InferOptions
from gpubroker.tasks.submission import DEFAULTS, SubmitOptions, check_options

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gpubroker.broker import AsyncBroker, Broker
    from gpubroker.tasks.task import Task

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
R_co = TypeVar("R_co", covariant=True)


class TaskFunction(Protocol[P, R_co]):
    """A function that can be called, and submitted as a task."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> "Task":
        """Queue a run of the function with these arguments, at the service that `Broker()` finds."""


@overload
def task(function: Callable[P, R_co], /) -> TaskFunction[P, R_co]: ...
@overload
def task(**options: Unpack[SubmitOptions]) -> Callable[[Callable[P, R_co]], TaskFunction[P, R_co]]: ...
def task(function: Callable[..., Any] | None = None, /, **options: Unpack[SubmitOptions]) -> Any:
    """Declare how a function is submitted; `@task` alone is `@task()`.

        @task(gpu_mb=18 * 1024, priority="batch", max_retries=2)
        def fit(epochs: int) -> float: ...

        fit(3)                           # runs here
        queued = fit.submit(3)           # runs as a task
        broker.submit(fit, 3, gpus=2)    # the same; these options go before those of the decorator

    The function is pickled, which needs the scope `tasks:code`, and can still be called. The options are
    those of `Broker.submit`; `submit_many` and `simulate` take the function as well. Raises WrongArgument.
    """
    if function is not None and not callable(function):
        raise WrongArgument(f"task() takes its options by name, such as gpus=1, not {function!r}")
    check_options(options)
    for name in ("kwargs", "idempotency_key"):
        if name in options:
            raise WrongArgument(f"{name} belongs to one submit; pass it there, not to the decorator")

    def decorate(function: Callable[P, R_co]) -> TaskFunction[P, R_co]:
        setattr(function, DEFAULTS, options)
        submittable = cast("TaskFunction[P, R_co]", function)
        submittable.submit = partial(_submit, function)  # type: ignore[method-assign]  # it has none before
        return submittable

    return decorate if function is None else decorate(function)


def _submit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Task":
    return _default_broker().submit(function, *args, kwargs=kwargs)


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

        classify("cat.png")

    The function returns `inputs`, arrays by name, and optionally `process_outputs`, which is called here with
    the outputs by name; its value goes to the caller, which otherwise gets the outputs. Functions with
    `async def` are awaited, `process_outputs` too. Without a `broker`, the service that `Broker()` finds is
    asked. The options are those of `Broker.infer`; raises what that raises, and WrongArgument if the function
    returns something else.
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
