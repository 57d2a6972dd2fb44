"""A task, its states, and the one table that says how it may move between them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.errors import IllegalTransition
from gpubroker_server.core.domain.models import ModelTerms
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.domain.values import changed, value


@dataclass(frozen=True, slots=True)
class ExternalTerms:
    """A holder that nobody starts or stops: it asks, renews and gives back by itself."""

    ttl_seconds: Seconds
    """So long after its admission, and after each renewal, it is to leave if it was not heard of again."""
    pid: int | None = None
    """A process on the node of its lease, with its children: what they use is the holder's, and once that
    process is gone the holder is."""


class MemberState(StrEnum):
    PLACED = "placed"
    """Its order is on its way, or its process is getting ready."""
    READY = "ready"
    """It waits for the others; once its task is RUNNING it has been told to begin."""
    SUCCEEDED = "succeeded"
    ENDED = "ended"
    """It failed, gave way, was lost, or never started."""
    LEAVING = "leaving"
    """It was asked to give its memory back, and the others go on without it. Its end is not theirs."""
    LEFT = "left"
    """It has ended after that."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a claim. A rank whose process is gone, or given up, takes nothing of its node any more."""

    rank: int
    node: NodeName
    state: MemberState = MemberState.PLACED
    gone: bool = False
    address: str = ""
    """`ip:port`, as it offered when it was ready."""
    freeing_for: TaskId | None = None
    """The preemptor whose pledge its memory goes to once it was asked to leave."""
    stop_deadline_at: Instant | None = None
    """Until then it may take its time to leave."""

    @property
    def has_ended(self) -> bool:
        return self.state in (MemberState.SUCCEEDED, MemberState.ENDED, MemberState.LEFT)

    @property
    def takes_part(self) -> bool:
        """It is one of those that the gang goes on with."""
        return self.state not in (MemberState.LEAVING, MemberState.LEFT)


def members_fields(members: Iterable[Member]) -> list[list[Any]]:
    """Only of those that were asked to leave there is more than five values."""
    return [
        [m.rank, m.node, m.state.value, m.gone, m.address]
        + ([] if m.takes_part else [m.freeing_for, m.stop_deadline_at])
        for m in members
    ]


def members_from(rows: Iterable[Sequence[Any]]) -> tuple[Member, ...]:
    return tuple(
        Member(rank, NodeName(node), MemberState(state), gone, address, *notice)
        for rank, node, state, gone, address, *notice in rows
    )


class TaskState(StrEnum):
    PENDING = "pending"
    """Accepted and on disk, waiting for room. The leader's cycle moves it on; a crash leaves it as it is."""
    ADMITTED = "admitted"
    """Leases are committed and the order is on its way. The agent's answer moves it on; after a crash
    `reconcile` asks the agent whether the order ever arrived."""
    RUNNING = "running"
    """The agent reported that user code began. Its end, a stop or the loss of its node moves it on."""
    STOPPING = "stopping"
    """Notice given, memory still held, a deadline set. The agent's proof that the process is gone moves it
    on; past the deadline the run is killed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """It was not given devices within its time to wait, or not done by its deadline."""

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED})
ACTIVE = frozenset({TaskState.ADMITTED, TaskState.RUNNING, TaskState.STOPPING})


class Move(StrEnum):
    """What can happen to a task; also the second half of its event's kind."""

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
    """Priority, hold, checkpoint or outcome changed, or it awaits nothing any more; the state did not."""


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
"""(state, move) -> next state. A move that is not here is a bug of ours, never a client's.
ADMITTED may end at once: a short run reports its start and its end together. An external holder and an
inference begin with their admission: there is nobody to start the one, and no process to wait for of the
other."""


class OnFailure(StrEnum):
    """What becomes of a task when one that it runs after does not succeed."""

    FAIL = "fail"
    IGNORE = "ignore"
    """It runs all the same, once that one has ended."""


@dataclass(frozen=True, slots=True)
class Dependency:
    task: TaskId
    on_failure: OnFailure = OnFailure.FAIL


class StopReason(StrEnum):
    CANCEL = "cancel"
    PREEMPT = "preempt"
    TIMEOUT = "timeout"
    """The run passed its own limit."""
    DEADLINE = "deadline"
    """The task's deadline passed."""
    OVERUSE = "overuse"
    """The run used more GPU memory than it leased."""
    RANK_FAILED = "rank_failed"
    """One rank of the gang failed, so that the others are of no use. Uses up a retry."""
    RANK_LOST = "rank_lost"
    """One rank never started, or went down with its node or its agent: no fault of the gang's."""
    START_TIMEOUT = "start_timeout"
    """Not all ranks were ready in time."""
    MOVE = "move"
    """The run goes on elsewhere, where room is kept for it, so that another task fits here. The task keeps
    this reason until it is admitted there."""


