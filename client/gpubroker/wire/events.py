"""The log of everything that changed."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time
from gpubroker.wire.tasks import TaskState


class Event(Answered, frozen=True):
    """One event of the log; positions have no gaps and follow the order of commits."""

    position: Annotated[int, Meta(description="Place in the log; gap-free, in commit order.")]
    at: Time
    kind: str
    key: Annotated[str, Meta(description="The row that changed.")]
    version: int
    fields: Mapping[str, Any]


class EventPage(Answered, frozen=True):
    items: tuple[Event, ...]
    next_after: Annotated[int, Meta(description="Pass it as `after` to read on.")]
    oldest: Annotated[int, Meta(description="Position of the oldest event that is kept.")]


class StreamEnd(Answered, frozen=True):
    """The data of the message `end`, the last of a task's stream."""

    task: Annotated[str, Meta(description="The task, the array or the worker set that has ended.")]
    state: TaskState
