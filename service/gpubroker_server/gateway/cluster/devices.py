"""The cluster as the World shows it: devices, nodes, totals. Each answer says how old it is."""

from collections import Counter
from collections.abc import Mapping

from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.estimates import What
from gpubroker_server.core.domain.lease import Lease
from gpubroker_server.core.domain.node_capacity import NodeUse
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.planning.backfill import Basis
from gpubroker_server.core.planning.forecast_accuracy import topic_of
from gpubroker_server.core.planning.fragmentation import Sum
from gpubroker_server.core.world.ledger import Book, Holding
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.parts import GatewayParts
from gpubroker_server.gateway.status.quarantine import awaited_by_lease
from gpubroker_server.gateway.status.quarantine_views import AwaitedView
from gpubroker_server.gateway.status.task_view import rfc3339, rfc3339_or_none
from gpubroker_server.gateway.status.views import (
    AgentView,
    AsOf,
    ForecastsView,
    GpuTotals,
    GpuView,
    HolderView,
    LeaderView,
    NodeView,
    PledgeView,
    TaskCounts,
)
from gpubroker_server.ports.last_values import LeaderSeen


def as_of(parts: GatewayParts) -> AsOf:
    """Raises Problem if the World is too old to be shown as the truth."""
    age_seconds = parts.age_seconds()
    if age_seconds > parts.limits.stale_seconds:
        raise Problem(
            "follower-stale",
            parts.why_stale()
            or f"the overview is {age_seconds:.0f} s old, older than {parts.limits.stale_seconds:.0f} s; "
            "single tasks can still be read, and /readyz says which part is away",
        )
    world = parts.world
    return {"as_of": rfc3339(world.as_of), "age_seconds": round(age_seconds, 3), "position": world.position}


def gpu_views(parts: GatewayParts, viewer: Identity) -> list[GpuView]:
    found = parts.pieces()[0].devices
    nothing = Sum()
    awaited = awaited_by_lease(parts.world)
    return [
        _gpu_view(parts, parts.world.books[key], found.get(key, nothing).stranded_mb, viewer, awaited)
        for key in sorted(parts.world.books)
    ]


def _gpu_view(
    parts: GatewayParts, book: Book, stranded_mb: int, viewer: Identity, awaited: Mapping[str, AwaitedView]
) -> GpuView:
    device = book.device
    holdings = [book.holdings[key] for key in sorted(book.holdings)]
    return {
        "key": device.key,
        "uuid": device.uuid,
        "node": device.node,
        "kind": device.kind,
        "index": device.index,
        "simulated": device.simulated,
        "parent": device.parent,
        "split": device.split,
        "power": device.power,
        "context_mb": device.context_mb,
        "present": device.present,
        "physical_mb": device.physical_mb,
        "reserve_mb": device.reserve_mb,
        "leased_mb": book.leased_mb(),
        "used_mb": None if book.sample is None else book.sample.used_mb,
        "foreign_mb": book.foreign_mb,
        "unaccounted_mb": book.unexplained_mb,
        "pledged_mb": sum(pledge.mb for pledge in book.pledges.values()),
        "free_mb": max(0, book.free_mb()),
        "stranded_mb": stranded_mb,
        "utilization": None if book.sample is None else book.sample.utilization,
        "sampled_at": rfc3339_or_none(book.sampled_at),
        "stale": book.is_stale(parts.clock.now(), parts.policy.sample_period_seconds),
        "holders": [_holder_view(parts.world, holding, viewer, awaited) for holding in holdings],
        "pledges": _pledge_views(book, viewer),
    }


def priority_of(world: World, lease: Lease) -> int:
    """By now; the lease itself keeps that of its admission."""
    holder = world.holder(lease.holder, lease.fence)
    return lease.priority if holder is None else holder.priority


def _holder_view(
    world: World, holding: Holding, viewer: Identity, awaited: Mapping[str, AwaitedView]
) -> HolderView:
    lease = holding.lease
    task = world.tasks.get(TaskId(lease.holder))
    known, priority = sees(viewer, lease.tenant), priority_of(world, lease)
    return {
        "kind": lease.holder_kind.value,
        "id": lease.holder if known else None,
        "name": task.name if task is not None and known else None,
        "tenant": lease.tenant,
        "priority": priority,
        "band": band_of(priority)[0],
        "gpu_mb": lease.mb,
        "context_mb": lease.context_mb,
        "measured_mb": holding.measured_mb,
        "overused_mb": lease.overused_mb or None,
        "state": lease.state.value,
        "since": rfc3339(lease.since),
        "stopping": holding.stopping,
        "quarantine": awaited.get(lease.key),
    }


