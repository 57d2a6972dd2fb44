"""What past runs took."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.queries import EstimateQuery
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.tasks.estimates import EstimateList, estimate_views

router = APIRouter(route_class=DirectRoute, tags=["tasks"])


@router.get(
    "/estimates",
    operation_id="estimates_list",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=EstimateList,
    responses=problems("unauthenticated", "forbidden", "validation-failed"),
)
async def list_estimates(call: Call, query: Annotated[EstimateQuery, Query()]) -> Response:
    """List what your tenant's past runs took, by subject and kind of device.

    Runs are alike if their tasks have the same model type, else the same name, else the same entrypoint.
    """
    found = estimate_views(call.parts.world, call.identity.tenant, query.subject)
    view: EstimateList = {"items": list(found)}
    return answer(view)
