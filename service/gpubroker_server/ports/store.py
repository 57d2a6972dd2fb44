"""Ports to the database and the blob store. Adapters implement them; gateway and broker use them."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from gpubroker.wire.administration import Grant
from msgspec import Struct, field

from gpubroker_server.core.domain.decisions import Decision, QueuePause, Request, StreamState
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.estimates import Sketch, SketchKey
from gpubroker_server.core.domain.leader_term import LeaderRow
from gpubroker_server.core.domain.lease import Lease, Pledge
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.submission import AdmittedTask as AdmittedTask
from gpubroker_server.core.domain.submission import BatchSubmission as BatchSubmission
from gpubroker_server.core.domain.submission import KnownKey, WorkerSet
from gpubroker_server.core.domain.submission import RunSpec as RunSpec
from gpubroker_server.core.domain.submission import StoredState as StoredState
from gpubroker_server.core.domain.submission import SubmitOutcome as SubmitOutcome
from gpubroker_server.core.domain.submission import SubmitVerdict as SubmitVerdict
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import (
    Instant,
    Lineage,
    MonotonicSeconds,
    Position,
    Seconds,
    TaskId,
    Term,
)
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.tenant_accounts import TenantUsage
from gpubroker_server.ports.arrays import ItemPages
from gpubroker_server.ports.idle_templates import IdleTemplates
from gpubroker_server.ports.objects import ObjectRows, SortKey
from gpubroker_server.ports.run_logs import LogRows
from gpubroker_server.ports.run_outputs import OutputRows


class Clock(Protocol):
    def now(self) -> Instant:
        """The database's time, interpolated between readings. Never goes back."""


class CommitVerdict(StrEnum):
    COMMITTED = "committed"
    STALE = "stale"
    """A row had changed; nothing was written. Plan again."""
    REFUSED = "refused"
    """A constraint failed, which a correct plan never causes; nothing was written."""
    UNSTORABLE = "unstorable"
    """The database cannot store a value of it; nothing was written, and a retry would fail too."""
    UNAVAILABLE = "unavailable"
    """The database could not be reached; nothing was written. Try again later."""


class StaleTerm(Exception):
    """Another process has a newer term. The caller must stop leading."""


class LostCommits(StaleTerm):
    """The database lacks commits of which others know: its next term needs a new lineage."""


class LeaderTermOver(StaleTerm):
    """The term was not renewed in time, so another process may lead. The caller must stop leading."""


class StoreUnavailable(Exception):
    """The database or the blob store cannot be reached or written now; the call has written nothing."""


class StoreExhausted(StoreUnavailable):
    """A disk is full, or the database has no connection left. The text, which clients may read, says that."""


class Outgrown(StoreUnavailable):
    """Newer software has changed the database incompatibly. The process must end."""


class LogOutgrown(Outgrown):
    """The log has events that this software cannot read: it must neither lead nor answer from its World."""


class LogShortened(Exception):
    """The next events have been pruned. The caller must take a new snapshot."""


class LineageChanged(Exception):
    """The database went back to an earlier state, or it may have: what was read from it before may never have
    happened. The caller must take a new snapshot."""

    has_lost_commits = False
    """The log has fewer events than were read from it before, and nothing says why: it needs a new
    lineage."""


class Unstorable(ValueError):
    """A value the database cannot hold: a NUL in a text, half a surrogate pair, a number out of range."""


class TaskRecord(Struct, frozen=True):
    """A task with its spec, and its outcome if there is one."""

    task: Task
    spec: RunSpec
    failure: Mapping[str, Any] | None = None


class StoredResult(Struct, frozen=True):
    """`data` inline, or `digest` of the blob that holds it."""

    ending: str
    format: str
    data: bytes | None
    digest: str | None
    failure: Mapping[str, Any] | None
    log_tail: bytes


class StoredCheckpoint(Struct, frozen=True):
    sequence: int
    at: Instant
    digest: str
    size_bytes: int
    uri: str | None


