"""External leases, for memory that processes outside of the broker use: schema, task and answer."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.demand import Demand, PlacementConstraints
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.task import ExternalTerms, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, Seconds, TaskId
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.bodies import Body, KindName, Labels, LabelValue, line
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.times import Time, rfc3339, rfc3339_or_none
from gpubroker_server.gateway.status.task_view import Live, device_shares, error_view
from gpubroker_server.gateway.status.views import DeviceShare, ErrorView, PendingView
from gpubroker_server.gateway.submission.demand import Defaults
from gpubroker_server.gateway.submission.resources import MAX_MB
from gpubroker_server.gateway.submission.task_body import GraceSeconds, Priority
from gpubroker_server.gateway.submission.timing import DAY_SECONDS
from gpubroker_server.ports.store import TaskRecord

_MOST_PIDS = 2**22

TtlSeconds = Annotated[
    float,
    Field(
        ge=1,
        le=7 * DAY_SECONDS,
        description="The holder is asked to leave unless it renews the lease within this time.",
    ),
]


class AskLease(Body):
    """GPU memory for a process that the broker does not start. Without `gpu_mb` whole GPUs."""

    holder: Annotated[str, line(200, 1), Field(description="For people.", examples=["vllm on :8000"])]
    gpu_mb: Annotated[int, Field(ge=1, le=MAX_MB, description="Of each GPU.")] | None = None
    gpus: Annotated[int, Field(ge=1, le=1024)] = 1
    priority: Priority | None = None
    ttl_seconds: TtlSeconds = 60.0
    grace_seconds: Annotated[GraceSeconds | None, Field(description="From notice to force.")] = None
    pid: Annotated[
        int | None,
        Field(
            ge=1,
            le=_MOST_PIDS,
            description="A process on that node. What it and its children use counts as this lease's, and "
            "the lease ends with the process, which is never signalled. Needs the scope `tasks:command`; a "
            "process of a run, of another lease or of the broker ends the lease (`not_your_process`). Left "
            "out: the memory in use counts as foreign, beside the lease.",
        ),
    ] = None
    node: Annotated[LabelValue | None, Field(description="Only on this node.")] = None
    devices: Annotated[
        list[Annotated[str, line(100, 1)]],
        Field(max_length=1024, description="Only of these GPUs, by UUID."),
    ] = Field(default_factory=list)
    kinds: Annotated[
        list[KindName], Field(max_length=32, description="Only of GPUs of one of these kinds.")
    ] = Field(default_factory=list)
    labels: Labels = Field(default_factory=dict)


class RenewLease(Body):
    ttl_seconds: Annotated[
        TtlSeconds | None, Field(description="From now; left out: that of the request for the lease.")
    ] = None


class LeaseStanding(StrEnum):
    PENDING = "pending"
    HELD = "held"
    STOPPING = "stopping"
    """The holder is asked to leave."""
    QUARANTINED = "quarantined"
    """It has ended without a release: its memory still counts as used."""
    ENDED = "ended"


STATES = {
    LeaseStanding.PENDING: (TaskState.PENDING,),
    LeaseStanding.HELD: (TaskState.ADMITTED, TaskState.RUNNING),
    LeaseStanding.STOPPING: (TaskState.STOPPING,),
    LeaseStanding.QUARANTINED: tuple(state for state in TaskState if state.is_terminal),
    LeaseStanding.ENDED: tuple(state for state in TaskState if state.is_terminal),
}
"""A lease is a task in one of these states. The last two differ in whether it still has memory."""


class NoticeView(TypedDict):
    """Why and by when the holder must free its memory and release the lease."""

    reason: Annotated[str, Field(description="preempt, deadline (it was not renewed), cancel or overuse.")]
    deadline_at: Time


class LeaseUrls(TypedDict):
    self: str
    renew: str
    wait: str
    events: str
    explain: str


class LeaseView(TypedDict):
    """The present state of a lease. It is also a task, which is never started: see `/tasks/{id}`."""

    id: str
    holder: str
    tenant: str
    state: Annotated[str, Field(description="pending, held, stopping, quarantined or ended.")]
    priority: int
    band: str
    gpus: int
    gpu_mb: int | None
    kinds: list[str]
    pid: int | None
    labels: dict[str, str]
    node: str | None
    devices: Annotated[list[DeviceShare], Field(description="What it holds now.")]
    ttl_seconds: float
    grace_seconds: float
    requested_at: Time
    held_at: Time | None
    deadline_at: Annotated[Time | None, Field(description="Renew it before then.")]
    ended_at: Time | None
    notice: NoticeView | None
    pending: PendingView | None
    error: Annotated[ErrorView | None, Field(description="Why it ended without a release.")]
    urls: LeaseUrls


class LeasePage(TypedDict):
    items: list[LeaseView]
    next_cursor: str | None
    has_more: bool


def demand_of_lease(body: AskLease) -> Demand:
    """Memory of GPUs, and nothing else of a node."""
    return Demand(
        gpus=body.gpus,
        gpu_mb=None if body.gpu_mb is None else Mib(body.gpu_mb),
        where=PlacementConstraints(
            kinds=tuple(body.kinds),
            devices=tuple(sorted(set(body.devices))),
            nodes=() if body.node is None else (("node", (body.node,)),),
        ),
    )


def task_of_lease(
    body: AskLease, demand: Demand, tenant: str, defaults: Defaults, *, id: TaskId, now: Instant
) -> Task:
    grace = defaults.grace_seconds if body.grace_seconds is None else body.grace_seconds
    return Task(
        id=id,
        tenant=tenant,
        name=body.holder,
        priority=defaults.priority if body.priority is None else body.priority,
        demand=demand,
        submitted_at=now,
        grace_seconds=Seconds(grace),
        deadline_at=Instant(now + body.ttl_seconds),
        external=ExternalTerms(Seconds(body.ttl_seconds), body.pid),
    )


def check_node(body: AskLease, world: World, *, names_nodes: bool) -> None:
    """Raises Problem for an unknown node, and for a process that could be on several nodes.

    `names_nodes`: whether the token may see the names of nodes.
    """
    if body.node is not None and world.nodes and body.node not in world.nodes:
        known = f"; nodes: {', '.join(sorted(world.nodes)[:5])}" if names_nodes else ""
        detail = f'there is no node "{body.node}"{known}; name another node, or none'
        fault = Fault(pointer="/node", detail=detail, code="no-matching-device")
        raise Problem("no-matching-device", detail, errors=[fault])
    if body.pid is None:
        return
    nodes = {name for name in world.nodes if body.node in (None, name)}
    if body.devices:
        nodes &= {
            ledger.device.node for ledger in world.ledgers.values() if ledger.device.uuid in body.devices
        }
    if len(nodes) > 1:
        detail = f"process {body.pid} could be on any of {len(nodes)} nodes; name the node, or devices"
        raise invalid(Fault(pointer="/node", detail=detail, code="missing"))


def standing_of(task: Task, live: Live) -> LeaseStanding:
    if task.is_terminal:
        held = any(lease.state is not LeaseState.RELEASED for lease in live.leases)
        return LeaseStanding.QUARANTINED if held else LeaseStanding.ENDED
    return next(name for name, states in STATES.items() if task.state in states)


def lease_view(record: TaskRecord, live: Live) -> LeaseView:
    task, demand = record.task, record.task.demand
    assert task.external is not None
    url = f"/leases/{task.id}"
    return {
        "id": task.id,
        "holder": task.name,
        "tenant": task.tenant,
        "state": standing_of(task, live).value,
        "priority": task.priority,
        "band": band_of(task.priority)[0],
        "gpus": demand.gpus,
        "gpu_mb": demand.gpu_mb,
        "kinds": list(demand.where.kinds),
        "pid": task.external.pid,
        "labels": dict(record.spec.labels),
        "node": task.node,
        "devices": device_shares(live.leases, live),
        "ttl_seconds": task.external.ttl_seconds,
        "grace_seconds": task.grace_seconds,
        "requested_at": rfc3339(task.submitted_at),
        "held_at": rfc3339_or_none(task.admitted_at),
        "deadline_at": rfc3339_or_none(task.deadline_at),
        "ended_at": rfc3339_or_none(task.finished_at),
        "notice": _notice(task),
        "pending": live.pending,
        "error": error_view(record.failure),
        "urls": {
            "self": url,
            "renew": f"{url}/renew",
            "wait": f"{url}/wait",
            "events": f"/tasks/{task.id}/events",
            "explain": f"/tasks/{task.id}/explain",
        },
    }


def states_of(wanted: Sequence[LeaseStanding]) -> tuple[tuple[TaskState, ...], bool | None]:
    """The states of tasks to list; and, if one of the two ended standings is meant, whether it is the
    quarantined one."""
    states = tuple(state for name in LeaseStanding if name in wanted for state in STATES[name])
    of_ended = {LeaseStanding.QUARANTINED, LeaseStanding.ENDED} & set(wanted)
    return tuple(dict.fromkeys(states)), LeaseStanding.QUARANTINED in of_ended if len(of_ended) == 1 else None


def _notice(task: Task) -> NoticeView | None:
    if task.state is not TaskState.STOPPING or task.stop_reason is None or task.stop_deadline_at is None:
        return None
    return {"reason": task.stop_reason.value, "deadline_at": rfc3339(task.stop_deadline_at)}
