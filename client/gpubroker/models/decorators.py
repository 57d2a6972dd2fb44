"""Functions that ask a model: what they return is what it is asked."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, Unpack
from weakref import WeakKeyDictionary

from gpubroker.async_broker import AsyncBroker
from gpubroker.broker import Broker
from gpubroker.errors import WrongArgument
from gpubroker.models.requests import InferOptions

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

_async_brokers: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncBroker] = WeakKeyDictionary()
"""Their connections are those of one event loop."""


def inference(
    model_name: str,
    *,
    broker: Broker | AsyncBroker | None = None,
    **options: Unpack[InferOptions],
) -> Callable[[F], F]:
    """Make a function ask a model with the arrays that it returns.

        @inference(model_name="resnet", model_type="vision", priority="interactive")
        def classify(path: str):
            def process_outputs(outputs):
                return labels[outputs["probabilities"].argmax()]

            return {"inputs": {"image": pixels_of(path)}, "process_outputs": process_outputs}

        classify("cat.png")

    It returns `inputs`, the arrays by name, and, if it likes, `process_outputs`, which is called here with
    the outputs by name and whose value the caller gets; else that gets the outputs. What has `async def` is
    awaited, of the two as well. Without a `broker` it asks the service that `Broker()` finds. The options
    are those of `Broker.infer`, and it raises what that raises; WrongArgument if something else is returned.
    """

    def decorate(function: F) -> F:
        if inspect.iscoroutinefunction(function):
            if isinstance(broker, Broker):
                raise WrongArgument(f"{function.__name__} has async def and needs an AsyncBroker")
            return _asking_async(function, broker, model_name, options)  # type: ignore[return-value]  # see P
        if isinstance(broker, AsyncBroker):
            raise WrongArgument(f"{function.__name__} has no async def and needs a Broker")
        return _asking(function, broker, model_name, options)  # type: ignore[return-value]  # see P

    return decorate


def _asking(
    function: Callable[P, Any], broker: Broker | None, model: str, options: InferOptions
) -> Callable[P, Any]:
    @wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> Any:
        wanted = _wanted(function, function(*args, **kwargs))
        outputs = (broker or default_broker()).infer(model, wanted.inputs, **options)
        return outputs if wanted.process_outputs is None else wanted.process_outputs(outputs)

    return ask


def _asking_async(
    function: Callable[P, Any], broker: AsyncBroker | None, model: str, options: InferOptions
) -> Callable[P, Any]:
    @wraps(function)
    async def ask(*args: P.args, **kwargs: P.kwargs) -> Any:
        wanted = _wanted(function, await function(*args, **kwargs))
        outputs = await (broker or _async_broker()).infer(model, wanted.inputs, **options)
        if wanted.process_outputs is None:
            return outputs
        made = wanted.process_outputs(outputs)
        return await made if inspect.isawaitable(made) else made

    return ask


class _Wanted(NamedTuple):
    inputs: "Mapping[str, ArrayLike]"
    process_outputs: Callable[[Mapping[str, Any]], Any] | None = None


def _wanted(function: Callable[..., Any], returned: Any) -> _Wanted:
    """Raises WrongArgument."""
    if isinstance(returned, Mapping) and "inputs" in returned and returned.keys() <= {*_Wanted._fields}:
        return _Wanted(**returned)
    found = f"the keys {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else repr(returned)
    raise WrongArgument(
        f"{function.__name__} should return {{'inputs': {{name: array}}}}, and may add "
        f"'process_outputs'; it returned {found[:200]}"
    )


@cache
def default_broker() -> Broker:
    return Broker()


def _async_broker() -> AsyncBroker:
    loop = asyncio.get_running_loop()
    if loop not in _async_brokers:
        _async_brokers[loop] = AsyncBroker()
    return _async_brokers[loop]
