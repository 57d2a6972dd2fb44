"""The operator's choices that a submit meets."""

from fastapi import APIRouter, Response

from gpubroker_server.gateway.cluster.policy_view import PolicyView, policy_view
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems

router = APIRouter(route_class=DirectRoute, tags=["cluster"])


@router.get(
    "/policy",
    operation_id="policy_get",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=PolicyView,
    responses=problems("unauthenticated", "forbidden"),
)
async def get_policy(call: Call) -> Response:
    """Read what the operator has chosen: bands, kinds, pools, limits, the most per task, and defaults.

    A token without the scope cluster:read sees of the tenants' rules its own tenant's only.
    """
    return answer(policy_view(call.parts, call.identity))
