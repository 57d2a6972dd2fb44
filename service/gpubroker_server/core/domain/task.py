"""A task, its states, and the table of its transitions."""

from enum import StrEnum
from itertools import repeat
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.errors import IllegalTransition
from gpubroker_server.core.domain.holders import RUN, Gang, Holder, Member, Model
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, NodeName, Seconds, TaskId


class TaskState(StrEnum):
    PENDING = "pending"
    """The task is accepted and on disk, and waits in the queue. The leader's cycle admits it; its time limit
    to wait, its deadline or a cancel ends it. After a crash it still waits."""
    ADMITTED = "admitted"
    """The task's leases are committed and the start order is on its way. The agent's report moves the task
    on. After a crash `reconcile` asks the agent whether the order arrived; if not, the task is requeued."""
    RUNNING = "running"
    """The agent reported that user code began. Its end, a stop or the loss of its node moves it on. After a
    crash of the leader it still runs, and the next leader takes it over."""
    STOPPING = "stopping"
    """The task was asked to stop and still holds its memory. The agent's proof that the process is gone moves
    the task on. Past `stop_deadline_at` the run is killed, and if that is not confirmed its leases go into
    quarantine. After a crash the next leader repeats the notice."""
    SUCCEEDED = "succeeded"
    """The run ended well and its outcome is stored. This is an end; the leases still wait for proof."""
    FAILED = "failed"
    """The run failed, or a task that this one runs after, and no retry is left. This is an end."""
    CANCELLED = "cancelled"
    """A client cancelled the task, and its run is gone or given up. This is an end."""
    EXPIRED = "expired"
    """The task was not admitted within its time to wait, or not done by its deadline. This is an end."""

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED})
ACTIVE = frozenset({TaskState.ADMITTED, TaskState.RUNNING, TaskState.STOPPING})


class Move(StrEnum):
    """Things that can happen to a task. A move is also the second half of its event's kind."""

    SUBMITTED = "submitted"
    ADMITTED = "admitted"
    STARTED = "started"
    STOPPING = "stopping"
    REQUEUED = "requeued"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    CHANGED = "changed"
    """Priority, hold, checkpoint, outcome or a dependency changed; the state did not."""


_P, _A, _R, _S = TaskState.PENDING, TaskState.ADMITTED, TaskState.RUNNING, TaskState.STOPPING

TRANSITIONS: dict[tuple[TaskState, Move], TaskState] = {
    (_P, Move.ADMITTED): _A,
    (_P, Move.STARTED): _R,
    (_P, Move.FAILED): TaskState.FAILED,
    (_P, Move.CANCELLED): TaskState.CANCELLED,
    (_P, Move.EXPIRED): TaskState.EXPIRED,
    (_P, Move.CHANGED): _P,
    (_A, Move.STARTED): _R,
    (_A, Move.STOPPING): _S,
    (_A, Move.REQUEUED): _P,
    (_A, Move.SUCCEEDED): TaskState.SUCCEEDED,
    (_A, Move.FAILED): TaskState.FAILED,
    (_A, Move.CHANGED): _A,
    (_R, Move.STOPPING): _S,
    (_R, Move.REQUEUED): _P,
    (_R, Move.SUCCEEDED): TaskState.SUCCEEDED,
    (_R, Move.FAILED): TaskState.FAILED,
    (_R, Move.CHANGED): _R,
    (_S, Move.REQUEUED): _P,
    (_S, Move.SUCCEEDED): TaskState.SUCCEEDED,
    (_S, Move.FAILED): TaskState.FAILED,
    (_S, Move.CANCELLED): TaskState.CANCELLED,
    (_S, Move.EXPIRED): TaskState.EXPIRED,
    (_S, Move.CHANGED): _S,
}
"""(state, move) -> next state. Any other move is a bug of the service, never a client's fault.

ADMITTED may end at once: a short run reports its start and its end together. An external holder and an
inference start with their admission: no process has to be waited for.
"""


class OnFailure(StrEnum):
    """Ways to treat a task when a task that it depends on does not succeed."""

    FAIL = "fail"
    IGNORE = "ignore"


class Dependency(Struct, frozen=True, array_like=True):
    task: TaskId
    on_failure: OnFailure = OnFailure.FAIL


class RetryOn(StrEnum):
    """Causes that can use up a retry of a task, or of an item of an array."""

    FAILURE = "failure"
    """The run failed, or ended without a report."""
    TIMEOUT = "timeout"
    """The time limit ended the run."""


ON_FAILURE = (RetryOn.FAILURE,)


class StopReason(StrEnum):
    CANCEL = "cancel"
    PREEMPT = "preempt"
    TIMEOUT = "timeout"
    """The run passed its own time limit."""
    DEADLINE = "deadline"
    OVERUSE = "overuse"
    RANK_FAILED = "rank_failed"
    """One rank of the gang failed, so the others are stopped. This uses up a retry."""
    RANK_LOST = "rank_lost"
    """One rank never started, or was lost with its node or agent. This uses up no retry."""
    START_TIMEOUT = "start_timeout"
    MOVE = "move"
    """The run moves to another device, where room is pledged to it, so that another task fits here. The task
    keeps this reason until it is admitted there."""


