"""Tasks, their outcomes and their events, as the service answers them.

Every model keeps the whole answer in `raw`. Times are aware datetimes in UTC.
"""

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from weakref import ref

from gpubroker.errors import TaskCancelled, TaskExpired, TaskFailed, WrongArgument
from gpubroker.tasks.estimates import Expected, Sizing
from gpubroker.transport.decoding import Answered, KnownState, Raw, decode


class TaskState(KnownState):
    PENDING = "pending"
    ADMITTED = "admitted"
    """Memory is leased; the run is being started."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Asked to stop, by a cancel, a preemption, its time limit or its deadline; still holds its memory."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    UNKNOWN = "unknown"

    @property
    def is_terminal(self) -> bool:
        return self in (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED)


@dataclass(frozen=True, slots=True)
class Failure(Answered):
    """Why a task, or its last attempt, failed. `kind` is a stable token, `traceback` the task's own text."""

    kind: str
    message: str
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Inherited(Answered):
    """The priority that a task inherits in the queue, from a task that waits for it, directly or not."""

    priority: int
    task: str


@dataclass(frozen=True, slots=True)
class Pending(Answered):
    """Why a task waits. `position` counts from 1 at the head of the queue."""

    reason: str
    message: str
    position: int | None = None
    inherits: Inherited | None = None
    start: Expected | None = None


@dataclass(frozen=True, slots=True)
class Progress(Answered):
    """What a run last reported; `fraction` from 0 to 1."""

    fraction: float | None = None
    message: str | None = None
    at: datetime | None = None
    rate_per_second: float | None = None
    """Of the fraction, on average since the run first reported one."""
    eta_at: datetime | None = None
    """When the fraction reaches 1 at this rate."""


@dataclass(frozen=True, slots=True)
class Phases(Answered):
    """How long a task has been in each phase, over all its attempts; the present one counts until now."""

    queued_seconds: float = 0.0
    admitted_seconds: float = 0.0
    """From its admission until its node's agent had the order, as known once its code has begun."""
    starting_seconds: float = 0.0
    """From then until its code began."""
    running_seconds: float = 0.0
    stopping_seconds: float = 0.0
    """From a notice to stop until it was gone."""


@dataclass(frozen=True, slots=True)
class TaskDevice(Answered):
    """A device that a task holds memory on."""

    uuid: str
    gpu_mb: int = 0
    context_mb: int = 0
    """Part of `gpu_mb`: the process's own cost beyond the demand."""
    state: str = ""
    overused_mb: int | None = None
    """What the run used when it first exceeded its lease."""


