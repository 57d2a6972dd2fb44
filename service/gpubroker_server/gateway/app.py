"""The HTTP application, with all resources and the parts that their routes need."""

from typing import Any

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from gpubroker.wire.stats import Scattered
from starlette.requests import Request
from starlette.responses import JSONResponse

from gpubroker_server.core.planning.fragmentation import (
    Fragmentation,
    find_scattered_demand,
    fragmentation,
)
from gpubroker_server.gateway.admin import operations, problem_pages, secrets, tokens
from gpubroker_server.gateway.arrays import routes as arrays
from gpubroker_server.gateway.arrays.submit import GivenObjects
from gpubroker_server.gateway.cluster import (
    autoscaling,
    devices,
    diagnostics,
    disks,
    idle_templates,
    nodes,
    pauses,
    policy,
    quarantine,
    stats,
    targets,
    work_streams,
)
from gpubroker_server.gateway.events import routes as events
from gpubroker_server.gateway.explain import plan_routes
from gpubroker_server.gateway.explain import routes as explain
from gpubroker_server.gateway.hot import batch, outcome, submit, worker_calls
from gpubroker_server.gateway.inferences import routes as inferences
from gpubroker_server.gateway.inferences.routes import NamedObjects
from gpubroker_server.gateway.leases import routes as leases
from gpubroker_server.gateway.models import measure
from gpubroker_server.gateway.models import routes as models
from gpubroker_server.gateway.models.models import ModelParts
from gpubroker_server.gateway.objects import routes as objects
from gpubroker_server.gateway.objects.routes import ObjectStorage
from gpubroker_server.gateway.parts import AppParts
from gpubroker_server.gateway.tasks import cancel_selected, estimates, logs, outputs, retry, stack
from gpubroker_server.gateway.tasks import routes as tasks
from gpubroker_server.gateway.workers import routes as workers
from gpubroker_server.gateway.workers.call_routing import CallRouter
from gpubroker_server.http.identity import Callers
from gpubroker_server.http.middleware import RequestMiddleware
from gpubroker_server.http.openapi import complete
from gpubroker_server.http.proxies import TrustedProxies, current_prefix
from gpubroker_server.telemetry.metrics import Telemetry
from gpubroker_server.telemetry.table import Sources

_RESOURCES = (
    *(
        batch,
        submit,
        tasks,
        outcome,
        cancel_selected,
        retry,
        arrays,
        workers,
        worker_calls,
        logs,
        stack,
        outputs,
        inferences,
        objects,
        leases,
        explain,
        plan_routes,
        estimates,
        events,
    ),
    *(
        devices,
        nodes,
        disks,
        targets,
        diagnostics,
        idle_templates,
        models,
        measure,
        quarantine,
        stats,
        autoscaling,
        policy,
        pauses,
        work_streams,
        tokens,
        secrets,
        operations,
        problem_pages,
    ),
)
"""The resources in the order in which paths are matched and documented, the busiest resources first."""

_NO_TRACES: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""Switches FastAPI's telemetry off, which would look for an OpenTelemetry provider at each request. The
metrics of the service are in `gpubroker_server.telemetry`."""


def create_app(parts: AppParts) -> FastAPI:
    """Return the application. It starts nothing: the composition root feeds `follower` and `waiters`."""
    app = _routed()
    world, clock, policy = parts.world, parts.clock, parts.policy

    def fragmented() -> tuple[Fragmentation, Scattered | None]:
        state = world, policy, clock.now()
        return fragmentation(*state), find_scattered_demand(*state)

    sources = Sources(
        world, parts.follower.age_seconds, parts.leadership.leader, policy, clock.now, fragmented,
        parts.disk_full, lambda: parts.database_log.seen, lambda: len(parts.subscriptions), parts.extensions,
    )  # fmt: skip
    app.state.telemetry = telemetry = Telemetry(sources)
    storage = ObjectStorage(parts.store, parts.blobs, clock, parts.limits)
    app.state.parts = {
        AppParts: parts,
        Telemetry: telemetry,
        ModelParts: ModelParts(parts),
        CallRouter: CallRouter(world, parts.worker_calls, parts.waiters),
        **dict.fromkeys((ObjectStorage, GivenObjects, NamedObjects), storage),
    }
    # This middleware is the whole stack. FastAPI's own layers serve dependencies and uploads, which no route
    # has, and turn exceptions into answers, which the middleware does.
    app.middleware_stack = RequestMiddleware(
        app.router,
        parts=app.state.parts,
        callers=Callers(parts.tokens, parts.rules.allowed_hosts),
        ids=parts.ids,
        limits=parts.limits,
        telemetry=telemetry,
        access_log=parts.access_log,
        disk_full=parts.disk_full,
        proxies=TrustedProxies(parts.rules.trusted_proxies, parts.rules.root_path),
    )
    return app


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. No part of the service needs to run for it."""
    return _routed().openapi()


def _routed() -> FastAPI:
    app = FastAPI(
        openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_NO_TRACES
    )

    async def document(_request: Request) -> JSONResponse:
        """Answer with the document, in which `servers` has the path prefix of a proxy, if there is one."""
        schema: dict[str, Any] = app.openapi()
        prefix = current_prefix.get()
        return JSONResponse({**schema, "servers": [{"url": prefix}]} if prefix else schema)

    app.add_route("/openapi.json", document, include_in_schema=False)
    for module in _RESOURCES:
        # The routes are added singly, because FastAPI matches the routes of an included router twice.
        app.router.routes.extend(module.resource.routes)
    forms = [form for module in _RESOURCES for form in module.resource.forms]
    app.openapi = lambda: complete(app, forms)  # type: ignore[method-assign]  # the documented way to extend it
    return app
