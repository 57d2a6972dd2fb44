"""The doors to the world, as Protocols. Adapters implement them; gateway and broker know nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.estimates import Sketch, Topic
from gpubroker_server.core.domain.leader_term import LeaderRow, Tenure
from gpubroker_server.core.domain.lease import Lease, Pledge
from gpubroker_server.core.domain.orders import Order, Report
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.submission import BatchSubmission as BatchSubmission
from gpubroker_server.core.domain.submission import KnownKey as KnownKey
from gpubroker_server.core.domain.submission import RunSpec as RunSpec
from gpubroker_server.core.domain.submission import Submission as Submission
from gpubroker_server.core.domain.submission import SubmitOutcome as SubmitOutcome
from gpubroker_server.core.domain.submission import SubmitVerdict as SubmitVerdict
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, Position, Seconds, TaskId, Term, Ticks
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.tenant_accounts import TenantUsage
from gpubroker_server.ports.objects import ObjectRows


class Clock(Protocol):
    def now(self) -> Instant:
        """The database's time, interpolated between readings by a clock that never jumps back."""
        ...


class CommitVerdict(StrEnum):
    COMMITTED = "committed"
    STALE = "stale"
    """A row of the decision had changed; nothing of it was written. Plan again."""
    REFUSED = "refused"
    """A constraint said no, which a correct plan never meets; nothing of it was written."""
    UNSTORABLE = "unstorable"
    """It holds a value that the database cannot keep; nothing of it was written, and nothing ever will be."""
    UNAVAILABLE = "unavailable"
    """The database could not be reached; nothing of it was written. Commit it again later."""


class StaleTerm(Exception):
    """Another leader has taken over. The caller must stop leading."""


class TenureOver(StaleTerm):
    """Another leader may have taken over: the term was not renewed in time. The caller must stop leading."""


class StoreUnavailable(Exception):
    """What is stored cannot be reached or written now; of the call that raises this nothing was written."""


class Outgrown(StoreUnavailable):
    """Newer software has changed what is stored in a way that this one does not know. It must end; the text
    says what it met."""


class LogOutgrown(Outgrown):
    """The log goes on with events that this software does not know. Rows can be read and inserted as before,
    but nobody may decide any more, or show a picture of the whole."""


class LogShortened(Exception):
    """Events that were asked for are no longer in the log. The caller must read the picture anew."""


class Unstorable(ValueError):
    """A value that the database cannot keep or look for: a NUL in a text, half a surrogate pair, a number out
    of range. Nothing was written. It is the fault of whoever sent it."""


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """Both halves of a task, and the outcome if there is one."""

    task: Task
    spec: RunSpec
    failure: Mapping[str, Any] | None = None
    has_result: bool = False


@dataclass(frozen=True, slots=True)
class Stand:
    """What others may depend on of a task."""

    tenant: str
    state: TaskState
    failed_by: TaskId | None = None


@dataclass(frozen=True, slots=True)
class StoredResult:
    """`data` inline, or `digest` of the blob that holds it."""

    ending: str
    format: str
    data: bytes | None
    digest: str | None
    failure: Mapping[str, Any] | None
    log_tail: bytes


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    sequence: int
    at: Instant
    digest: str
    size_bytes: int
    uri: str | None


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """What `GET /tasks` narrows by. `labels` must all match. Newest first, after `cursor`."""

    tenant: str
    states: tuple[TaskState, ...] = ()
    min_priority: int | None = None
    max_priority: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    model_type: str | None = None
    stream: str | None = None
    runs_after: TaskId | None = None
    """Only those that were submitted to run after that one."""
    submitted_from: Instant | None = None
    submitted_before: Instant | None = None
    finished_from: Instant | None = None
    finished_before: Instant | None = None
    kind: str | None = None
    """entrypoint, command, function or external; all if None."""
    quarantined: bool | None = None
    """Of those that have ended: only those whose memory still counts as used, or only the others."""
    after: TaskId | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class HeldBack:
    """How old is what keeps a database from taking away rows that nobody needs any more; 0 for nothing."""

    transaction_seconds: float
    """The oldest transaction of any client."""
    slot_transactions: int
    """So many transactions ago began what a replication slot keeps."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Hot rows and the log position they stand at, read in one database snapshot."""

    position: Position
    at: Instant
    tasks: Sequence[Task]
    """Not terminal, or terminal with a lease that is not released."""
    leases: Sequence[Lease]
    pledges: Sequence[Pledge]
    devices: Sequence[Device]
    nodes: Sequence[Node]
    requests: Sequence[Request]
    finished: Mapping[tuple[str, TaskState], int]
    estimates: Sequence[tuple[Topic, Sketch]]
    """The one that learned last comes last."""
    usage: Sequence[TenantUsage]


ReadTicks = Callable[[], Ticks]
"""What this machine's clock says now."""

EventListener = Callable[[Sequence[Event]], None]
"""Called on the event loop's thread with what one group commit appended, in position order."""


