"""What the service answers about tasks, events and tokens, as light values. Devices: `cluster.fleet`.

Every model keeps the whole answer in `raw`. Times are aware datetimes in UTC.
A field that the service did not send has its default.
"""

from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from gpubroker.cluster.quarantine import Quarantined
from gpubroker.tasks.estimates import Expected, Sizing
from gpubroker.tasks.states import TaskState as TaskState
from gpubroker.transport.decoding import Raw, each, filled, optional

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a task, or its last attempt, failed. `kind` is a stable token, `traceback` the task's own text."""

    kind: str
    message: str
    traceback: str | None = None
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Inherited:
    """By whose priority a task stands in the queue: that one waits for it, if only through others."""

    priority: int
    task: str
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Pending:
    """Why a task waits. `position` counts from 1 at the head of the queue."""

    reason: str
    message: str
    position: int | None = None
    inherits: Inherited | None = None
    start: Expected | None = None
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Pending":
        inherits = optional(Inherited, raw.get("inherits"))
        return filled(cls, raw, start=optional(Expected, raw.get("start")), inherits=inherits)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a run last said of itself; `fraction` from 0 to 1."""

    fraction: float | None = None
    message: str | None = None
    at: datetime | None = None
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class TaskDevice:
    """A device that a task holds memory on."""

    uuid: str
    gpu_mb: int = 0
    context_mb: int = 0
    """Of `gpu_mb`, the process's own cost beyond what was asked for."""
    state: str = ""
    overused_mb: int | None = None
    """What the run used when that was first found to be more than its lease."""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class TaskRank:
    """One rank of a gang."""

    rank: int
    node: str = ""
    state: str = ""
    """placed, ready, running, leaving, left, succeeded or ended."""
    devices: tuple[TaskDevice, ...] = ()
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "TaskRank":
        return filled(cls, raw, devices=each(TaskDevice, raw.get("devices")))


@dataclass(frozen=True, slots=True)
class Task:
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
    """The tasks whose end it waits for: `task`, its id, and `on_failure`, fail or ignore."""
    failed_by: str | None = None
    """The first task of the chain because of which it failed."""
    labels: Mapping[str, str] = field(default_factory=dict)
    model_type: str | None = None
    stream: str | None = None
    result_format: str = "json"
    held: bool = False
    attempt: int = 0
    """How often it was admitted so far; 0 before the first time."""
    failures: int = 0
    preemptions: int = 0
    node: str | None = None
    devices: tuple[TaskDevice, ...] = ()
    ranks: tuple[TaskRank, ...] = ()
    """Of a gang that is placed; `devices` are those of all of them."""
    submitted_at: datetime | None = None
    admitted_at: datetime | None = None
    started_at: datetime | None = None
    checkpoint_at: datetime | None = None
    not_before: datetime | None = None
    expires_at: datetime | None = None
    """Until then it waits for its first start."""
    deadline_at: datetime | None = None
    """By then it has ended, or is told to stop."""
    finished_at: datetime | None = None
    stop_reason: str | None = None
    stop_deadline_at: datetime | None = None
    progress: Progress | None = None
    pending: Pending | None = None
    eta: Expected | None = None
    error: Failure | None = None
    quarantine: tuple[Quarantined, ...] = ()
    """Its runs, also of earlier attempts, that nobody can confirm to be gone."""
    raw: Raw = field(default_factory=dict, repr=False)

    @property
    def is_finished(self) -> bool:
        return self.state.is_terminal

    @classmethod
    def of(cls, raw: Raw) -> "Task":
        return filled(
            cls,
            raw,
            state=TaskState(raw.get("state", "")),
            after=tuple(raw.get("after") or ()),
            devices=each(TaskDevice, raw.get("devices")),
            ranks=each(TaskRank, raw.get("ranks")),
            progress=optional(Progress, raw.get("progress")),
            pending=optional(Pending, raw.get("pending")),
            sizing=optional(Sizing, raw.get("sizing")),
            eta=optional(Expected, raw.get("eta")),
            quarantine=each(Quarantined, raw.get("quarantine")),
            error=optional(Failure, raw.get("error")),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ended. `value` is the JSON result; a pickled one stays bytes in `data` until opened."""

    id: str
    state: TaskState
    format: str = "json"
    value: Any = None
    data: bytes | None = None
    error: Failure | None = None
    log_tail: str = ""
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Outcome":
        packed = raw.get("data_base64")
        return filled(
            cls,
            raw,
            state=TaskState(raw.get("state", "")),
            value=raw.get("result"),
            data=None if packed is None else b64decode(packed),
            error=optional(Failure, raw.get("error")),
        )


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the event log; `position` counts without gaps, in the order of commits."""

    position: int = 0
    at: datetime | None = None
    kind: str = ""
    key: str = ""
    version: int = 0
    fields: Raw = field(default_factory=dict)
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Event":
        return filled(cls, raw)


@dataclass(frozen=True, slots=True)
class Token:
    """A token as the service lists it. `token` is its secret, known only in the answer to its creation."""

    name: str
    tenant: str = ""
    scopes: tuple[str, ...] = ()
    max_priority: int = 100
    created_at: datetime | None = None
    expires_at: datetime | None = None
    token: str | None = field(default=None, repr=False)
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Token":
        return filled(cls, raw, scopes=tuple(raw.get("scopes", ())))


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items of a list, and where the next ones begin; None after the last."""

    items: tuple[T, ...]
    next_cursor: str | None = None
    raw: Raw = field(default_factory=dict, repr=False)

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)
