"""The orderly end of the service, on request."""

import contextlib

from fastapi import APIRouter, Response

from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.views import Stopping
from gpubroker_server.gateway.submission.task_body import ShutDown
from gpubroker_server.ports.store import StoreUnavailable

router = APIRouter(route_class=DirectRoute, tags=["operations"])


@router.post(
    "/shutdown",
    operation_id="service_shutdown",
    dependencies=[needs(Scope.ADMIN)],
    status_code=202,
    response_model=Stopping,
    responses=problems("unauthenticated", "forbidden", "validation-failed"),
)
async def shut_down(call: Call, body: ShutDown = ShutDown()) -> Response:  # noqa: B008  # frozen
    """Stop this process. Tasks go on, unless the local cluster is to stop as well; one that only speaks HTTP
    has none, and says so."""
    stop_cluster = body.stop_cluster and call.parts.has_executor
    await _note(call, "everything" if stop_cluster else "service")
    call.parts.shutdown(stop_cluster)
    view: Stopping = {"stopping": True, "stop_cluster": stop_cluster}
    return answer(view, 202)


async def _note(call: Call, subject: str) -> None:
    """A database that is away must not keep the service from stopping."""
    who = call.identity
    with contextlib.suppress(StoreUnavailable):
        await call.parts.store.audit(by=who.name, tenant=who.tenant, action="shutdown", subject=subject)