def _pledge_views(book: Book, viewer: Identity) -> list[PledgeView]:
    return [
        {
            "task": pledge.preemptor if sees(viewer, pledge.tenant) else None,
            "gpu_mb": pledge.mb,
            "arrived_mb": book.kept_free_mb(pledge),
            "priority": pledge.priority,
            "deadline_at": rfc3339(pledge.deadline_at),
        }
        for _preemptor, pledge in sorted(book.pledges.items())
    ]


def sees(viewer: Identity, tenant: str) -> bool:
    """Whether this token may know by name what belongs to this tenant."""
    return viewer.tenant == tenant or viewer.may(Scope.ADMIN)


def node_views(
    world: World, agents: Mapping[str, AgentView], silent: Mapping[NodeName, Instant]
) -> list[NodeView]:
    """`agents`: those that answer the leader, by node. `silent`: those it has not heard for a while."""
    nodes = (world.nodes[name] for name in sorted(world.nodes))
    return [_node_view(world, node, agents.get(node.name), silent.get(node.name)) for node in nodes]


def _node_view(world: World, node: Node, agent: AgentView | None, silent_since: Instant | None) -> NodeView:
    use = world.use.get(node.name, NodeUse())
    return {
        "name": node.name,
        "ready": node.ready,
        "silent_since": rfc3339_or_none(silent_since),
        "cordoned": node.cordoned,
        "incarnation": node.incarnation,
        "cpu": {"total": node.cpu, "used": use.cpu},
        "memory_mb": {"total": node.memory_mb, "used": use.memory_mb},
        "runs": {"limit": node.max_runs, "used": use.runs},
        "gpus": len(world.by_node.get(node.name, ())),
        "labels": dict(node.labels),
        "agent": agent,
    }


def gpu_totals(world: World) -> GpuTotals:
    books = list(world.books.values())
    samples = [book.sample for book in books if book.sample is not None and book.device.offers]
    measured = [sample.utilization for sample in samples if sample.utilization is not None]
    return {
        "total_mb": sum(book.device.physical_mb for book in books if book.device.offers),
        "leased_mb": sum(book.leased_mb() for book in books),
        "used_mb": sum(sample.used_mb for sample in samples),
        "free_mb": sum(max(0, book.free_mb()) for book in books),
        "utilization": sum(measured) / len(measured) if measured else None,
    }


def task_counts(world: World) -> TaskCounts:
    active = Counter(world.tasks[task].state for task in world.active)
    ended: Counter[TaskState] = Counter()
    for (_tenant, state), count in world.finished.items():
        ended[state] += count
    return {
        "pending": len(world.queue),
        "admitted": active[TaskState.ADMITTED],
        "running": active[TaskState.RUNNING],
        "stopping": active[TaskState.STOPPING],
        "succeeded": ended[TaskState.SUCCEEDED],
        "failed": ended[TaskState.FAILED],
        "cancelled": ended[TaskState.CANCELLED],
        "expired": ended[TaskState.EXPIRED],
    }


def leader_view(leader: LeaderSeen | None) -> LeaderView:
    return {
        "term": None if leader is None else leader.term,
        "holder": None if leader is None else leader.holder,
    }


def forecasts_views(world: World) -> list[ForecastsView]:
    """Of each basis of which anything is known."""
    views: list[ForecastsView] = []
    for basis in Basis:
        errors = world.learned.sketch(topic_of(basis, What.START_ERROR))
        held = world.learned.sketch(topic_of(basis, What.START_SHARE)).share_until(1.0)
        if errors.n and held is not None:
            views.append(
                {
                    "basis": basis.value,
                    "n": errors.n,
                    "median_error_seconds": round(errors.quantile(0.5) or 0.0, 3),
                    "within_p90": round(held, 3),
                }
            )
    return views
