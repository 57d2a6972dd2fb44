"""Functions that are tasks. They travel with what is here, so it is light."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, Unpack, cast

from gpubroker.errors import WrongArgument
from gpubroker.tasks.submission import USUAL, SubmitOptions, check_options

if TYPE_CHECKING:
    from gpubroker.tasks.task import Task

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class TaskFunction(Protocol[P, R_co]):
    """A function as ever, that knows how it is submitted."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> "Task":
        """Queue a run of it with these arguments, at the service that `Broker()` finds."""
        ...


def task(**options: Unpack[SubmitOptions]) -> Callable[[Callable[P, R_co]], TaskFunction[P, R_co]]:
    """Say with a function how it is submitted.

        @task(gpu_mb=18 * 1024, priority="batch", max_retries=2)
        def fit(epochs: int) -> float: ...

        fit(3)                           # here and now
        queued = fit.submit(3)           # as a task
        broker.submit(fit, 3, gpus=2)    # the same, with what this submit says besides or instead

    It is pickled, which needs the scope `tasks:code`, and stays the function that it was. The options are
    those of `Broker.submit`; `submit_many` and `simulate` take it as well. Raises WrongArgument.
    """
    check_options(options)
    for name in ("kwargs", "idempotency_key"):
        if name in options:
            raise WrongArgument(f"{name} is of one submit alone, and not of a function")

    def decorate(function: Callable[P, R_co]) -> TaskFunction[P, R_co]:
        setattr(function, USUAL, options)
        submittable = cast("TaskFunction[P, R_co]", function)
        submittable.submit = partial(_submit, function)  # type: ignore[method-assign]  # it has none before
        return submittable

    return decorate


def _submit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Task":
    from gpubroker.models.decorators import default_broker  # where it runs nobody pays for an HTTP client

    return default_broker().submit(function, *args, kwargs=kwargs)