class TaskSort(StrEnum):
    """The sort keys of lists of tasks; equal tasks are sorted by id. The values are fields of Task."""

    SUBMITTED = "id"
    """Ids follow the times of submission."""
    FINISHED = "finished_at"
    """Give states that are ends: other tasks have no place."""
    PRIORITY = "priority"

    @property
    def fields(self) -> Sequence[str]:
        return ("id",) if self is TaskSort.SUBMITTED else (self.value, "id")

    def key(self, task: Task) -> SortKey:
        return tuple(getattr(task, name) for name in self.fields)


class TaskFilter(Struct, frozen=True):
    """The filter and the order of `GET /tasks`. All `labels` must match."""

    tenant: str | None
    """The tenant whose tasks are wanted; None for all tenants."""
    states: tuple[TaskState, ...] = ()
    min_priority: int | None = None
    max_priority: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    model_type: str | None = None
    stream: str | None = None
    runs_after: TaskId | None = None
    """Selects tasks that run after this one."""
    submitted_from: Instant | None = None
    submitted_before: Instant | None = None
    finished_from: Instant | None = None
    finished_before: Instant | None = None
    kind: str | None = None
    """entrypoint, command, function, inference, external or model; None: all but models."""
    quarantined: bool | None = None
    """Selects ended tasks with memory that counts as used (True), or the other ended tasks (False)."""
    sort: TaskSort = TaskSort.SUBMITTED
    descending: bool = True
    after: SortKey = ()
    """The key of the last task of the page before."""
    limit: int = 100


class HeldBack(Struct, frozen=True):
    """The age of what keeps the database from removing dead rows; 0 for nothing."""

    transaction_seconds: float
    """The oldest transaction of any client."""
    slot_transactions: int
    """The number of transactions since the oldest one that a replication slot keeps rows for."""


class Snapshot(Struct, frozen=True):
    """Rows and the position of the log, read in one database snapshot."""

    position: Position
    lineage: Lineage
    at: Instant
    tasks: Sequence[Task]
    """The tasks that are unfinished, or have a lease that is not released."""
    leases: Sequence[Lease]
    pledges: Sequence[Pledge]
    devices: Sequence[Device]
    nodes: Sequence[Node]
    requests: Sequence[Request]
    pauses: Sequence[QueuePause]
    worker_sets: Sequence[WorkerSet]
    streams: Sequence[StreamState]
    finished: Mapping[tuple[str, TaskState], int]
    estimates: Sequence[tuple[SketchKey, Sketch]]  # in the order of learning
    usage: Sequence[TenantUsage]


ReadTicks = Callable[[], MonotonicSeconds]
"""Reads this machine's boot clock."""

EventListener = Callable[[Sequence[Event]], None]
"""Called on the event loop with events in the order of their positions."""


