"""The HTTP application, put together from its parts."""

from typing import Any

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from gpubroker_server.gateway.admin import health, metrics, shutdown, tokens
from gpubroker_server.gateway.cluster import (
    detection_routes,
    estimate_routes,
    gpus,
    nodes,
    policy,
    quarantine,
    stats,
    tenant_routes,
)
from gpubroker_server.gateway.events import routes as events
from gpubroker_server.gateway.explain import plan_routes, simulate
from gpubroker_server.gateway.explain import routes as explain
from gpubroker_server.gateway.http.middleware import Door
from gpubroker_server.gateway.http.openapi import complete
from gpubroker_server.gateway.inferences import routes as inferences
from gpubroker_server.gateway.leases import routes as leases
from gpubroker_server.gateway.models import routes as models
from gpubroker_server.gateway.objects import routes as objects
from gpubroker_server.gateway.parts import GatewayParts
from gpubroker_server.gateway.tasks import batch_routes, outcome_routes
from gpubroker_server.gateway.tasks import routes as tasks
from gpubroker_server.telemetry.metrics import Sources, Telemetry

_RESOURCES = (
    batch_routes,
    tasks,
    outcome_routes,
    inferences,
    objects,
    leases,
    explain,
    simulate,
    plan_routes,
    estimate_routes,
    events,
    gpus,
    nodes,
    models,
    quarantine,
    detection_routes,
    stats,
    policy,
    tenant_routes,
    tokens,
    health,
    metrics,
    shutdown,
)
"""In the order in which paths are matched and documented; the busiest first."""

_NO_TRACES: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI would look for an OpenTelemetry provider at each request; what we measure is in `telemetry`."""


def create_app(parts: GatewayParts) -> FastAPI:
    """The application. It starts nothing: the composition root feeds `parts.world` and `parts.waiters`."""
    app = _routed()
    world, now = parts.world, parts.clock.now
    sources = Sources(world, parts.age_seconds, parts.standing, parts.policy, now, parts.pieces, parts.paused)
    telemetry = Telemetry(sources)
    app.state.telemetry = telemetry
    # The door is the whole stack. FastAPI's own layers serve dependencies and uploads, which no route has,
    # and turn exceptions into answers, which the door does.
    app.middleware_stack = Door(app.router, parts=parts, telemetry=telemetry)
    return app


def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document, without any running part."""
    return _routed().openapi()


def _routed() -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_NO_TRACES)
    for resource in _RESOURCES:
        # Flat rather than included: FastAPI matches the routes of an included router twice per request.
        app.router.routes.extend(resource.router.routes)
    app.openapi = lambda: complete(app)  # type: ignore[method-assign]  # the documented way to extend it
    return app
