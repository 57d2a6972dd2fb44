"""Totals on one page."""

from fastapi import APIRouter, Response

from gpubroker_server.gateway.cluster.detection import detection_view
from gpubroker_server.gateway.cluster.devices import (
    as_of,
    forecasts_views,
    gpu_totals,
    leader_view,
    task_counts,
)
from gpubroker_server.gateway.cluster.fragmentation import fragmentation_view
from gpubroker_server.gateway.cluster.model_servers import model_server_views
from gpubroker_server.gateway.cluster.stats_view import Stats
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems

router = APIRouter(route_class=DirectRoute, tags=["cluster"])


@router.get(
    "/stats",
    operation_id="stats_get",
    dependencies=[needs(Scope.CLUSTER_READ)],
    response_model=Stats,
    responses=problems("unauthenticated", "forbidden", "follower-stale"),
)
async def get_stats(call: Call) -> Response:
    """Read the totals: GPU memory and its pieces, tasks by state, and how executor and leader are."""
    parts = call.parts
    executor = parts.executor_status()
    view: Stats = {
        **as_of(parts),
        "gpu": gpu_totals(parts.world),
        "fragmentation": fragmentation_view(*parts.pieces()),
        "forecasts": forecasts_views(parts.world),
        "tasks": task_counts(parts.world),
        "executor": {
            "state": str(executor.get("state", "unknown")),
            "address": str(executor.get("address", "")),
            "message": str(executor.get("message", "")),
        },
        "leader": leader_view(parts.leader()),
        "detection": detection_view(parts.paused()),
        "model_servers": model_server_views(parts.servers, parts.residencies, parts.world),
    }
    return answer(view)
