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
        """Return the database's time, interpolated between readings. The time never goes back."""


class CommitVerdict(StrEnum):
    COMMITTED = "committed"
    STALE = "stale"
    """A row had changed, and nothing was written. The caller plans again."""
    REFUSED = "refused"
    """A constraint failed, and nothing was written. A correct plan never causes this."""
    UNSTORABLE = "unstorable"
    """The database cannot store a value of the decision. Nothing was written, and a retry would fail too."""
    UNAVAILABLE = "unavailable"
    """The database could not be reached, and nothing was written. The caller tries again later."""


class StaleTerm(Exception):
    """Raised if another process has a newer term. The caller must stop leading."""


class LostCommits(StaleTerm):
    """Raised if the database lacks commits that other processes have seen. The next term needs a new
    lineage."""


class LeaderTermOver(StaleTerm):
    """Raised if the term was not renewed in time, so that another process may lead. The caller must stop
    leading."""


class StoreUnavailable(Exception):
    """Raised if the database or the blob store cannot be reached or written now. The call has written
    nothing."""


class StoreExhausted(StoreUnavailable):
    """Raised if a disk is full, or the database has no connection left. The text says which, in words for
    clients."""


class Outgrown(StoreUnavailable):
    """Raised if newer software has changed the database incompatibly. The process must end."""


class LogOutgrown(Outgrown):
    """Raised if the log has events that this software cannot read. The process must neither lead nor answer
    from its World."""


class LogShortened(Exception):
    """Raised if the next events have been pruned. The caller must take a new snapshot."""


class LineageChanged(Exception):
    """Raised if the database went back to an earlier state, or may have: events that were read before may
    never have happened. The caller must take a new snapshot."""

    has_lost_commits = False
    """True if the log has fewer events than were read from it before, and no new lineage explains that. The
    next term needs a new lineage."""


class Unstorable(ValueError):
    """Raised for a value that the database cannot hold: a NUL in a text, half a surrogate pair, a number out
    of range."""


class TaskRecord(Struct, frozen=True):
    """A task with its spec, and its outcome if there is one."""

    task: Task
    spec: RunSpec
    failure: Mapping[str, Any] | None = None


class StoredResult(Struct, frozen=True):
    """The result of a task: its bytes in `data`, or the `digest` of the blob that holds them."""

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
    """The time at which a task ended. Requires a filter by terminal states: other tasks have no such time."""
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
    """One of entrypoint, command, function, inference, external and model; None for all kinds but model."""
    quarantined: bool | None = None
    """Selects ended tasks whose memory still counts as used (True), or no longer does (False). Unfinished
    tasks are selected beside them only if `states` names states of unfinished tasks."""
    ids: tuple[TaskId, ...] | None = None
    """Selects tasks with these ids only."""
    sort: TaskSort = TaskSort.SUBMITTED
    descending: bool = True
    after: SortKey = ()
    """The key of the last task of the previous page."""
    limit: int = 100


class HeldBack(Struct, frozen=True):
    """How long the database has been kept from removing dead rows; 0 if nothing keeps it from doing so."""

    transaction_seconds: float
    """The age of the oldest transaction of any client in seconds."""
    slot_transactions: int
    """The number of transactions since the oldest one for which a replication slot keeps rows."""


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
"""Function that returns the time of this machine's boot clock in seconds."""

EventListener = Callable[[Sequence[Event]], None]
"""Function that receives events in the order of their positions. It is called on the event loop."""


