"""Schema, submission and view of external leases, which are for memory that processes outside of the broker
use."""

from collections.abc import Sequence
from typing import Annotated

from gpubroker.wire.answered import Time
from gpubroker.wire.leases import Lease as ShownLease
from gpubroker.wire.leases import LeaseState as Standing
from gpubroker.wire.leases import LeaseUrls, Notice
from pydantic import Field

from gpubroker_server.core.admission.submission import Asked, AskedTimes, Submission
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.submission import EXTERNAL_KIND, RunSpec
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import DAY_SECONDS, Seconds
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.status.task_view import Live, device_shares, failure_of
from gpubroker_server.gateway.submission.resources import MAX_GPUS, Kinds, SizeMb
from gpubroker_server.gateway.submission.task_body import GraceSeconds, Priority
from gpubroker_server.http.bodies import Body, Labels, LabelValue, line
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.proxies import current_prefix
from gpubroker_server.ports.store import TaskRecord

_MAX_PIDS = 2**22

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

    holder: Annotated[
        str, line(200, 1), Field(description="The name that people see.", examples=["vllm on :8000"])
    ]
    gpu_mb: Annotated[SizeMb, Field(description="The memory of each GPU.")] | None = None
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 1
    priority: Priority | None = None
    ttl_seconds: TtlSeconds = 60.0
    grace_seconds: Annotated[GraceSeconds | None, Field(description="The time from a notice to force.")] = (
        None
    )
    pid: Annotated[
        int | None,
        Field(
            ge=1,
            le=_MAX_PIDS,
            description="A process on that node. What it and its children use counts as this lease's, and "
            "the lease ends with the process, which is never signalled. Needs the scope `tasks:command`; a "
            "process of a run, of another lease or of the broker ends the lease (`not_your_process`). Left "
            "out: the memory in use counts as foreign, beside the lease.",
        ),
    ] = None
    node: Annotated[LabelValue | None, Field(description="Only on this node.")] = None
    devices: Annotated[
        list[Annotated[str, line(100, 1)]],
        Field(max_length=MAX_GPUS, description="Only of these GPUs, by UUID."),
    ] = Field(default_factory=list)
    kinds: Annotated[Kinds, Field(description="Only of GPUs of one of these kinds.")] = Field(
        default_factory=list
    )
    labels: Labels = Field(default_factory=dict)


class RenewLease(Body):
    ttl_seconds: Annotated[
        TtlSeconds | None, Field(description="From now; left out: that of the request for the lease.")
    ] = None


STATES = {
    Standing.PENDING: (TaskState.PENDING,),
    Standing.HELD: (TaskState.ADMITTED, TaskState.RUNNING),
    Standing.STOPPING: (TaskState.STOPPING,),
    Standing.QUARANTINED: tuple(state for state in TaskState if state.is_terminal),
    Standing.ENDED: tuple(state for state in TaskState if state.is_terminal),
}
"""Standing of a lease -> the states that its task may have. A lease of an ended task is quarantined while it
still holds memory."""


def submission_of_lease(body: AskLease, tenant: str) -> Submission:
    """Return the submission of a body. It asks for GPU memory, and for no other resource of a node."""
    return Submission(
        tenant=tenant,
        spec=RunSpec(kind=EXTERNAL_KIND, labels=body.labels),
        demand=Asked(
            gpus=body.gpus,
            gpu_mb=body.gpu_mb,
            cpu=0.0,
            memory_mb=0,
            where=PlacementConstraints(
                kinds=tuple(body.kinds),
                devices=tuple(sorted(set(body.devices))),
                nodes=() if body.node is None else (("node", (body.node,)),),
            ),
        ),
        name=body.holder,
        priority=body.priority,
        grace_seconds=body.grace_seconds,
        times=AskedTimes(deadline_seconds=body.ttl_seconds),
        holder=External(Seconds(body.ttl_seconds), body.pid),
    )


def check_node(body: AskLease, world: World, *, names_nodes: bool) -> None:
    """Check that the node exists, and that the process can be on one node only. `names_nodes` says whether
    the token may see the names of nodes. Raises Problem no-matching-device or validation-failed."""
    if body.node is not None and world.nodes and body.node not in world.nodes:
        nodes_text = f"; nodes: {', '.join(sorted(world.nodes)[:5])}" if names_nodes else ""
        detail = f'there is no node "{body.node}"{nodes_text}; name another node, or none'
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


def standing_of(task: Task, live: Live) -> Standing:
    if task.is_terminal:
        held = any(lease.state is not LeaseState.RELEASED for lease in live.leases)
        return Standing.QUARANTINED if held else Standing.ENDED
    return next(name for name, states in STATES.items() if task.state in states)


def lease_view(record: TaskRecord, live: Live) -> ShownLease:
    """Return a lease as answers show it."""
    task, demand = record.task, record.task.demand
    assert isinstance(task.holder, External)
    prefix = current_prefix.get()
    url, of_task = f"{prefix}/leases/{task.id}", f"{prefix}/tasks/{task.id}"
    return ShownLease(
        id=task.id,
        holder=task.name,
        tenant=task.tenant,
        state=standing_of(task, live),
        priority=task.priority,
        band=band_of(task.priority)[0],
        gpus=demand.gpus,
        gpu_mb=demand.gpu_mb,
        kinds=demand.where.kinds,
        pid=task.holder.pid,
        labels=record.spec.labels,
        node=task.node,
        devices=device_shares(live.leases, live),
        ttl_seconds=task.holder.ttl_seconds,
        grace_seconds=task.grace_seconds,
        requested_at=Time.at(task.submitted_at),
        held_at=Time.at_or_none(task.admitted_at),
        deadline_at=Time.at_or_none(task.deadline_at),
        ended_at=Time.at_or_none(task.finished_at),
        notice=_notice(task),
        pending=live.pending,
        error=failure_of(record.failure),
        urls=LeaseUrls(url, f"{url}/renew", f"{url}/wait", f"{of_task}/events", f"{of_task}/explain"),
    )


def states_of(wanted: Sequence[Standing]) -> tuple[tuple[TaskState, ...], bool | None]:
    """Return the states of the tasks to list. The second value says whether the ended ones among them must be
    quarantined (True) or must not be (False); it is None if both or neither are wanted."""
    states = tuple(state for name in STATES if name in wanted for state in STATES[name])
    of_ended = {Standing.QUARANTINED, Standing.ENDED} & set(wanted)
    return tuple(dict.fromkeys(states)), Standing.QUARANTINED in of_ended if len(of_ended) == 1 else None


def _notice(task: Task) -> Notice | None:
    if task.state is not TaskState.STOPPING or task.stop_reason is None or task.stop_deadline_at is None:
        return None
    return Notice(task.stop_reason, Time.at(task.stop_deadline_at), task.stop_cause)
