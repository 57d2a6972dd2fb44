"""Decisions: what should change, as values. Each is committed whole or not at all; nothing acts before."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.estimates import Lesson, Topic
from gpubroker_server.core.domain.lease import Lease, LeaseState, Pledge, PledgeEnd
from gpubroker_server.core.domain.model_orders import InferenceOrder, ModelOrder
from gpubroker_server.core.domain.orders import Checkpointed, Failure, Order
from gpubroker_server.core.domain.task import Move, Task, move
from gpubroker_server.core.domain.units import DeviceKey, Instant, TaskId
from gpubroker_server.core.domain.values import value

AnyOrder = Order | ModelOrder | InferenceOrder
"""To node agents, to servers of models, or to those about to ask one."""

Fields = Mapping[str, Any]
"""Plain JSON values only: what an event carries and `World.apply` reads."""


@value
class TaskWrite:
    """One changed task row. The store writes it only where the row's version is `task.version - 1`."""

    task: Task
    what: Move
    changed: tuple[str, ...]
    """Names of the changed fields besides `state`; the event carries exactly these."""


def write_move(task: Task, what: Move, **changes: Any) -> TaskWrite:
    """Move a task and remember what changed. Raises IllegalTransition; nothing is changed."""
    return TaskWrite(move(task, what, **changes), what, tuple(changes))


@dataclass(frozen=True, slots=True)
class PledgeWrite:
    """A pledge that was made (`end` is None) or came to one of its four ends."""

    pledge: Pledge
    end: PledgeEnd | None = None


def withdrawn(pledges: Mapping[DeviceKey, Pledge]) -> tuple[PledgeWrite, ...]:
    """The end of the pledges of a task that no longer waits: what is still freed for it is free for all."""
    return tuple(PledgeWrite(pledges[device], PledgeEnd.WITHDRAWN) for device in sorted(pledges))


@value
class Outcome:
    """What a run left behind. The newest accepted outcome of a task is its result."""

    task: TaskId
    fence: int
    ending: str
    at: Instant
    result: bytes | None = None
    result_digest: str | None = None
    """Where the result is when it was too large to stay in a row; then `result` is None."""
    result_format: str = "json"
    failure: Failure | None = None
    log_tail: bytes = b""


@dataclass(frozen=True, slots=True)
class AuditNote:
    """Who did what, when and why: written with the decision that carries it out."""

    at: Instant
    tenant: str
    actor: str
    """Name of the token."""
    action: str
    subject: str
    reason: str


@value
class Decision:
    """Rows that change together, and the orders to send once they have.

    Guarded by the leader's term and by the version of every task and lease in it. A lease of version 1 is
    new. `leases` moving to RELEASED give their MiB back to the device row in the same transaction.
    """

    subject: str
    """Task id or node name, for logs."""
    why: str
    """Stable token: admit, preempt, preempted, ended, cancel, change, retry, node_seen, ..."""
    tasks: tuple[TaskWrite, ...] = ()
    leases: tuple[Lease, ...] = ()
    pledges: tuple[PledgeWrite, ...] = ()
    devices: tuple[Device, ...] = ()
    nodes: tuple[Node, ...] = ()
    outcome: Outcome | None = None
    checkpoint: Checkpointed | None = None
    requests_done: tuple[str, ...] = ()
    orders: tuple[AnyOrder, ...] = ()
    lessons: tuple[Lesson, ...] = ()
    """What the runs that it ends teach."""
    forgotten: tuple[Topic, ...] = ()
    audit: tuple[AuditNote, ...] = ()

    def is_empty(self) -> bool:
        return not (
            self.tasks or self.leases or self.pledges or self.devices or self.nodes or self.requests_done
        )


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked of a task that exists: a gateway inserts it, only the leader carries it out.

    `what` is cancel (fields: grace_seconds, or nothing), or change (fields: priority, held); of an external
    holder also renew (fields: ttl_seconds, or nothing), or release (fields: by); of a model want (fields:
    priority, uses) or pin (fields: pinned, by). Of operators: attest (fields: leases, by, reason) of a
    holder, and resume (fields: nodes, by, reason), of no task.
    """

    id: str
    task: TaskId
    tenant: str
    what: str
    fields: Fields
    made_at: Instant


def tenant_delta_mb(decision: Decision) -> dict[str, int]:
    """Tenant -> change of what it holds if this decision commits; 0 where as much comes as goes."""
    delta: dict[str, int] = {}
    for lease in decision.leases:
        if lease.version == 1:
            delta[lease.tenant] = delta.get(lease.tenant, 0) + lease.mb
        elif lease.state is LeaseState.RELEASED:
            delta[lease.tenant] = delta.get(lease.tenant, 0) - lease.mb
    return delta


def given_mb(decision: Decision) -> int:
    """What a planned decision gives to its task beyond what was pledged to it before; 0 if nothing."""
    given: int = sum(lease.mb for lease in decision.leases)
    for written in decision.pledges:
        if written.end is None:
            given += written.pledge.mb
        elif written.pledge.preemptor == decision.subject:
            given -= written.pledge.mb
    return max(0, given)


def device_delta_mb(decision: Decision) -> dict[str, int]:
    """Device key -> change of its `leased_mb` if this decision commits (negative where memory returns)."""
    delta: dict[str, int] = {}
    for lease in decision.leases:
        if lease.version == 1:
            delta[lease.device] = delta.get(lease.device, 0) + lease.mb
        elif lease.state is LeaseState.RELEASED:
            delta[lease.device] = delta.get(lease.device, 0) - lease.mb
    return delta
