"""Arrays: one function or command for many items, and what became of each item."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from gpubroker.wire.answered import Answered, SettledState, Time
from gpubroker.wire.tasks import Failure, RetryCause


class ArrayState(SettledState):
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """Some items failed, or were not done although no worker is left."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def is_terminal(self) -> bool:
        return self in (ArrayState.SUCCEEDED, ArrayState.FAILED, ArrayState.CANCELLED)


class ArrayWorker(Answered, frozen=True):
    """A task that works on items of an array."""

    id: Annotated[str, Meta(description="An ordinary task, with its own log, explanation and events.")]
    state: str


class Array(Answered, frozen=True):
    """An array, its workers, and how far it is."""

    id: str
    name: str
    tenant: str
    state: Annotated[
        ArrayState, Meta(description="`failed`: items failed, or are left although no worker is.")
    ]
    total: int
    done: Annotated[int, Meta(description="The number of them that have a result or an error.")]
    failed: Annotated[int, Meta(description="The number of those with an error.")]
    fraction: float
    items_per_second: Annotated[float | None, Meta(description="The average since the first result.")]
    eta_at: Annotated[Time | None, Meta(description="The time when all are done, at this rate.")]
    chunk: int | None
    item_timeout_seconds: float | None
    item_retries: int
    retry_on: Annotated[tuple[RetryCause, ...], Meta(description="The causes that use a retry of an item.")]
    result_format: Literal["json", "cloudpickle"]
    workers: tuple[ArrayWorker, ...]
    submitted_at: Time
    last_item_at: Time | None
    retry_of: Annotated[str | None, Meta(description="The array whose failed items this one does again.")]

    def __repr__(self) -> str:
        """The main fields in one line; `array.raw` has all."""
        name = f"{self.name!r}, " if self.name else ""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"<Array {self.id} {name}{self.state.value}, {self.done}/{self.total}{failed}>"

    @property
    def is_finished(self) -> bool:
        return self.state.is_terminal


class ArrayItem(Answered, frozen=True):
    """The end of one item."""

    number: Annotated[int, Meta(description="The item's place in the list, from 0.")]
    state: Literal["succeeded", "failed"]
    seconds: Annotated[float, Meta(description="The time that it took, all tries together.")]
    tries: int
    result: Any = UNSET
    data_base64: Annotated[
        str | UnsetType,
        Meta(description="A result that is pickled, or is no JSON, instead of `result`."),
    ] = UNSET
    error: Failure | UnsetType = UNSET


class ArrayItemPage(Answered, frozen=True):
    """Items that are done, and where the next ones begin."""

    items: tuple[ArrayItem, ...]
    next_after: Annotated[int, Meta(description="`after` for the next page, now or later.")]
    has_more: bool
