"""Worker sets: their workers, what the number of workers follows, and what a called method returned."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gpubroker.wire.answered import Answered, Time


class Scaling(Struct, frozen=True):
    """The measure that the number of workers follows."""

    by: Annotated[
        Literal["calls", "cpu", "signal"],
        Meta(
            description="`calls`: under way and waiting; `cpu`: per cent of one core; `signal`: the number "
            "that was last posted to `/worker-sets/{id}/signal`."
        ),
    ]
    target: Annotated[float, Meta(description="The value of the signal that one worker is to have.")]
    down_after_seconds: Annotated[
        float, Meta(description="The time for which less must be enough before there are fewer workers.")
    ]


class SetWorker(Answered, frozen=True):
    """A task that is a worker of a set."""

    id: Annotated[str, Meta(description="An ordinary task, with its own log, explanation and events.")]
    state: Annotated[str, Meta(description="The state of its task; `held` if the worker is not wanted now.")]
    node: str | None
    attempt: int
    failures: Annotated[
        int, Meta(description="The number of restarts after failures, until it has run well for long.")
    ]


class WorkerSet(Answered, frozen=True):
    """A worker set as it is now."""

    id: str
    name: str
    tenant: str
    state: Annotated[
        Literal["active", "over"], Meta(description="`over`: it was ended, or none of its workers is left.")
    ]
    count: Annotated[int, Meta(description="The number of workers that are wanted.")]
    min_count: int
    max_count: int
    places: Annotated[
        int,
        Meta(
            description="The number of places that were made with the set; `max_count` may be that at most. "
            "A place is a task that is a worker while one is wanted, and is held otherwise."
        ),
    ]
    max_concurrency: int
    scale: Scaling | None
    signal: float | None
    states: Annotated[Mapping[str, int], Meta(description="The number of workers in each state.")]
    workers: tuple[SetWorker, ...]
    created_at: Time


class CallResult(Answered, frozen=True):
    """The value that a method returned in a worker."""

    worker: Annotated[str, Meta(description="The task that answered.")]
    attempt: int
    seconds: Annotated[float, Meta(description="The time that the method took.")]
    result: Any
    data_base64: Annotated[str | None, Meta(description="The pickled result of a pickled call.")]
