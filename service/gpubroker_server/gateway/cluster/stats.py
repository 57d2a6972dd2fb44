"""Totals: GPU memory and its fragmentation, tasks by state, executor, leader and model servers."""

from collections import Counter
from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.planning.draining import still_on
from gpubroker_server.core.planning.fragmentation import (
    FreeMemory,
    ScatteredDemand,
    find_scattered_demand,
    fragmentation,
)
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.pauses import PausedView, paused_views
from gpubroker_server.gateway.cluster.quarantine import DetectionView, detection_view
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Resource, answer, view_of
from gpubroker_server.gateway.http.times import AsOf
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.proxy.residency.server_rules import place_fault
from gpubroker_server.gateway.proxy.servers import Endpoint, Server
from gpubroker_server.gateway.status.task_view import forecasts_views
from gpubroker_server.gateway.status.views import ForecastsView


class KindPiecesView(TypedDict):
    kind: str
    free_mb: int
    stranded_mb: int
    share: float | None


class ScatteredView(TypedDict):
    """What most waiting GPU tasks ask for is free in total, but on no GPU in one piece."""

    gpus: int
    gpu_mb: Annotated[int, Field(description="Needed on each, with the cost of a process.")]
    waiting: Annotated[int, Field(description="How many tasks ask for exactly this.")]
    free_mb: Annotated[int, Field(description="On all GPUs that could host it.")]
    largest_mb: Annotated[int, Field(description="The largest piece of that.")]


class FragmentationView(TypedDict):
    """Of the GPUs that take tasks now: what is free, and what of that the usual demands cannot use."""

    free_mb: int
    stranded_mb: Annotated[int, Field(description="Each usual demand counts by its share of recent submits.")]
    share: Annotated[float | None, Field(description="Of what is free, 0 to 1; null if nothing is.")]
    kinds: list[KindPiecesView]
    scattered: ScatteredView | None


def _fragmentation_view(parts: Parts) -> FragmentationView:
    state = parts.world, parts.policy, parts.clock.now()
    found, spread = fragmentation(*state), find_scattered_demand(*state)
    total = found.total
    return {
        "free_mb": total.free_mb,
        "stranded_mb": total.stranded_mb,
        "share": _rounded(total),
        "kinds": [
            {"kind": kind, "free_mb": of.free_mb, "stranded_mb": of.stranded_mb, "share": _rounded(of)}
            for kind, of in found.kinds.items()
        ],
        "scattered": None if spread is None else _scattered_view(spread),
    }


def _rounded(of: FreeMemory) -> float | None:
    return None if of.share is None else round(of.share, 4)


def _scattered_view(scattered: ScatteredDemand) -> ScatteredView:
    gpus, gpu_mb = scattered.demand.gpus, scattered.need_mb
    return view_of(ScatteredView, scattered, gpus=gpus, gpu_mb=gpu_mb)


resource = Resource("cluster")


class GpuTotals(TypedDict):
    total_mb: int
    leased_mb: int
    used_mb: int
    free_mb: int
    utilization: Annotated[float | None, Field(description="Mean over the measured devices, 0 to 1.")]


class TaskCounts(TypedDict):
    """The last four count all tasks that ever ended so, also those that are no longer kept."""

    pending: int
    admitted: int
    running: int
    stopping: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int


class NodeCounts(TypedDict):
    total: int
    ready: int
    cordoned: Annotated[int, Field(description="With those that are drained.")]
    draining: Annotated[int, Field(description="Of which something is left.")]


class WorkerSetCounts(TypedDict):
    """Of the worker sets that are not over."""

    sets: int
    wanted: Annotated[int, Field(description="Workers, in all sets together.")]
    running: int


class ExecutorView(TypedDict):
    state: str
    address: str
    message: str


class LeaderView(TypedDict):
    """The leader, in this process or in another one."""

    term: Annotated[int | None, Field(description="Null if no leader is known.")]
    holder: Annotated[str | None, Field(description="host:process; null if no leader is known.")]


class WayView(TypedDict):
    up: Annotated[bool, Field(description="Requests are sent to it; false after several failures in a row.")]
    fault: Annotated[str, Field(description="How the last request or check failed; empty if it did not.")]


