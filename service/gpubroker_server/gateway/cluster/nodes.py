"""Nodes: the machines, and what their runs take beside GPUs."""

from fastapi import APIRouter, Response

from gpubroker_server.gateway.cluster.devices import as_of, node_views
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.views import NodeList

router = APIRouter(route_class=DirectRoute, tags=["cluster"])


@router.get(
    "/nodes",
    operation_id="nodes_list",
    dependencies=[needs(Scope.CLUSTER_READ)],
    response_model=NodeList,
    responses=problems("unauthenticated", "forbidden", "follower-stale"),
)
async def list_nodes(call: Call) -> Response:
    """List all nodes with their CPU, host memory and run slots, in all and in use, and their agents."""
    parts = call.parts
    agents, leader = parts.executor_status().get("agents", {}), parts.leader()
    silent = {} if leader is None else leader.silent
    view: NodeList = {**as_of(parts), "items": node_views(parts.world, agents, silent)}
    return answer(view)
