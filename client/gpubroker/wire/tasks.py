"""Tasks: their demands, their holdings, their progress and their results."""

from base64 import b64decode
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from gpubroker.wire.answered import Answered, KnownState, Time
from gpubroker.wire.environments import Environment
from gpubroker.wire.forecasts import Expected, Sizing
from gpubroker.wire.problems import ProblemDocument
from gpubroker.wire.quarantine import Quarantined

Overused = Annotated[
    int | None, Meta(description="What the run used when it was first found to use more than its lease.")
]


RetryCause = Literal["failure", "timeout"]


class TaskState(KnownState):
    PENDING = "pending"
    ADMITTED = "admitted"
    """Memory is leased; the run is being started."""
    RUNNING = "running"
    STOPPING = "stopping"
    """The task is asked to stop, by a cancel, a preemption, its time limit or its deadline; it still holds
    its memory."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    UNKNOWN = "unknown"

    @property
    def is_terminal(self) -> bool:
        return self in (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED)


class Amounts(Answered, frozen=True):
    gpus: int
    gpu_mb: int | None
    gpu_fraction: float | None
    exclusive: bool
    cpu: float
    memory_mb: int
    custom: Mapping[str, float]
    kinds: tuple[str, ...]
    nodes: Mapping[str, tuple[str, ...]]


class RankDemand(Amounts, frozen=True):
    """The demand of each of `count` ranks of a gang."""

    count: int


class Demand(Amounts, frozen=True):
    min_power: int
    min_device_mb: int
    prefer_kinds: tuple[str, ...]
    prefer_nodes: Mapping[str, tuple[str, ...]]
    pool: str
    bundles: Annotated[
        tuple[RankDemand, ...] | None, Meta(description="The ranks of a gang; null for other tasks.")
    ]
    strategy: str | None
    min_ranks: int | None


class TaskResources(Demand, frozen=True):
    roles: Annotated[tuple[str, ...], Meta(description="The names of the roles that share the sizes.")]


class TaskDevice(Answered, frozen=True):
    """The memory that a task holds on one device."""

    uuid: str
    gpu_mb: int
    context_mb: Annotated[
        int, Meta(description="The part of `gpu_mb` that is the process's own cost beyond its demand.")
    ]
    state: Annotated[str, Meta(description="One of reserved, held, releasing and quarantined.")]
    overused_mb: Overused


class TaskRank(Answered, frozen=True):
    """One rank of a gang."""

    rank: int
    node: str
    state: Annotated[
        str, Meta(description="One of placed, ready, running, leaving, left, succeeded and ended.")
    ]
    devices: tuple[TaskDevice, ...]


class Run(Answered, frozen=True):
    kind: Annotated[
        str, Meta(description="One of entrypoint, command, function, inference, model and external.")
    ]
    entrypoint: str | None
    command: tuple[str, ...] | None
    model: Annotated[str | None, Meta(description="The model that answers an inference.")]


class Progress(Answered, frozen=True):
    fraction: float | None
    message: str
    at: Time
    rate_per_second: Annotated[
        float | None,
        Meta(
            description="The average rate of the fraction since the run first reported one; null before that."
        ),
    ]
    eta_at: Annotated[Time | None, Meta(description="The time when the fraction reaches 1 at this rate.")]


class Phases(Answered, frozen=True):
    """The time that the task has spent in each phase, over all its attempts. The present phase counts until
    now."""

    queued_seconds: Annotated[
        float, Meta(description="The time in the queue, for whatever reason it waited.")
    ]
    admitted_seconds: Annotated[
        float,
        Meta(
            description="The time from its admission until its node's agent had the order to start it. The "
            "agent says so when it has started; until then all of the time counts here."
        ),
    ]
    starting_seconds: Annotated[
        float, Meta(description="The time from then until its code began; for a model, all of its load.")
    ]
    running_seconds: float
    stopping_seconds: Annotated[float, Meta(description="The time from a notice to stop until it was gone.")]


class Inherited(Answered, frozen=True):
    """A task of higher priority that waits for this task, directly or through others. This task has its place
    in the queue by that priority."""

    priority: int
    task: str


class Pending(Answered, frozen=True):
    """The reason why a task waits."""

    reason: Annotated[str, Meta(description="A stable token.")]
    message: str
    position: Annotated[int | None, Meta(description="The place in the queue; 1 is next.")]
    inherits: Annotated[Inherited | None, Meta(description="Null if it has its own priority.")]
    start: Annotated[
        Expected | None, Meta(description="The expected start, known only for the first tasks of the queue.")
    ]


class Failure(Answered, frozen=True):
    kind: Annotated[str, Meta(description="A stable token, such as exception, out_of_memory, timeout.")]
    message: str
    traceback: str


class Dependency(Answered, frozen=True):
    task: str
    on_failure: Annotated[str, Meta(description="One of fail and ignore.")]


class TaskUrls(Answered, frozen=True):
    self: str
    result: str
    events: str
    explain: str
    cancel: str


class Task(Answered, frozen=True, kw_only=True):
    """The present state of a task. `pending` is only in answers about a single task, not in lists.

    `result` or `data_base64` are only in answers that waited for the end.
    """

    id: str
    name: str
    tenant: str
    state: TaskState
    priority: int
    band: str
    run: Run
    resources: TaskResources
    sizing: Annotated[
        Sizing | None, Meta(description="The way in which its size was learned at submit, if it was.")
    ]
    placement: str
    max_retries: int
    retry_on: Annotated[tuple[RetryCause, ...], Meta(description="The causes that use a retry.")]
    timeout_seconds: float | None
    grace_seconds: float
    expected_seconds: Annotated[float | None, Meta(description="The time of one run, as stated at submit.")]
    queue_ttl_seconds: float | None
    after: Annotated[tuple[Dependency, ...], Meta(description="The tasks that must end before it.")]
    failed_by: Annotated[str | None, Meta(description="The first task in its chain that failed.")]
    retry_of: Annotated[str | None, Meta(description="The ended task that this one runs again.")]
    labels: Mapping[str, str]
    model_type: str
    profile: str
    upload: Annotated[str, Meta(description="Object with the directory that it works in; empty: none.")] = ""
    environment: Annotated[
        Environment | None, Meta(description="Its interpreter and packages; null: those of the service.")
    ] = None
    ray: Annotated[str, Meta(description="Its Ray cluster: `private`, `shared`, or empty for none.")] = ""
    ray_dashboard: bool = False
    max_concurrency: Annotated[
        int | None, Meta(description="For the task's own code, in GPUBROKER_MAX_CONCURRENCY.")
    ]
    stream: str
    result_format: str
    held: bool
    attempt: Annotated[int, Meta(description="The number of times that the task has been given devices.")]
    failures: Annotated[int, Meta(description="The number of attempts that used up a retry.")]
    preemptions: int
    node: str | None
    devices: tuple[TaskDevice, ...]
    ranks: Annotated[tuple[TaskRank, ...] | None, Meta(description="The ranks of a gang that is placed.")]
    submitted_at: Time
    admitted_at: Time | None
    started_at: Time | None
    checkpoint_at: Time | None
    not_before: Time | None
    expires_at: Annotated[
        Time | None,
        Meta(description="The end of its wait for a first start; null while it waits for other tasks."),
    ]
    deadline_at: Annotated[
        Time | None, Meta(description="The time by which it must have ended; then it is stopped.")
    ]
    finished_at: Time | None
    stop_reason: str | None
    stop_cause: Annotated[
        str | None,
        Meta(
            description="What the last notice was given for, such as `the drain of n1 by admin`; null if a "
            "task or a limit made it stop."
        ),
    ] = None
    stop_deadline_at: Annotated[Time | None, Meta(description="When what is left of it is killed.")]
    phases: Annotated[
        Phases | None, Meta(description="Null if the event log no longer goes back to its submit.")
    ]
    progress: Progress | None
    pending: Pending | None
    eta: Annotated[Expected | None, Meta(description="The time when it is likely to end, while it runs.")]
    error: Failure | None
    quarantine: Annotated[
        tuple[Quarantined, ...],
        Meta(description="Its runs, also of earlier attempts, that are not confirmed to be gone."),
    ]
    notice: Annotated[
        str,
        Meta(
            description="`paused: n2, n3 silent`, if these nodes are not given up and concern it; or empty."
        ),
    ]
    urls: TaskUrls
    result: Annotated[Any, Meta(description="The value, if it is JSON; null if the task left none.")] = UNSET
    data_base64: Annotated[str | UnsetType, Meta(description="The bytes, if they are not JSON.")] = UNSET


class Outcome(Answered, frozen=True, kw_only=True):
    """The end of a task, and what the task left."""

    id: str
    state: TaskState
    format: str
    error: Failure | None
    log_tail: Annotated[str, Meta(description="The end of what the run wrote to stdout and stderr.")]
    result: Annotated[Any, Meta(description="The value, if it is JSON; null if the task left none.")] = UNSET
    data_base64: Annotated[str | UnsetType, Meta(description="The bytes, if they are not JSON.")] = UNSET

    @property
    def value(self) -> Any:
        """The result if it is JSON, else None. With the format `object`, `value["object"]` is the id of the
        object that a large result has become."""
        return None if self.result is UNSET else self.result

    @property
    def data(self) -> bytes | None:
        """The bytes of a result that is not JSON, such as a pickled one."""
        return None if self.data_base64 is UNSET else b64decode(self.data_base64)


class Stack(Answered, frozen=True):
    """The stack of the process of a running task."""

    id: str
    attempt: int
    rank: int
    node: str
    taken_at: Time
    stack: Annotated[
        str | None, Meta(description="All Python threads, each with its most recent call last; null: none.")
    ]
    message: Annotated[
        str, Meta(description="The reason why there is no stack, as for a command that is not Python.")
    ]


class Cancelled(Answered, frozen=True):
    """The numbers of tasks that matched, by what was done with them."""

    matched: int
    waiting: Annotated[int, Meta(description="The number of them that had not started.")]
    started: Annotated[int, Meta(description="The number of them that had started and not ended.")]
    cancelled: int
    stopping: Annotated[
        int, Meta(description="The number that have their notice, and end within their grace periods.")
    ]
    already_ended: Annotated[int, Meta(description="The number that had ended before the cancel.")]
    stored: Annotated[int, Meta(description="The number whose cancel the leader will carry out.")]
    has_more: Annotated[bool, Meta(description="True if more than 10,000 match: send the same again.")]

    def plus(self, more: "Cancelled") -> "Cancelled":
        """Return the sums of both answers. Whether there are more tasks is taken from `more`."""
        *names, _has_more = self.__struct_fields__
        sums = {name: getattr(self, name) + getattr(more, name) for name in names}
        return Cancelled(**sums, has_more=more.has_more)


class SubmittedTask(Struct, frozen=True, kw_only=True):
    """The outcome of one task of a batch: the task was stored and has an `id`, or its `problem` kept it from
    being stored."""

    status: Annotated[
        int, Meta(description="The status that it would have got if it were alone.", examples=[202, 422])
    ]
    id: str | UnsetType = UNSET
    url: str | UnsetType = UNSET
    problem: ProblemDocument | UnsetType = UNSET


class SubmittedBatch(Struct, frozen=True):
    """The outcomes of the tasks of a batch, in the order in which they were sent."""

    accepted: int
    refused: int
    items: tuple[SubmittedTask, ...]