class TaskStore(ObjectRows, ItemPages, LogRows, OutputRows, IdleTemplates, Protocol):
    """The queue, the ledger's rows and the event log. Every write is durable when its call returns."""

    def listen(self, listener: EventListener) -> None:
        """Add a listener, which gets the events of this process's commits before their calls return.

        If a listener raises, that call and every later write raise the same: a World that has lost events
        must not be used.
        """

    async def submit(self, submission: AdmittedTask) -> SubmitOutcome:
        """Store the task. Raises Unstorable."""

    async def submit_batch(self, batch: BatchSubmission) -> SubmitOutcome:
        """Store all tasks of the batch. Raises Unstorable; then nothing was stored."""

    async def known_key(self, tenant: str, key: str) -> KnownKey | None:
        """Return what was submitted with this key, until it expires."""

    async def batch_answer(self, first: TaskId) -> str:
        """The stored answer to the batch that begins with this task, or its terms; empty if there is none."""

    async def request(self, *requests: Request) -> None:
        """Store requests of clients in one commit; the leader reads them from the log. Raises Unstorable."""

    async def leader(self) -> LeaderRow: ...

    async def take_term(
        self, holder: str, ttl_seconds: Seconds, *, instead_of: LeaderRow, has_lost_commits: bool = False
    ) -> Term | None:
        """Become leader with the next term, committed. From now on commits of older terms fail.

        `has_lost_commits`: the database is known to have gone back, so the term begins a new lineage. None if
        the row is no longer `instead_of`: its leader has renewed it, or another process was quicker.
        """

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        """Extend the lease to so long from now. Raises StaleTerm, StoreUnavailable."""

    async def resign(self, term: Term) -> None:
        """End the lease, so that others can take the next term at once. Does nothing for an old term."""

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        """Write each decision whole or not at all, and return one verdict per decision, in order.

        Raises StaleTerm, and StoreUnavailable after `close`; then nothing was written.
        """

    async def snapshot(self) -> Snapshot: ...

    async def events(
        self, after: Position, limit: int, tasks: Sequence[TaskId] | None = None
    ) -> Sequence[Event]:
        """Return the first events after this position: those about these tasks, or all, in order."""

    async def moves(self, tasks: Sequence[TaskId]) -> Sequence[Event]:
        """The events that changed the states of these tasks, in order."""

    async def head(self) -> Position: ...

    async def oldest(self) -> Position:
        """Return the position of the first event in the log, or of the next one if the log is empty."""

    async def prune(self, term: Term, cutoffs: Cutoffs) -> bool:
        """Remove some of what has expired: tasks with all their rows, the beginning of the log, audit notes
        and rows of uploaded objects. False if nothing was left. Raises StaleTerm."""

    async def record(self, task: TaskId) -> TaskRecord | None: ...

    async def records(self, wanted: TaskFilter) -> Sequence[TaskRecord]: ...

    async def selected(self, wanted: TaskFilter) -> Sequence[TaskId]:
        """The ids of `records`, without those of holders of models, which no request for tasks ends."""

    async def states(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, "StoredState"]:
        """Return the states, without those of tasks that have no record."""

    async def specs(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]: ...

    async def pending_entrypoints(self) -> Mapping[str, int]: ...

    async def result(self, task: TaskId) -> StoredResult | None: ...

    async def checkpoints(self, task: TaskId) -> Sequence[StoredCheckpoint]:
        """Return the checkpoints, the newest first."""

    async def referenced(self, digests: Sequence[str]) -> frozenset[str]:
        """Return those of these blobs that a row names."""

    async def put_token(self, token: "TokenRow", *, by: str) -> bool:
        """Add a token; False if the name exists. `by` is for the audit log."""

    async def tokens(self) -> Sequence["TokenRow"]: ...

    async def drop_token(self, name: str, *, by: str) -> bool:
        """False if there is none."""

    async def audit(self, *, by: str, tenant: str, action: str, subject: str) -> None:
        """Add a note about an action without a row of its own, such as `service.shutdown`."""

    async def database_time(self) -> Instant: ...

    async def held_back(self) -> HeldBack | None:
        """Return what holds back the cleaning of old row versions; None on SQLite."""

    async def log_bytes(self) -> int:
        """Return the size of SQLite's write-ahead log, or what PostgreSQL keeps of its own for a replication
        slot."""

    async def close(self) -> None: ...


class TokenRow(Grant, frozen=True, kw_only=True):
    """A token, as its hash. `scopes` are sorted; `*` is every scope."""

    sha256: str
    created_at: Instant
    expires_at: Instant | None = None


class BlobStore(Protocol):
    """Objects by sha256 digest. Each call may raise StoreUnavailable."""

    async def put(self, data: bytes, *, owner: str) -> str:
        """Store an object, and return its digest once it is durable. `owner`: a task id, for messages. Raises
        BlobTooLarge."""

    async def get(self, digest: str) -> bytes:
        """Return the bytes of the blob. Raises BlobMissing, BlobCorrupt."""

    async def read(self, digest: str, first_byte: int, most_bytes: int) -> bytes:
        """A part of it, which is not compared with the digest. Raises BlobMissing."""

    async def append(self, upload: str, first_byte: int, data: bytes) -> int:
        """The next part of a new object; one at 0 begins anew. How many bytes there are by now."""

    async def finish(self, upload: str, digest: str) -> None:
        """Make an object of its parts. Raises BlobMissing; BlobCorrupt if they have another digest."""

    async def discard(self, upload: str) -> None: ...

    async def delete(self, digest: str) -> None:
        """Delete an object after the row that named it. An object that others may have put too stays, to be
        deleted later."""


class BlobTooLarge(Exception):
    """The object exceeds the limit; nothing was written."""


class BlobMissing(Exception):
    """No object has this digest."""


class BlobCorrupt(Exception):
    """The bytes of the object do not have its digest."""
