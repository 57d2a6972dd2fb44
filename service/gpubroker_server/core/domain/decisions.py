"""Decisions: the changes to commit, as values. A decision commits whole or not at all, and nothing acts on it
before the commit."""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.device import Device, DiskOrder, Node
from gpubroker_server.core.domain.estimates import Observation, SketchKey
from gpubroker_server.core.domain.lease import Lease, LeaseState, Pledge, PledgeEnd
from gpubroker_server.core.domain.model_orders import InferenceOrder, ModelOrder
from gpubroker_server.core.domain.orders import Checkpointed, Failure, Order, PrepareOrder
from gpubroker_server.core.domain.submission import Fields as Fields
from gpubroker_server.core.domain.submission import Request as Request
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import Move, Task, move
from gpubroker_server.core.domain.units import Instant, TaskId

AnyOrder = Order | DiskOrder | PrepareOrder | ModelOrder | InferenceOrder
"""An order to a node agent, to a model server, or to the sender of inferences."""


class TaskWrite(Struct, frozen=True):
    """A changed task row. The store writes it only where the row's version is `task.version - 1`."""

    task: Task
    what: Move
    changed: tuple[str, ...]
    """Names of the changed fields besides `state`: the event carries exactly these."""


def write_move(task: Task, transition: Move, **changes: Any) -> TaskWrite:
    """Move a task and record which fields changed. Raises IllegalTransition."""
    return TaskWrite(move(task, transition, **changes), transition, tuple(changes))


class PledgeWrite(Struct, frozen=True):
    """A new pledge (`end` is None), or the end of one."""

    pledge: Pledge
    end: PledgeEnd | None = None


class Outcome(Struct, frozen=True):
    """The end of a run, with its result. The newest accepted outcome of a task is the task's result."""

    task: TaskId
    fence: int
    ending: str
    at: Instant
    result: bytes | None = None
    result_digest: str | None = None
    """Digest of the object with a result that was too large for the row; `result` is then None."""
    result_format: str = "json"
    failure: Failure | None = None
    log_tail: bytes = b""


class ItemPage(Struct, frozen=True):
    """Results of consecutive items of an array, which were reported together."""

    array: TaskId
    first: int
    page: int
    """The number of the page. The pages of an array are numbered from 1 in the order of their commits."""
    tenant: str
    count: int
    failed: int
    at: Instant
    lines: bytes
    """One line of JSON for each item; empty if `digest` names the blob that has the lines."""
    digest: str | None = None
    size_bytes: int = 0
    """The length of the lines, whether they are in the row or in a blob."""


class AuditNote(Struct, frozen=True):
    """A line of the audit log: an actor, an action, a time and a reason. It is written in the transaction
    that carries out the action."""

    at: Instant
    tenant: str
    actor: str
    """The name of the token; `settings` if the action follows from the operator's configuration."""
    action: str
    subject: str
    reason: str


class Notice(Struct, frozen=True):
    """An event of the log that belongs to no row."""

    kind: str
    """`memory.fragmented`, `cordon.changed`, `worker.joined`, ..."""
    key: str
    fields: Fields
    tenant: str = ""


class QueuePause(Struct, frozen=True):
    """A pause: the queue of one tenant, or of one work stream, starts nothing until it is resumed. Each pause
    is one row."""

    queue: str
    """`tenant:NAME` or `stream:NAME`."""
    at: Instant
    actor: str
    """The name of the operator's token."""
    reason: str = ""

    @property
    def tenant(self) -> str:
        """The tenant of the queue; empty for a stream, which all tenants share."""
        kind, _, name = self.queue.partition(":")
        return name if kind == "tenant" else ""


class StreamState(Struct, frozen=True):
    """The progress and the signals that operators and clients have reported of a work stream. A stream
    without any has no row."""

    name: str
    curriculum: float | None = None
    """The weight that an operator has given the stream; None if the weight of the settings holds."""
    progress: float | None = None
    progress_at: Instant = Instant(0.0)
    velocity_per_hour: float = 0.0
    data_at: Instant | None = None
    """The time of the stream's newest data."""
    quality: float = 1.0

    @property
    def is_untold(self) -> bool:
        return self == StreamState(self.name)


