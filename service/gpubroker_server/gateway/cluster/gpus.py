"""Devices: who holds how much of which."""

from fastapi import APIRouter, Response

from gpubroker_server.gateway.cluster.devices import as_of, gpu_views
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.views import GpuList

router = APIRouter(route_class=DirectRoute, tags=["cluster"])


@router.get(
    "/gpus",
    operation_id="gpus_list",
    dependencies=[needs(Scope.CLUSTER_READ)],
    response_model=GpuList,
    responses=problems("unauthenticated", "forbidden", "follower-stale"),
)
async def list_gpus(call: Call) -> Response:
    """List all devices: what is leased, used and unaccounted for, by whom, and what is free."""
    view: GpuList = {**as_of(call.parts), "items": gpu_views(call.parts, call.identity)}
    return answer(view)
