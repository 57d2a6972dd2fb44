"""What Prometheus scrapes."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, DirectRoute, needs, problems
from gpubroker_server.ports.store import StoreUnavailable
from gpubroker_server.telemetry.metrics import Telemetry

router = APIRouter(route_class=DirectRoute, tags=["operations"])


@router.get(
    "/metrics",
    operation_id="metrics_get",
    dependencies=[needs(Scope.METRICS_READ)],
    responses={
        200: {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **problems("unauthenticated", "forbidden"),
    },
)
async def get_metrics(call: Call) -> Response:
    """Read all metrics in Prometheus's text format. They are listed in docs/reference/metrics.md."""
    telemetry: Telemetry = call.app.state.telemetry
    try:
        telemetry.note_held_back(await call.parts.store.held_back())
    except StoreUnavailable:
        telemetry.note_held_back(None)
    return Response(generate_latest(telemetry.registry), media_type=CONTENT_TYPE_LATEST)
