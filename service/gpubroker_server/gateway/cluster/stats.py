"""The route that reads totals: GPU memory and its fragmentation, tasks by state, executor, leader and model
servers."""

from collections import Counter

from fastapi import Response
from gpubroker.wire.stats import (
    ExecutorState,
    Fragmentation,
    GpuTotals,
    KindPieces,
    Leader,
    ModelCounts,
    ModelServer,
    NodeCounts,
    ProtocolState,
    Stats,
    TaskCounts,
    WorkerSetCounts,
)

from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.planning.fragmentation import FreeMemory, find_scattered_demand, fragmentation
from gpubroker_server.core.world.node_holders import still_on
from gpubroker_server.core.world.server_places import place_fault
from gpubroker_server.core.world.task_counts import finished_tasks, live_tasks, models_by_state
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.pauses import paused_queues
from gpubroker_server.gateway.cluster.quarantine import detection_view
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.task_view import forecasts_views
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.routing import Resource, answer
from gpubroker_server.ports.model_servers import KnownServer, ServerEndpoint

resource = Resource("cluster")


@resource.route("GET /stats", "stats_get", Scope.CLUSTER_READ, Stats, "follower-stale")
async def get_stats(parts: Parts) -> Response:
    """Read the totals: GPU memory and fragmentation, tasks by state, executor, leader and model servers."""
    moment, world = parts.freshness.moment(), parts.world
    executor, leader = parts.leadership.executor_status(), parts.leadership.leader()
    return answer(
        Stats(
            **moment,
            forecasts=forecasts_views(world),
            gpu=_gpu_totals(world),
            fragmentation=_fragmentation(parts),
            tasks=_task_counts(world),
            models=_model_counts(world),
            nodes=_node_counts(world),
            worker_sets=_worker_set_counts(world),
            executor=ExecutorState(
                state=str(executor.get("state", "unknown")),
                address=str(executor.get("address", "")),
                message=str(executor.get("message", "")),
            ),
            leader=Leader(None, None) if leader is None else Leader(leader.term, leader.holder),
            detection=detection_view(parts.leadership.paused()),
            paused=tuple(paused_queues(world)),
            disk_full=parts.disk_full(),
            model_servers=tuple(_model_server(parts, server) for server in parts.servers),
        )
    )


def _fragmentation(parts: Parts) -> Fragmentation:
    state = parts.world, parts.policy, parts.clock.now()
    pieces = fragmentation(*state)
    total = pieces.total
    return Fragmentation(
        free_mb=total.free_mb,
        stranded_mb=total.stranded_mb,
        share=_rounded(total),
        kinds=tuple(
            KindPieces(kind, free.free_mb, free.stranded_mb, _rounded(free))
            for kind, free in pieces.kinds.items()
        ),
        scattered=find_scattered_demand(*state),
    )


def _rounded(of: FreeMemory) -> float | None:
    return None if of.share is None else round(of.share, 4)


def _gpu_totals(world: World) -> GpuTotals:
    ledgers = list(world.ledgers.values())
    samples = [ledger.sample for ledger in ledgers if ledger.sample is not None and ledger.device.offers]
    measured = [sample.utilization for sample in samples if sample.utilization is not None]
    total_mb = sum(ledger.device.physical_mb for ledger in ledgers if ledger.device.offers)
    used_mb = sum(sample.used_mb for sample in samples)
    return GpuTotals(
        total_mb=total_mb,
        leased_mb=sum(ledger.leased_mb() for ledger in ledgers),
        used_mb=used_mb,
        free_mb=sum(ledger.offered_mb() for ledger in ledgers),
        utilization=round(used_mb / total_mb, 4) if samples and total_mb else None,
        compute_utilization=sum(measured) / len(measured) if measured else None,
    )


def _node_counts(world: World) -> NodeCounts:
    nodes = world.nodes.values()
    draining = (node for node in nodes if node.draining_since is not None)
    return NodeCounts(
        total=len(nodes),
        ready=sum(node.ready for node in nodes),
        cordoned=sum(node.cordoned for node in nodes),
        draining=sum(bool(still_on(world, node.name)) for node in draining),
    )


def _worker_set_counts(world: World) -> WorkerSetCounts:
    sets = world.worker_sets
    wanted = sum(workers.count for workers in sets.values())
    return WorkerSetCounts(len(sets), wanted, sets.running(world.tasks))


def _task_counts(world: World) -> TaskCounts:
    live, ended = Counter[TaskState](), finished_tasks(world)
    for (state, _band), count in live_tasks(world).items():
        live[state] += count
    return TaskCounts(
        pending=live[TaskState.PENDING],
        admitted=live[TaskState.ADMITTED],
        running=live[TaskState.RUNNING],
        stopping=live[TaskState.STOPPING],
        completed=ended[TaskState.SUCCEEDED],
        succeeded=ended[TaskState.SUCCEEDED],
        failed=ended[TaskState.FAILED],
        cancelled=ended[TaskState.CANCELLED],
        expired=ended[TaskState.EXPIRED],
    )


def _model_counts(world: World) -> ModelCounts:
    models, bases = models_by_state(world)
    return ModelCounts(
        waiting=models[TaskState.PENDING],
        loading=models[TaskState.ADMITTED],
        resident=models[TaskState.RUNNING],
        draining=models[TaskState.STOPPING],
        servers=bases,
    )


def _model_server(parts: Parts, server: KnownServer) -> ModelServer:
    protocols = {endpoint.protocol: _protocol(endpoint) for endpoint in server.endpoints}
    residency = None if parts.residencies is None else parts.residencies.at(server.name)
    return ModelServer(
        name=server.name,
        node=None if residency is None else residency.rules.node,
        node_fault="" if residency is None else place_fault(parts.world, residency.rules),
        http=protocols["http"],
        grpc=protocols.get("grpc"),
        requests_in_flight=server.in_flight,
    )


def _protocol(endpoint: ServerEndpoint) -> ProtocolState:
    return ProtocolState(not endpoint.breaker.is_open, endpoint.breaker.fault)
