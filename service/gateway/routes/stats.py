"""Totals on one page."""

from fastapi import APIRouter, Response

from service.gateway.direct import Call, DirectRoute, answer, needs, problems
from service.gateway.identity import Scope
from service.gateway.overview import as_of, gpu_totals, task_counts
from service.gateway.views import Stats

router = APIRouter(route_class=DirectRoute, tags=["cluster"])


@router.get(
    "/stats",
    operation_id="stats_get",
    dependencies=[needs(Scope.CLUSTER_READ)],
    response_model=Stats,
    responses=problems("unauthenticated", "forbidden", "follower-stale"),
)
async def get_stats(call: Call) -> Response:
    """Read the totals: GPU memory, tasks by state, and how the executor and the leader are."""
    parts = call.parts
    executor = parts.executor_status()
    view: Stats = {
        **as_of(parts),
        "gpu": gpu_totals(parts.world),
        "tasks": task_counts(parts.world),
        "executor": {
            "state": str(executor.get("state", "unknown")),
            "address": str(executor.get("address", "")),
            "message": str(executor.get("message", "")),
        },
        "leader": {"term": parts.term()},
    }
    return answer(view)
