"""Reconcile the rows of a node with its agent's answer. Where the two differ, the answer wins."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from gpubroker.wire.bounds import Amount, PositiveCount
from gpubroker.wire.policy import GpuKind
from msgspec import Struct, field
from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import AnyOrder, Decision
from gpubroker_server.core.domain.device import Device, Node, kind_of
from gpubroker_server.core.domain.holders import Gang, Member, MemberState
from gpubroker_server.core.domain.lease import HOLDERS_WITH_RUNS, Proof
from gpubroker_server.core.domain.orders import (
    ForgetOrder,
    Gone,
    NodeReport,
    Order,
    ReportedDevice,
    RunId,
    StopOrder,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import ranks_of
from gpubroker_server.core.domain.setting_marks import NonNegativeMib, PositiveAmount, PositiveMib, alone
from gpubroker_server.core.domain.task import StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, Seconds, TaskId, device_key
from gpubroker_server.core.lifecycle import environments, external_leases, gpu_closures
from gpubroker_server.core.lifecycle.gang_runs import beginning_orders, stop_order
from gpubroker_server.core.lifecycle.runs import apply_reports, dissolved_pledges
from gpubroker_server.core.lifecycle.stopping import stop_orders
from gpubroker_server.core.world.events import closure_notice, environments_notice
from gpubroker_server.core.world.world import World


def take_over(world: World) -> Decision | None:
    """Return the first decision of a term, which closes every node until its agent has answered this term.

    Once an agent has answered, starts that an older term ordered can no longer arrive, because agents refuse
    lower terms. Therefore the answer proves what never started.
    """
    ready = (node for name, node in sorted(world.nodes.items()) if node.ready)
    nodes = tuple(replace(node, ready=False, version=node.version + 1) for node in ready)
    return Decision("cluster", "take_over", nodes=nodes) if nodes else None


class NodeRules(Struct, frozen=True):
    """The operator's values for one node. A value that is None is left to the node's agent."""

    cpu: PositiveAmount | None = None
    memory_mb: PositiveMib | None = None
    max_runs: PositiveCount | None = None
    reserve_cpu: Amount = 0.0
    reserve_memory_mb: NonNegativeMib = Mib(0)
    reserve_mb: Annotated[Mapping[str, NonNegativeMib], alone("*")] = field(default_factory=dict)
    """Maps the UUID or number of a device to its reserve; `*` stands for each other device."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels of the node, which win over those of the agent."""


class InventoryRules(Struct, frozen=True):
    cluster: str
    reserve_mb: Mib = Mib(0)
    declared_foreign_mb: Mapping[str, Mib] = field(default_factory=dict)
    """The declared foreign memory of each GPU, by node name or by kind. The amount of the node wins."""
    node_custom: tuple[tuple[str, float], ...] = ()
    """The amounts of the custom resources that each node has for itself, sorted by name."""
    nodes: Mapping[str, NodeRules] = field(default_factory=dict)
    kinds: tuple[GpuKind, ...] = ()

    def of(self, node: str) -> NodeRules:
        return self.nodes.get(node) or NodeRules()


def never_joined(world: World, rules: InventoryRules) -> list[str]:
    """Return the nodes that the operator's rules name and that have not been seen, by name."""
    return sorted(rules.nodes.keys() - world.nodes.keys())


def reconcile(
    world: World, seen: NodeReport, now: Instant, policy: Policy, rules: InventoryRules
) -> list[Decision]:
    """Return the decisions after a node's report: first one for the node and its devices, then one per task
    with a missing run, then one with orders. Runs that only rows know are gone; runs that only the agent
    knows are killed."""
    decisions = []
    nodes, devices = _node_row(world, seen, rules), _device_rows(world, seen, rules)
    opened = gpu_closures.back_in_service(world, seen, devices)
    devices = tuple(({device.key: device for device in devices} | opened).values())
    if nodes or devices:
        gone = [device.key for device in devices if not device.present]
        pledges = dissolved_pledges(world, gone)
        news = tuple(closure_notice(device) for device in opened.values())
        known = world.nodes.get(seen.node.name)
        before = () if known is None else known.environments
        news += tuple(environments_notice(node) for node in nodes if node.environments != before)
        seen_now = Decision(seen.node.name, "node_seen", nodes=nodes, devices=devices, notices=news)
        decisions.append(replace(seen_now, pledges=pledges))
    absent = apply_reports(world, _absences(world, seen), now, policy)
    absent = [replace(decision, orders=tuple(_still_of_use(decision.orders, seen))) for decision in absent]
    decisions += [decision for decision in absent if not decision.is_empty()]
    # Earlier orders to a running gang are not repeated to ranks that these decisions stop.
    stopped = {
        write.task.id
        for decision in absent
        for write in decision.tasks
        if write.task.state is not TaskState.RUNNING
    }
    repeated = (
        replace(order, incarnation=seen.node.incarnation)
        for order in _orders_again(world, seen, now)
        if order.task not in stopped or isinstance(order, StopOrder)
    )
    orders = (*repeated, *_unwanted(world, seen))
    if orders:
        decisions.append(Decision(seen.node.name, "reconcile", orders=orders))
    return decisions


