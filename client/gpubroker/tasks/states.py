"""The states of a task."""

from enum import StrEnum


class TaskState(StrEnum):
    PENDING = "pending"
    ADMITTED = "admitted"
    """Memory is leased and the start is on its way."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Told to stop, by a cancel, a preemption, its time limit or its deadline; still holds its memory."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    """A state that this version of the SDK does not know; `task.raw["state"]` names it."""

    @classmethod
    def _missing_(cls, _value: object) -> "TaskState":
        return cls.UNKNOWN

    @property
    def is_terminal(self) -> bool:
        return self in (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED)