class TaskStore(ObjectRows, ItemPages, LogRows, OutputRows, IdleTemplates, Protocol):
    """The queue, the ledger's rows and the event log. Every write is durable when its call returns."""

    def listen(self, listener: EventListener) -> None:
        """Add a listener, which gets the events of this process's commits before their calls return.

        If a listener raises, that call and every later write raise the same exception: a World that has lost
        events must not be used.
        """

    async def submit(self, submission: AdmittedTask) -> SubmitOutcome:
        """Store the task. Raises Unstorable."""

    async def submit_batch(self, batch: BatchSubmission) -> SubmitOutcome:
        """Store all tasks of the batch. Raises Unstorable, and stores nothing, if a value cannot be
        stored."""

    async def known_key(self, tenant: str, key: str) -> KnownKey | None:
        """Return what was submitted with this idempotency key; None if nothing was, or the key has
        expired."""

    async def batch_answer(self, first: TaskId) -> str:
        """Return the stored answer to the batch that begins with this task, or the terms of the array or
        worker set that begins with it; empty if nothing is stored."""

    async def request(self, *requests: Request) -> None:
        """Store requests of clients in one commit; the leader reads them from the log. Raises Unstorable."""

    async def leader(self) -> LeaderRow: ...

    async def take_term(
        self, holder: str, ttl_seconds: Seconds, *, instead_of: LeaderRow, has_lost_commits: bool = False
    ) -> Term | None:
        """Become leader, and return the next term, which is committed: from now on commits of older terms
        fail.

        Returns None if the row is no longer `instead_of`: its leader has renewed it, or another process was
        quicker. `has_lost_commits` is True if the database is known to have gone back, so that the term
        begins a new lineage.
        """

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        """Extend the leader's lease until `ttl_seconds` from now. Raises StaleTerm, StoreUnavailable."""

    async def resign(self, term: Term) -> None:
        """End the leader's lease, so that another process can take the next term at once. Does nothing for an
        old term."""

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        """Write each decision whole or not at all, and return one verdict per decision, in order.

        Raises StaleTerm, or StoreUnavailable after `close`; in both cases nothing was written.
        """

    async def snapshot(self) -> Snapshot: ...

    async def events(
        self, after: Position, limit: int, tasks: Sequence[TaskId] | None = None
    ) -> Sequence[Event]:
        """Return the first events after this position, in order. With `tasks`, return only events about these
        tasks."""

    async def moves(self, tasks: Sequence[TaskId]) -> Sequence[Event]:
        """Return the events that changed the states of these tasks, in order."""

    async def head(self) -> Position: ...

    async def oldest(self) -> Position:
        """Return the position of the first event in the log, or of the next one if the log is empty."""

    async def prune(self, term: Term, cutoffs: Cutoffs) -> bool:
        """Remove some of what has expired: tasks with all their rows, the beginning of the log, audit notes
        and rows of uploaded objects. Returns False if nothing was left to remove. Raises StaleTerm."""

    async def record(self, task: TaskId) -> TaskRecord | None: ...

    async def records(self, wanted: TaskFilter) -> Sequence[TaskRecord]: ...

    async def first_records(self, parts: Sequence[TaskFilter], limit: int) -> Sequence[TaskRecord]:
        """Return the records of the first filter, then those of the second, and so on, each task once. A
        filter is read only if the filters before it have fewer than `limit` tasks. All are read in one
        snapshot of the database, so that a task which changes its state meanwhile is in one of them."""

    async def selected(self, wanted: TaskFilter) -> Sequence[TaskId]:
        """Return the ids of the tasks that `records` would return, without holders of models, which no
        request for tasks ends."""

    async def states(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, "StoredState"]:
        """Return the states of these tasks, without tasks that have no record."""

    async def specs(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, RunSpec]: ...

    async def pending_entrypoints(self) -> Mapping[str, int]: ...

    async def result(self, task: TaskId) -> StoredResult | None: ...

    async def checkpoints(self, task: TaskId) -> Sequence[StoredCheckpoint]:
        """Return the checkpoints, the newest first."""

    async def referenced(self, digests: Sequence[str]) -> frozenset[str]:
        """Return the digests among `digests` that a row names."""

    async def put_token(self, token: "TokenRow", *, by: str) -> bool:
        """Add a token. Returns False if the name exists. `by` is the name of the caller for the audit log."""

    async def tokens(self) -> Sequence["TokenRow"]: ...

    async def drop_token(self, name: str, *, by: str) -> bool:
        """Remove a token. Returns False if there is none of this name."""

    async def audit(self, *, by: str, tenant: str, action: str, subject: str) -> None:
        """Add a line to the audit log about an action that writes no other row, such as
        `service.shutdown`."""

    async def database_time(self) -> Instant: ...

    async def held_back(self) -> HeldBack | None:
        """Return what holds back the cleaning of old row versions; None on SQLite."""

    async def log_bytes(self) -> int:
        """Return the size in bytes of SQLite's write-ahead log, or of the part of PostgreSQL's that it keeps
        for a replication slot."""

    async def close(self) -> None: ...


class TokenRow(Grant, frozen=True, kw_only=True):
    """A token, stored as its hash. `scopes` are sorted; `*` stands for every scope."""

    sha256: str
    created_at: Instant
    expires_at: Instant | None = None


class BlobStore(Protocol):
    """Objects by sha256 digest. Each call may raise StoreUnavailable."""

    async def put(self, data: bytes, *, owner: str) -> str:
        """Store an object, and return its digest once it is durable. `owner` is a task id, for error
        messages. Raises BlobTooLarge."""

    async def get(self, digest: str) -> bytes:
        """Return the bytes of the blob. Raises BlobMissing, BlobCorrupt."""

    async def read(self, digest: str, first_byte: int, most_bytes: int) -> bytes:
        """Return a part of the blob, without a comparison with the digest. Raises BlobMissing."""

    async def append(self, upload: str, first_byte: int, data: bytes) -> int:
        """Add the next part of a new object, and return the number of bytes that are stored by now. A part at
        byte 0 begins the object anew."""

    async def finish(self, upload: str, digest: str, *, was_computed: bool = False) -> None:
        """Make an object of the parts of an upload. Raises BlobMissing, or BlobCorrupt if the bytes have
        another digest. With `was_computed` the caller has computed the digest from the parts that it has
        added, and they are not read again."""

    async def discard(self, upload: str) -> None: ...

    async def delete(self, digest: str) -> None:
        """Delete an object. The row that names the object must be deleted first. An object that another
        caller may have put as well stays for now and is deleted later."""


class BlobTooLarge(Exception):
    """Raised if the object exceeds the size limit; nothing was written."""


class BlobMissing(Exception):
    """Raised if no object has this digest."""


class BlobCorrupt(Exception):
    """Raised if the bytes of the object do not have its digest."""