def _node_row(world: World, seen: NodeReport, rules: InventoryRules) -> tuple[Node, ...]:
    """Return the node's row if it has changed. The operator, not the agent, decides on the cordon."""
    known, agents, node_rules = world.nodes.get(seen.node.name), seen.node, rules.of(seen.node.name)
    row = replace(
        agents,
        ready=True,
        version=1,
        custom=rules.node_custom,
        labels=tuple(sorted({**dict(agents.labels), **node_rules.labels}.items())),
        cpu=max(0.0, (node_rules.cpu or agents.cpu) - node_rules.reserve_cpu),
        memory_mb=Mib(max(0, (node_rules.memory_mb or agents.memory_mb) - node_rules.reserve_memory_mb)),
        # A node whose agent reports 0 runs takes nothing, whatever the rules say.
        max_runs=(node_rules.max_runs or agents.max_runs) if agents.max_runs else 0,
        environments=environments.reported(known, agents),
    )
    if known is None:
        return (row,)
    row = replace(
        row,
        cordoned=known.cordoned,
        cordon_reason=known.cordon_reason,
        cordoned_by=known.cordoned_by,
        cordoned_at=known.cordoned_at,
        draining_since=known.draining_since,
        drain_deadline_at=known.drain_deadline_at,
        version=known.version,
    )
    return () if row == known else (replace(row, version=known.version + 1),)


def _device_rows(world: World, seen: NodeReport, rules: InventoryRules) -> tuple[Device, ...]:
    rows = []
    for device in seen.devices:
        row = _device(seen, device, rules)
        ledger = world.ledgers.get(row.key)
        if ledger is not None:
            row = replace(row, version=ledger.device.version, closure=ledger.device.closure)
            if row == ledger.device:
                continue
            row = replace(row, version=row.version + 1)
        rows.append(row)
    return (*rows, *_gone_devices(world, seen))


def _gone_devices(world: World, seen: NodeReport) -> Iterator[Device]:
    """Yield the rows of devices that the node's agent no longer finds. While the agent's list is incomplete,
    no device counts as gone; a device without samples takes nothing new."""
    if not seen.complete:
        return
    reported = {device.uuid for device in seen.devices}
    for key in world.by_node.get(seen.node.name, ()):
        device = world.ledgers[key].device
        if device.present and device.uuid not in reported:
            yield replace(device, present=False, version=device.version + 1)


def _device(seen: NodeReport, device: ReportedDevice, rules: InventoryRules) -> Device:
    node = seen.node.name
    declared, reserved = rules.declared_foreign_mb, rules.of(node).reserve_mb
    names = (device.uuid, str(device.index), "*")
    kind = kind_of(device.kind, rules.kinds)
    return Device(
        key=device_key(rules.cluster, node, device.uuid),
        node=node,
        uuid=device.uuid,
        kind=device.kind,
        index=device.index,
        physical_mb=device.physical_mb,
        reserve_mb=next((reserved[name] for name in names if name in reserved), rules.reserve_mb),
        declared_foreign_mb=declared.get(node, declared.get(device.kind, Mib(0))),
        power=0 if kind is None else kind.power,
        context_mb=Mib(0 if kind is None else kind.context_mb),
        simulated=device.simulated,
        parent=device.parent,
        split=device.split or any(other.parent == device.uuid for other in seen.devices),
    )


def _absences(world: World, seen: NodeReport) -> Iterator[Gone]:
    """Yield a Gone for each claim in the rows of this node that its agent does not know."""
    known = world.nodes.get(seen.node.name)
    if known is None:
        return
    listed = set(seen.runs)
    node_proof = _node_proof(known, seen.node)
    if node_proof is Proof.BOOT_CHANGED:
        for external in external_leases.holders_on(world, seen.node.name):
            yield Gone(external.id, external.fence, seen.at, node_proof)
    expected = set()
    for task, rank in _active_on(world, seen):
        run = (task.id, task.fence, rank)
        expected.add(run)
        if run in listed:
            continue
        if _has_begun(task, rank):
            yield Gone(task.id, task.fence, seen.at, node_proof or Proof.PROCESS_ABSENT, rank=rank)
        elif node_proof or not known.ready:
            # The node was closed until this answer, so no start was sent meanwhile, and the agent refuses
            # starts of earlier terms and incarnations. A start that it has not seen never reaches it (ADR 7).
            yield Gone(task.id, task.fence, seen.at, node_proof or Proof.NEVER_STARTED, rank=rank)
        # Otherwise this agent has answered this term before, and the start may be on its way to the agent.
    for holder, fence, rank in _claims_on(world, seen):
        if (holder, fence, rank) not in listed | expected:
            yield Gone(holder, fence, seen.at, node_proof or Proof.PROCESS_ABSENT, rank=rank)