class ModelServerView(TypedDict):
    """A model server, as the gateway sees it that answers."""

    name: str
    node: Annotated[str | None, Field(description="Null if its models are not in the ledger.")]
    node_fault: Annotated[str, Field(description="Why its node or GPUs are not there; empty if they are.")]
    http: WayView
    grpc: Annotated[WayView | None, Field(description="Null where gRPC is not used.")]
    requests_in_flight: Annotated[int, Field(description="Sent to it, and not yet answered.")]


class Stats(AsOf):
    forecasts: list[ForecastsView]
    gpu: GpuTotals
    fragmentation: FragmentationView
    tasks: TaskCounts
    nodes: NodeCounts
    worker_sets: WorkerSetCounts
    executor: ExecutorView
    leader: LeaderView
    detection: DetectionView
    paused: Annotated[list[PausedView], Field(description="Queues that start nothing.")]
    disk_full: Annotated[
        str, Field(description="Of the process that answers: which disk, and why; or empty.")
    ]
    model_servers: list[ModelServerView]


@resource.route("GET /stats", "stats_get", Scope.CLUSTER_READ, Stats, "follower-stale")
async def get_stats(parts: Parts) -> Response:
    """Read the totals: GPU memory and fragmentation, tasks by state, executor, leader and model servers."""
    executor, leader = parts.leadership.executor_status(), parts.leadership.leader()
    view: Stats = {
        **parts.freshness.as_of(),
        "gpu": _gpu_totals(parts.world),
        "fragmentation": _fragmentation_view(parts),
        "forecasts": forecasts_views(parts.world),
        "tasks": _task_counts(parts.world),
        "nodes": _node_counts(parts.world),
        "worker_sets": _worker_set_counts(parts.world),
        "executor": {
            "state": str(executor.get("state", "unknown")),
            "address": str(executor.get("address", "")),
            "message": str(executor.get("message", "")),
        },
        "leader": {
            "term": None if leader is None else leader.term,
            "holder": None if leader is None else leader.holder,
        },
        "detection": detection_view(parts.leadership.paused()),
        "paused": paused_views(parts.world),
        "disk_full": parts.disk_full(),
        "model_servers": [_server_view(parts, server) for server in parts.servers],
    }
    return answer(view)


def _gpu_totals(world: World) -> GpuTotals:
    ledgers = list(world.ledgers.values())
    samples = [ledger.sample for ledger in ledgers if ledger.sample is not None and ledger.device.offers]
    measured = [sample.utilization for sample in samples if sample.utilization is not None]
    return {
        "total_mb": sum(ledger.device.physical_mb for ledger in ledgers if ledger.device.offers),
        "leased_mb": sum(ledger.leased_mb() for ledger in ledgers),
        "used_mb": sum(sample.used_mb for sample in samples),
        "free_mb": sum(max(0, ledger.free_mb()) for ledger in ledgers),
        "utilization": sum(measured) / len(measured) if measured else None,
    }


def _node_counts(world: World) -> NodeCounts:
    nodes = world.nodes.values()
    return {
        "total": len(nodes),
        "ready": sum(node.ready for node in nodes),
        "cordoned": sum(node.cordoned for node in nodes),
        "draining": sum(
            node.draining_since is not None and bool(still_on(world, node.name)) for node in nodes
        ),
    }


def _worker_set_counts(world: World) -> WorkerSetCounts:
    sets = world.worker_sets
    wanted = sum(workers.count for workers in sets.values())
    return {"sets": len(sets), "wanted": wanted, "running": sets.running(world.tasks)}


def _task_counts(world: World) -> TaskCounts:
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


def _server_view(parts: Parts, server: Server) -> ModelServerView:
    residency = None if parts.residencies is None else parts.residencies.at(server.name)
    return {
        "name": server.name,
        "node": None if residency is None else residency.rules.node,
        "node_fault": "" if residency is None else place_fault(parts.world, residency.rules),
        "http": _way_view(server.http),
        "grpc": None if server.calls is None else _way_view(server.grpc),
        "requests_in_flight": server.in_flight,
    }


def _way_view(way: Endpoint) -> WayView:
    return {"up": not way.breaker.is_open, "fault": way.breaker.fault}