class Task(Struct, frozen=True, omit_defaults=True):
    """The hot half of a task: what decisions need. Arguments, results and labels are in other tables.

    `version` counts changes of the row and guards every write. `fence` counts claims. `failures` counts
    attempts that used up a retry; preemptions and node losses do not.
    """

    id: TaskId
    tenant: str
    name: str
    priority: int
    demand: Demand
    submitted_at: Instant
    max_retries: int = 0
    retry_on: tuple[RetryOn, ...] = ON_FAILURE
    timeout_seconds: Seconds | None = None
    grace_seconds: Seconds = Seconds(30.0)
    shareable: bool = False
    """True if the run may share one warm process: an entrypoint, no GPU, less than one CPU, no env."""
    after: tuple[Dependency, ...] = ()
    """The tasks of its tenant that the task waits for, as submitted."""
    queue_ttl_seconds: Seconds | None = None
    deadline_at: Instant | None = None
    """The latest end: a pending task expires and a run is stopped then. An external holder's renewal extends
    it."""
    expected_seconds: Seconds | None = None
    """The duration of one run that the client expects. No run is ended because of it."""
    stream: str = ""
    """The work stream of the task. Its weight orders tasks of equal aged priority."""
    subject: str = ""
    """The name under which sizes and run times are learned: its model type, else its name, else its
    entrypoint. Empty: nothing is learned."""
    queued_bytes: int = 0
    """The bytes that the task keeps for its run: arguments (also those in an object), command, env and
    labels."""
    state: TaskState = field(default_factory=repeat(TaskState.PENDING).__next__)
    """The state of the task. It is always encoded, unlike other defaults, because readers of the log ask each
    event for it."""
    version: int = 1
    fence: Fence = Fence(0)
    held: bool = False
    awaits: bool = False
    """True if, by this row, not all of `after` have ended yet."""
    failed_by: TaskId | None = None
    """The first failed task of the chain of dependencies that made this task fail."""
    expires_at: Instant | None = None
    """The time at which the task expires if it was never admitted; set when the task enters the queue. For a
    model, the time until which the model is wanted, pending or loaded."""
    not_before: Instant | None = None
    failures: int = 0
    preemptions: int = 0
    node: NodeName | None = None
    admitted_at: Instant | None = None
    ordered_at: Instant | None = None
    """The time at which the node's agent had received the order to start the task; for a gang, the time of
    the last agent. It is known once the task has started."""
    started_at: Instant | None = None
    checkpoint_at: Instant | None = None
    finished_at: Instant | None = None
    stop_reason: StopReason | None = None
    stop_deadline_at: Instant | None = None
    stop_cause: str | None = None
    """The cause of the last notice to the task or to ranks of it, in words that follow "for": a drain, a
    cancellation, ranks that were lost. None if `stop_reason` and `freeing_for` say everything."""
    freeing_for: TaskId | None = None
    """The preemptor that this run's memory is freed for while it is STOPPING."""
    holder: Holder = RUN
    """The kind of the task, with the fields that only tasks of this kind have."""

    @property
    def queued_at(self) -> Instant:
        """The time from which the task's age and its place in the queue count."""
        match self.holder:
            case Model(left_at=left_at) if left_at is not None:
                return left_at
            case _:
                return self.submitted_at

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def is_moving(self) -> bool:
        """True if the run is asked to stop, and room elsewhere is pledged to it."""
        return self.state is TaskState.STOPPING and self.stop_reason is StopReason.MOVE

    @property
    def waits_until(self) -> Instant | None:
        """The instant at which the task expires if it is still pending; None: never. `expires_at` limits the
        wait for the first admission only: it does not end a task that has run and was requeued."""
        if self.expires_at is None:
            return self.deadline_at
        match self.holder:
            case Model():
                pass
            case _ if self.fence > 0:
                return self.deadline_at
        return self.expires_at if self.deadline_at is None else min(self.expires_at, self.deadline_at)


def model_of(task: Task) -> Model:
    """Return the model that the task holds or wants to hold. The task's holder must be a Model."""
    assert isinstance(task.holder, Model)
    return task.holder


def members_of(task: Task) -> tuple[Member, ...]:
    """Return the ranks of a gang's newest claim, by rank; empty for a task of another kind."""
    match task.holder:
        case Gang(members):
            return members
        case _:
            return ()


HOT_FIELDS = (
    "priority",
    "state",
    "fence",
    "held",
    "awaits",
    "failed_by",
    "expires_at",
    "queue_ttl_seconds",
    "deadline_at",
    "not_before",
    "failures",
    "preemptions",
    "node",
    "admitted_at",
    "ordered_at",
    "started_at",
    "checkpoint_at",
    "finished_at",
    "stop_reason",
    "stop_deadline_at",
    "stop_cause",
    "freeing_for",
    "holder",
)
"""The fields that change after submit."""


Notice = tuple[TaskId | None, bool]
"""(the preemptor that the run's memory is freed for, whether the run is asked to stop)"""


def stop_notice(task: Task, rank: int = 0) -> Notice:
    """Return the stop notice of one rank. A rank may be asked to leave while its gang goes on."""
    match task.holder:
        case Gang(members) if members and not (member := members[rank]).takes_part:
            return member.freeing_for, True
        case _:
            return task.freeing_for, task.state is TaskState.STOPPING


def stop_notices(task: Task) -> list[Notice]:
    """Return the stop notices of all ranks of the claim."""
    match task.holder:
        case Gang(members) if members:
            return [stop_notice(task, member.rank) for member in members]
        case _:
            return [stop_notice(task)]


def move(task: Task, transition: Move, **changes: Any) -> Task:
    """Return the task after one move: in the next state, with version + 1 and the given fields changed.
    Raises IllegalTransition if the state does not allow the move."""
    try:
        state = TRANSITIONS[task.state, transition]
    except KeyError:
        raise IllegalTransition(f"task {task.id} is {task.state}; it cannot be {transition}") from None
    return replace(task, state=state, version=task.version + 1, **changes)


class Placement(Struct, frozen=True):
    """The place where a task will run: one node, and one (device, MiB) pair per GPU, ordered by key."""

    node: NodeName
    devices: tuple[tuple[DeviceKey, Mib], ...] = field(default=())