@value
class Task:
    """The hot half of a task: what decisions need. Arguments, results and labels live beside it in SQL.

    `version` counts changes of the row and guards every write. `fence` counts claims. `failures` are the
    attempts that used up a retry; `preemptions` and node losses do not.
    """

    id: TaskId
    tenant: str
    name: str
    priority: int
    demand: Demand
    submitted_at: Instant
    max_retries: int = 0
    timeout_seconds: Seconds | None = None
    grace_seconds: Seconds = Seconds(30.0)
    shareable: bool = False
    """May run beside others in one warm process: an entrypoint, no GPU, less than one CPU, no env."""
    after: tuple[Dependency, ...] = ()
    """The tasks whose end it waits for, of the same tenant, as submitted."""
    queue_ttl_seconds: Seconds | None = None
    deadline_at: Instant | None = None
    """By then it has ended: until then it waits, and until then it runs. An external holder moves it on."""
    expected_seconds: Seconds | None = None
    """How long one run takes, as its submitter says; nothing ends because of it."""
    stream: str = ""
    """The work stream it belongs to, by whose weight tasks of equal aged priority are ordered."""
    subject: str = ""
    """What its runs have in common with those of other tasks, for learning from them: its model type, else
    its name, else its entrypoint. Empty: nothing is learned from it."""
    external: ExternalTerms | None = None
    """Nobody starts it: an external holder, which has its devices from its admission on."""
    model: ModelTerms | None = None
    """A server of models has it in memory, or is to load it."""
    state: TaskState = TaskState.PENDING
    version: int = 1
    fence: Fence = Fence(0)
    held: bool = False
    awaits: bool = False
    """Not all of `after` have ended yet, as far as the rows say."""
    failed_by: TaskId | None = None
    """The first task of the chain of dependencies because of which it failed."""
    expires_at: Instant | None = None
    """Until then it waits for its first admission, no longer. Set when it enters the queue. A model: until
    then it is wanted, whether it waits or is there."""
    not_before: Instant | None = None
    failures: int = 0
    preemptions: int = 0
    node: NodeName | None = None
    admitted_at: Instant | None = None
    started_at: Instant | None = None
    checkpoint_at: Instant | None = None
    finished_at: Instant | None = None
    stop_reason: StopReason | None = None
    stop_deadline_at: Instant | None = None
    freeing_for: TaskId | None = None
    """The preemptor whose pledge this run's memory goes to while it is STOPPING."""
    members: tuple[Member, ...] = ()
    """The ranks of a gang's newest claim, by rank; empty for all other tasks. `node` is that of rank 0."""

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def is_run(self) -> bool:
        """Node agents start it and stop it, and know of it: it is no external holder, no model, and no
        inference."""
        return self.external is None and self.model is None and not self.demand.answered_by

    @property
    def is_inference(self) -> bool:
        """A server of models answers it."""
        return bool(self.demand.answered_by)

    @property
    def is_moving(self) -> bool:
        """Its run is under notice, and room elsewhere is pledged to it."""
        return self.state is TaskState.STOPPING and self.stop_reason is StopReason.MOVE

    @property
    def waits_until(self) -> Instant | None:
        """When it expires if it is still pending; None if it never does. Its time to wait is that for its
        first admission: a task that has run, and comes back, is not lost by it."""
        if self.expires_at is None or (self.fence > 0 and self.model is None):
            return self.deadline_at
        return self.expires_at if self.deadline_at is None else min(self.expires_at, self.deadline_at)


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
    "started_at",
    "checkpoint_at",
    "finished_at",
    "stop_reason",
    "stop_deadline_at",
    "freeing_for",
    "members",
    "model",
)
"""The fields of a task that change after submit."""


Notice = tuple[TaskId | None, bool]
"""(for whom the memory of a run is being freed, whether the run is under notice)"""


def notice_of(task: Task, rank: int = 0) -> Notice:
    """A rank may leave a gang that goes on."""
    if task.members and not (member := task.members[rank]).takes_part:
        return member.freeing_for, True
    return task.freeing_for, task.state is TaskState.STOPPING


def notices_of(task: Task) -> list[Notice]:
    """Of all ranks."""
    return [notice_of(task, rank) for rank in range(max(1, len(task.members)))]


def move(task: Task, what: Move, **changes: Any) -> Task:
    """The task after one move: next state, version + 1, and the given fields changed.

    Raises IllegalTransition; the task is unchanged.
    """
    try:
        state = TRANSITIONS[task.state, what]
    except KeyError:
        raise IllegalTransition(f"task {task.id} is {task.state}; it cannot be {what}") from None
    return changed(task, state=state, version=task.version + 1, **changes)


@value
class Placement:
    """Where a task will run: one node, and one (device, MiB) pair per GPU in key order."""

    node: NodeName
    devices: tuple[tuple[DeviceKey, Mib], ...] = field(default=())