class TaskStore(ObjectRows, Protocol):
    """The queue, the ledger's rows and the event log. Every write is durable when its call returns."""

    def listen(self, listener: EventListener) -> None:
        """Hear this process's own commits before the call that made them returns.

        A listener must not raise. If it does, the call raises that as well, and so does every later write:
        nobody may go on deciding with a picture that has lost a part of the log.
        """
        ...

    async def submit(self, submission: Submission) -> SubmitOutcome:
        """Raises Unstorable."""
        ...

    async def submit_batch(self, batch: BatchSubmission) -> SubmitOutcome:
        """Raises Unstorable: then nothing of it was stored."""
        ...

    async def known_key(self, tenant: str, key: str) -> KnownKey | None:
        """What was submitted with this key, if it is still kept."""
        ...

    async def batch_answer(self, first: TaskId) -> str:
        """What was kept of the batch that begins with this task; empty if nothing was."""
        ...

    async def request(self, request: Request) -> None:
        """Store a cancel or change request; the leader reads it from the log. Raises Unstorable."""
        ...

    async def leader(self) -> LeaderRow: ...

    async def take_term(self, holder: str, ttl_seconds: Seconds, *, instead_of: LeaderRow) -> Term | None:
        """Become leader: the next term, committed. Every older term's commits fail from now on.

        None if the row is no longer `instead_of`: its leader has renewed it, or somebody else was quicker.
        """
        ...

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        """Keep the next term from others for so long from now. Raises StaleTerm, StoreUnavailable."""
        ...

    async def resign(self, term: Term) -> None:
        """Let others take the next term at once. Nothing happens if that has been taken already."""
        ...

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        """One verdict per decision, in order; each is written whole or not at all.

        Raises StaleTerm, and StoreUnavailable after `close`: then nothing of any was written.
        """
        ...

    async def snapshot(self) -> Snapshot: ...

    async def events(self, after: Position, limit: int, task: TaskId | None = None) -> Sequence[Event]: ...

    async def head(self) -> Position: ...

    async def oldest(self) -> Position:
        """Of the first event that is still in the log, or of the next one if none is."""
        ...

    async def prune(self, term: Term, cutoffs: Cutoffs) -> bool:
        """Take out a few of those that are over: tasks with all that belongs to them but the objects, the
        beginning of the log, and rows of uploaded objects. False if there were none. Raises StaleTerm."""
        ...

    async def record(self, task: TaskId) -> TaskRecord | None: ...

    async def records(self, wanted: TaskFilter) -> Sequence[TaskRecord]: ...

    async def stands(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, "Stand"]:
        """Where these tasks stand; those without a record are left out."""
        ...

    async def specs(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]: ...

    async def result(self, task: TaskId) -> StoredResult | None: ...

    async def checkpoints(self, task: TaskId) -> Sequence[StoredCheckpoint]:
        """Newest first."""
        ...

    async def referenced(self, digests: Sequence[str]) -> frozenset[str]:
        """Of these blobs, those that some row names; the others are nobody's."""
        ...

    async def put_token(self, token: "TokenRow", *, by: str) -> bool:
        """Add a token; False if another one has its name already, which then stays. `by` is who asked."""
        ...

    async def tokens(self) -> Sequence["TokenRow"]: ...

    async def drop_token(self, name: str, *, by: str) -> bool:
        """False if there is none of this name."""
        ...

    async def audit(self, *, by: str, tenant: str, action: str, subject: str) -> None:
        """Note who did something that is no row of its own, such as `service.shutdown`."""
        ...

    async def database_time(self) -> Instant: ...

    async def held_back(self) -> HeldBack | None:
        """None where the database has no such thing."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token as stored: only its hash. `scopes` are sorted; `*` is every scope."""

    name: str
    sha256: str
    tenant: str
    scopes: tuple[str, ...]
    max_priority: int
    created_at: Instant
    expires_at: Instant | None = None


class BlobStore(Protocol):
    """Objects by sha256 digest. Each call raises StoreUnavailable while the objects cannot be reached."""

    async def put(self, data: bytes, *, owner: str) -> str:
        """Durable when it returns. Raises BlobTooLarge. `owner` is the task, for messages."""
        ...

    async def get(self, digest: str) -> bytes:
        """Raises BlobMissing or BlobCorrupt; what is returned has this digest."""
        ...

    async def delete(self, digest: str) -> None: ...


class BlobTooLarge(Exception):
    """The object exceeds what the store takes; nothing was written."""


class BlobMissing(Exception):
    """No object has this digest."""


class BlobCorrupt(Exception):
    """The object's bytes do not have its digest; they are not handed out."""


@dataclass(frozen=True, slots=True)
class RunPayload:
    """What travels with a StartOrder to the process that runs it."""

    spec: RunSpec
    arguments: bytes
    resume_state: bytes | None
    resume_uri: str | None
    attempt: int
    name: str
    tenant: str
    timeout_seconds: float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """The last thing a run said about itself; in memory only."""

    at: Instant
    fraction: float | None
    message: str


class Executor(Protocol):
    """Carries orders to node agents and brings their reports back. Neither call waits for user code."""

    async def connect(self) -> None:
        """Get ready, so that `start` has only to announce. Nothing is ordered, heard or changed."""
        ...

    async def start(self, tenure: Tenure) -> None:
        """Connect and announce the term; nodes and running work come back as NodeSeen reports.

        What was heard and ordered in an earlier term is dropped.
        """
        ...

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        """Hand over committed orders. An order that cannot be delivered comes back as a report.

        Nothing leaves once the tenure is over.
        """
        ...

    async def flush(self) -> None:
        """Back when all orders that were handed over have been taken by agents, but for those of agents that
        do not answer; the caller sets the time that it may take."""
        ...

    async def stand_back(self) -> None:
        """The term is over: send nothing more and hear nothing more, but stay ready."""
        ...

    def ask(self, nodes: Sequence[NodeName]) -> None:
        """Announce the term there again: an agent that is there answers with what it has, as NodeSeen."""
        ...

    async def reports(self) -> Sequence[Report]:
        """Wait for at least one report; all that have come in since, in order per run."""
        ...

    def status(self) -> Mapping[str, Any]:
        """For people: connected or not, address, why not. Keys: state, address, message. `agents`, where
        there are some: by node, their release. `home`, of a Ray: which local one, or empty."""
        ...

    async def close(self, *, stop_cluster: bool) -> None: ...