def _node_proof(known: Node, answering: Node) -> Proof | None:
    """Return the proof that nothing which ran under the earlier agent still runs; None if the agent is the
    same."""
    if answering.boot_id != known.boot_id:
        return Proof.BOOT_CHANGED
    return Proof.AGENT_RESTARTED if answering.incarnation != known.incarnation else None


def _has_begun(task: Task, rank: int) -> bool:
    match task.holder:
        case Gang(members):
            return members[rank].state is not MemberState.PLACED
        case _:
            return task.started_at is not None


def _active_on(world: World, seen: NodeReport) -> list[tuple[Task, int]]:
    name = seen.node.name
    tasks = (world.tasks[task] for task in sorted(world.runs.get(name, ())))
    return [(task, rank) for task in tasks for rank, node in ranks_of(task) if node == name]


def _claims_on(world: World, seen: NodeReport) -> list[RunId]:
    """Return the claims with memory on this node, including those of tasks that have moved on or ended."""
    ledgers = (world.ledgers[key] for key in world.by_node.get(seen.node.name, ()))
    leases = (holding.lease for ledger in ledgers for holding in ledger.holdings.values())
    runs = (lease for lease in leases if lease.holder_kind in HOLDERS_WITH_RUNS)
    return sorted({(TaskId(lease.holder), lease.fence, lease.rank) for lease in runs})


def _still_of_use(orders: Iterable[AnyOrder], seen: NodeReport) -> Iterator[AnyOrder]:
    """Yield the orders, except those to runs of this node that its agent does not know. Orders to other nodes
    remain: when a gang loses a rank here, its ranks elsewhere are asked to stop."""
    listed = set(seen.runs)
    for order in orders:
        if not isinstance(order, Order) or order.node != seen.node.name:
            yield order
        elif (order.task, order.fence, order.rank) in listed:
            yield replace(order, incarnation=seen.node.incarnation)


def _orders_again(world: World, seen: NodeReport, now: Instant) -> Iterator[Order]:
    """Yield the stop, go and watch orders again, which may have been lost with the leader or the agent."""
    listed = set(seen.runs)
    for external in external_leases.holders_on(world, seen.node.name):
        for watch in external_leases.watch_orders(world, external, world.leases_of(external)):
            if (watch.task, watch.fence, watch.rank) not in listed:
                yield replace(watch, incarnation=seen.node.incarnation)
    for task, rank in _active_on(world, seen):
        if (task.id, task.fence, rank) not in listed:
            continue
        if task.state is TaskState.STOPPING:
            assert task.stop_deadline_at is not None
            left = Seconds(max(0.0, task.stop_deadline_at - now))
            notices = stop_orders(world, task, left)
            yield from (notice for notice in notices if notice.rank == rank)
        elif task.state is TaskState.RUNNING and isinstance(task.holder, Gang):
            yield from _gang_orders_again(world, task, task.holder.members[rank], now)


def _gang_orders_again(world: World, task: Task, member: Member, now: Instant) -> Iterator[Order]:
    if not member.takes_part:
        left = Seconds(max(0.0, (member.stop_deadline_at or now) - now))
        yield stop_order(world, task, member, left)
    elif not (member.has_ended or member.is_joining):
        yield from beginning_orders(world, task, member)


def _unwanted(world: World, seen: NodeReport) -> Iterator[Order]:
    """Yield the orders that kill runs of tasks which have ended, moved on or are unknown. The outcome of such
    runs is not accepted."""
    name, incarnation = seen.node.name, seen.node.incarnation
    wanted = {(task.id, task.fence, rank) for task, rank in _active_on(world, seen)}
    wanted |= {(external.id, external.fence, 0) for external in external_leases.holders_on(world, name)}
    for task, fence, rank in seen.runs:
        if (task, fence, rank) not in wanted:
            yield StopOrder(task, fence, name, incarnation, StopReason.CANCEL, Seconds(0.0), rank)
            yield ForgetOrder(task, fence, name, incarnation, rank)
