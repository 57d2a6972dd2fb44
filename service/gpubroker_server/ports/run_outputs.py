"""Port to the records of what was collected of the files of runs."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.domain.units import Fence, Instant, TaskId


class RunOutput(Struct, frozen=True):
    """The files that one run has left: the object with their archive, or why there is none."""

    task: TaskId
    fence: Fence
    rank: int
    at: Instant
    files: int
    digest: str | None
    size_bytes: int
    message: str


class OutputRows(Protocol):
    """Each call may raise StoreUnavailable."""

    async def keep_output(self, output: RunOutput) -> None:
        """Keep it, in place of an earlier one of this run."""

    async def outputs_of(self, task: TaskId) -> Sequence[RunOutput]:
        """Return those of all attempts, in their order."""
