"""Port to the records of the output files that were collected from runs."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.domain.units import Fence, Instant, TaskId


class RunOutput(Struct, frozen=True):
    """The files that one run has left: the digest of their archive, or a message that says why there is no
    archive."""

    task: TaskId
    fence: Fence
    rank: int
    at: Instant
    files: int
    digest: str | None
    size_bytes: int
    message: str


class OutputRows(Protocol):
    """The records of collected files. Each call may raise StoreUnavailable."""

    async def keep_output(self, output: RunOutput) -> None:
        """Store the record, in place of an earlier record of this run."""

    async def outputs_of(self, task: TaskId) -> Sequence[RunOutput]:
        """Return the records of all attempts of the task, in the order of the attempts."""
