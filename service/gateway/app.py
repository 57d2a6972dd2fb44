"""The HTTP application, put together from its parts."""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException

from service.gateway.capacity import Capacity
from service.gateway.document import complete
from service.gateway.door import Door
from service.gateway.parts import GatewayParts
from service.gateway.problems import Problem, problem_response
from service.gateway.routes import (
    events,
    explain,
    gpus,
    health,
    metrics,
    nodes,
    outcomes,
    shutdown,
    stats,
    tasks,
    tokens,
)
from service.telemetry import Sources, Telemetry

_RESOURCES = (tasks, outcomes, explain, events, gpus, nodes, stats, tokens, health, metrics, shutdown)
"""In the order in which paths are matched and documented; the busiest first."""

_NO_TRACES: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI would look for an OpenTelemetry provider at each request; what we measure is in `telemetry`."""


def create_app(parts: GatewayParts) -> FastAPI:
    """The application. It starts nothing: the composition root feeds `parts.world` and `parts.waiters`."""
    app = _routed()
    telemetry = Telemetry(Sources(parts.world, parts.age_seconds, parts.term, parts.store_numbers))
    app.state.capacity = Capacity(parts.world, parts.policy)
    app.state.telemetry = telemetry
    app.add_middleware(Door, parts=parts, telemetry=telemetry)
    app.add_exception_handler(HTTPException, _on_no_route)
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


async def _on_no_route(request: Request, _fault: Exception) -> Response:
    """404 and 405 of the router, which knows only the first route of a path that has several."""
    path = request.scope["path"]
    routes = [
        route for route in request.app.routes if isinstance(route, APIRoute) and route.path_regex.match(path)
    ]
    known = sorted({method for route in routes for method in route.methods or ()})
    if known:
        allowed = ", ".join(known)
        problem = Problem(
            "method-not-allowed",
            f"{request.method} is not known at {path}; known are {allowed}",
            headers={"Allow": allowed},
        )
    else:
        problem = Problem("not-found", f"there is nothing at {path[:200]}; /openapi.json lists all paths")
    return problem_response(problem, request.scope)
