"""Who shares the cluster."""

from fastapi import APIRouter, Response

from gpubroker_server.gateway.cluster.devices import as_of
from gpubroker_server.gateway.cluster.tenants import TenantList, tenant_views
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems

router = APIRouter(route_class=DirectRoute, tags=["cluster"])


@router.get(
    "/tenants",
    operation_id="tenants_list",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=TenantList,
    responses=problems("unauthenticated", "forbidden", "follower-stale"),
)
async def list_tenants(call: Call) -> Response:
    """List tenants with quota, holding, usage and fair share.

    A token without the scope cluster:read sees its own tenant only.
    """
    parts = call.parts
    items = tenant_views(parts.world, parts.policy, parts.clock.now(), call.identity)
    view: TenantList = {**as_of(parts), "items": list(items)}
    return answer(view)
