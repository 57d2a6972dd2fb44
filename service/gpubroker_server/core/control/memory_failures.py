"""Count runs that ended for lack of memory, by the kind of memory. The counts are kept in the leader's memory
only."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId

LATELY_SECONDS = Seconds(3600.0)
OFTEN = 3
"""The number of failures of one kind and name within LATELY_SECONDS that makes a finding."""
MAX_COUNTED = 1_000
_OF_OURS = {"out_of_memory": "node", "host_memory_exceeded": "host"}
_OF_FRAMEWORKS = re.compile(
    r"(CUDA|HIP)( error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED"  # PyTorch
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"  # CUDA itself, and what is built on it
    r"|RESOURCE_EXHAUSTED: Out of memory|Out of memory allocating"  # JAX; CuPy
    r"|OOM when allocating tensor .*GPU|device:GPU.* failed to allocate memory"  # TensorFlow
)


class MemoryFailures(NamedTuple):
    """The failures of the tasks of one name."""

    memory: str
    """`cuda` after a framework's own error, `host` if the run took more than it asked for, `node` if Ray's
    memory monitor killed the run."""
    tenant: str
    name: str
    task: TaskId
    """The task that failed last."""
    times: int
    first_at: Instant
    last_at: Instant


def memory_of(failure: Failure | None) -> str | None:
    """Return the kind of memory that ran out; None if the failure had another cause."""
    if failure is None:
        return None
    return _OF_OURS.get(failure.kind) or ("cuda" if _OF_FRAMEWORKS.search(failure.message) else None)


class MemoryFailureCount:
    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], MemoryFailures] = {}
        """(memory, tenant, name) -> failures. The entry with the oldest last failure comes first."""

    def note(self, decisions: Iterable[Decision]) -> None:
        """Count the failures in committed decisions. A decision about the end of a run has the outcome and
        the task."""
        for decision in decisions:
            outcome = decision.outcome
            memory = None if outcome is None else memory_of(outcome.failure)
            if outcome is None or memory is None:
                continue
            for write in decision.tasks[:1]:
                about, at = (memory, write.task.tenant, write.task.name), outcome.at
                failures = self._known.pop(about, None)
                if failures is None or at - failures.last_at > LATELY_SECONDS:
                    failures = MemoryFailures(*about, write.task.id, 0, at, at)
                self._known[about] = failures._replace(
                    task=write.task.id, times=failures.times + 1, last_at=at
                )
        while len(self._known) > MAX_COUNTED:
            del self._known[next(iter(self._known))]

    def often(self, now: Instant) -> tuple[MemoryFailures, ...]:
        self._known = {
            about: failures
            for about, failures in self._known.items()
            if now - failures.last_at <= LATELY_SECONDS
        }
        return tuple(failures for failures in self._known.values() if failures.times >= OFTEN)