def known_streams(
    settings: Iterable[tuple[str, float]], streams: Mapping[str, StreamState]
) -> dict[str, StreamState]:
    """Return all work streams that have a weight, by name. A weight that an operator gave goes before that of
    the settings."""
    weighted = {name: stream for name, stream in streams.items() if stream.curriculum is not None}
    for name, weight in settings:
        weighted.setdefault(name, replace(streams.get(name, StreamState(name)), curriculum=weight))
    return weighted


class WorkerSetWrite(Struct, frozen=True):
    """The row of a worker set."""

    workers: WorkerSet
    what: str
    """`formed`, `changed` or `over`. With `over` the row is deleted."""
    changed: tuple[str, ...] = ()
    """Names of the changed fields: the event carries exactly these."""


class Decision(Struct, frozen=True):
    """Rows that change together, and the orders to send after the commit.

    The commit is guarded by the leader's term and by the version of every task and lease in the decision. A
    lease of version 1 is new. A lease that becomes RELEASED gives its MiB back to the device row in the same
    transaction.
    """

    subject: str
    """The task id or node name, for logs."""
    why: str
    """A stable token: admit, preempt, preempted, ended, cancel, change, retry, node_seen, ..."""
    tasks: tuple[TaskWrite, ...] = ()
    leases: tuple[Lease, ...] = ()
    pledges: tuple[PledgeWrite, ...] = ()
    devices: tuple[Device, ...] = ()
    nodes: tuple[Node, ...] = ()
    outcome: Outcome | None = None
    checkpoint: Checkpointed | None = None
    items: tuple[ItemPage, ...] = ()
    requests_done: tuple[str, ...] = ()
    answer: str = ""
    """The digest of the object that answers the requests in `requests_done`; empty if none does."""
    orders: tuple[AnyOrder, ...] = ()
    lessons: tuple[Observation, ...] = ()
    forgotten: tuple[SketchKey, ...] = ()
    audit: tuple[AuditNote, ...] = ()
    notices: tuple[Notice, ...] = ()
    paused: tuple[QueuePause, ...] = ()
    resumed: tuple[QueuePause, ...] = ()
    worker_sets: tuple[WorkerSetWrite, ...] = ()
    streams: tuple[StreamState, ...] = ()
    """The changed work streams. The row of a stream that `is_untold` is deleted."""

    def is_empty(self) -> bool:
        return not (
            self.tasks
            or self.leases
            or self.pledges
            or self.devices
            or self.nodes
            or self.requests_done
            or self.notices
            or self.paused
            or self.resumed
            or self.worker_sets
            or self.streams
        )


def tenant_delta_mb(decision: Decision) -> dict[str, int]:
    """Return, by tenant, the change of the MiB that the tenant holds if this decision commits."""
    return _lease_delta_mb(decision, "tenant")


def device_delta_mb(decision: Decision) -> dict[str, int]:
    """Return, by device key, the change of the device's `leased_mb` if this decision commits."""
    return _lease_delta_mb(decision, "device")


def _lease_delta_mb(decision: Decision, field: str) -> dict[str, int]:
    delta: dict[str, int] = {}
    for lease in decision.leases:
        if lease.version == 1 or lease.state is LeaseState.RELEASED:
            name, mb = getattr(lease, field), lease.mb if lease.version == 1 else -lease.mb
            delta[name] = delta.get(name, 0) + mb
    return delta


def granted_mb(decision: Decision) -> int:
    """Return the MiB that a planned decision gives its task beyond what was pledged to it before; at least
    0."""
    granted: int = sum(lease.mb for lease in decision.leases)
    for written in decision.pledges:
        if written.end is None:
            granted += written.pledge.mb
        elif written.pledge.preemptor == decision.subject:
            granted -= written.pledge.mb
    return max(0, granted)
