"""The HTTP application, put together from its parts."""

from typing import Any

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from service.gateway.document import complete
from service.gateway.door import Door
from service.gateway.parts import GatewayParts
from service.gateway.routes import (
    batch,
    detection,
    estimates,
    events,
    explain,
    gpus,
    health,
    inferences,
    leases,
    metrics,
    models,
    nodes,
    objects,
    outcomes,
    plan,
    policy,
    quarantine,
    shutdown,
    simulate,
    stats,
    tasks,
    tenants,
    tokens,
)
from service.telemetry import Sources, Telemetry

_RESOURCES = (
    batch,
    tasks,
    outcomes,
    inferences,
    objects,
    leases,
    explain,
    simulate,
    plan,
    estimates,
    events,
    gpus,
    nodes,
    models,
    quarantine,
    detection,
    stats,
    policy,
    tenants,
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