@dataclass(frozen=True, slots=True)
class TaskRank(Answered):
    """One rank of a gang."""

    rank: int
    node: str = ""
    state: str = ""
    """placed, ready, running, leaving, left, succeeded or ended."""
    devices: tuple[TaskDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class QuarantinedDevice(Answered):
    uuid: str
    index: int = 0
    gpu_mb: int = 0
    measured_mb: int = 0
    """Used by its processes at the last measurement."""


@dataclass(frozen=True, slots=True)
class Quarantined(Answered):
    """A run of a task, or an external lease, that counts as using memory because it is not confirmed gone.

    `id` and `name` are empty if the token may not see that tenant.
    """

    id: str
    name: str
    kind: str
    """run, gang_member or external."""
    tenant: str
    attempt: int = 0
    rank: int = 0
    node: str = ""
    node_ready: bool = True
    gpu_mb: int = 0
    devices: tuple[QuarantinedDevice, ...] = ()
    quarantined_at: datetime | None = None
    awaits: tuple[str, ...] = ()
    """Any of these proofs ends the quarantine; the most likely first."""
    message: str = ""
    """The same in words."""


@dataclass(frozen=True, slots=True)
class Task(Answered):
    id: str
    name: str
    tenant: str
    state: TaskState
    priority: int = 0
    band: str = ""
    run: Raw = field(default_factory=dict)
    resources: Raw = field(default_factory=dict)
    sizing: Sizing | None = None
    placement: str = ""
    max_retries: int = 0
    timeout_seconds: float | None = None
    grace_seconds: float | None = None
    expected_seconds: float | None = None
    queue_ttl_seconds: float | None = None
    after: tuple[Raw, ...] = ()
    """The tasks that must end first: `task`, the id, and `on_failure`, fail or ignore."""
    failed_by: str | None = None
    """The first failed task of the dependency chain that made this one fail."""
    retry_of: str | None = None
    """The ended task that this one runs again."""
    labels: Mapping[str, str] = field(default_factory=dict)
    model_type: str | None = None
    profile: str | None = None
    max_concurrency: int | None = None
    """Its process finds it in GPUBROKER_MAX_CONCURRENCY; no other effect."""
    stream: str | None = None
    result_format: str = "json"
    held: bool = False
    attempt: int = 0
    """How often it was admitted; 0 before the first time."""
    failures: int = 0
    preemptions: int = 0
    node: str | None = None
    devices: tuple[TaskDevice, ...] = ()
    ranks: tuple[TaskRank, ...] = ()
    """Of a gang that is placed; `devices` has the devices of all ranks."""
    submitted_at: datetime | None = None
    admitted_at: datetime | None = None
    started_at: datetime | None = None
    checkpoint_at: datetime | None = None
    not_before: datetime | None = None
    expires_at: datetime | None = None
    """If it has not started by then, it expires."""
    deadline_at: datetime | None = None
    """At this time it expires if it waits, and is asked to stop if it runs."""
    finished_at: datetime | None = None
    stop_reason: str | None = None
    stop_deadline_at: datetime | None = None
    phases: Phases | None = None
    """None if the service no longer knows all of them."""
    progress: Progress | None = None
    pending: Pending | None = None
    eta: Expected | None = None
    error: Failure | None = None
    quarantine: tuple[Quarantined, ...] = ()
    """Its runs, of any attempt, that are not confirmed gone."""
    told_by: "ref[Any] | None" = field(default=None, repr=False, compare=False)
    """The broker that it came from."""

    def __reduce__(self) -> Any:
        return decode, (Task, self.raw)  # a copy elsewhere has no broker

    @property
    def is_finished(self) -> bool:
        return self.state.is_terminal

    def retry(self, *, idempotency_key: str | None = None) -> Any:
        """`broker.retry(task)` of the broker that it came from: a Task, or a coroutine of one."""
        return self._broker().retry(self, idempotency_key=idempotency_key)

    def stack(self, *, rank: int = 0) -> Any:
        """`broker.stack(task)` of the broker that it came from: a Stack, or a coroutine of one."""
        return self._broker().stack(self, rank=rank)

    def logs(self, **wanted: Any) -> Any:
        """`broker.logs(task, follow=True)` of the broker that it came from: its lines, one by one."""
        return self._broker().logs(self, **wanted)

    def _broker(self) -> Any:
        broker = None if self.told_by is None else self.told_by()
        if broker is None:
            raise WrongArgument(f"the broker that task {self.id} came from is gone; ask another by this id")
        return broker


AnyTask = Task | str
"""A task, or its id."""


def id_of(task: AnyTask) -> str:
    return task.id if isinstance(task, Task) else task


@dataclass(frozen=True, slots=True)
class Outcome(Answered):
    """How a task ended. `value` is the JSON result; a pickled one stays bytes in `data`. With the format
    `object`, `value["object"]` is the id of what a large result has become."""

    id: str
    state: TaskState
    format: str = "json"
    value: Any = None
    data: bytes | None = None
    error: Failure | None = None
    log_tail: str = ""

    @classmethod
    def of(cls, raw: Raw) -> "Outcome":
        packed = raw.get("data_base64")
        return decode(cls, raw, value=raw.get("result"), data=None if packed is None else b64decode(packed))


def check_success(outcome: Outcome) -> None:
    """Raises TaskFailed, TaskExpired or TaskCancelled for a task that ended without a result."""
    if outcome.state is TaskState.CANCELLED:
        raise TaskCancelled(outcome.id)
    if outcome.state is not TaskState.SUCCEEDED:
        error = outcome.error or Failure(str(outcome.raw.get("state")), "it left no message")
        fault = TaskExpired if outcome.state is TaskState.EXPIRED else TaskFailed
        raise fault(
            outcome.id,
            kind=error.kind,
            message=error.message,
            traceback=error.traceback,
            log_tail=outcome.log_tail,
        )


@dataclass(frozen=True, slots=True)
class Stack(Answered):
    """Where the process of a running task was: `stack` has all its Python threads as text, each with its most
    recent call last; None if there are none, and then `message` says why."""

    id: str
    attempt: int = 0
    rank: int = 0
    node: str = ""
    taken_at: datetime | None = None
    stack: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled(Answered):
    """What became of the tasks that a cancel of many has selected, in numbers."""

    matched: int = 0
    waiting: int = 0
    """Of them, those that had not started."""
    started: int = 0
    cancelled: int = 0
    stopping: int = 0
    """They have their notice, and end within their grace periods."""
    already_ended: int = 0
    stored: int = 0
    """The service's leader has yet to carry out their cancel."""
    has_more: bool = False

    def plus(self, more: "Cancelled") -> "Cancelled":
        names = ("matched", "waiting", "started", "cancelled", "stopping", "already_ended", "stored")
        sums = {name: getattr(self, name) + getattr(more, name) for name in names}
        raw = {**sums, "has_more": more.has_more}
        return Cancelled(**sums, has_more=more.has_more, raw=raw)


@dataclass(frozen=True, slots=True)
class Event(Answered):
    """One event of the log; positions have no gaps and follow the order of commits."""

    position: int = 0
    at: datetime | None = None
    kind: str = ""
    key: str = ""
    version: int = 0
    fields: Raw = field(default_factory=dict)
