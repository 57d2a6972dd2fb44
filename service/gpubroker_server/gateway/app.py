"""The HTTP application: every resource with its parts."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from gpubroker_server.core.planning.fragmentation import (
    Fragmentation,
    ScatteredDemand,
    find_scattered_demand,
    fragmentation,
)
from gpubroker_server.gateway.admin import operations, secrets, tokens
from gpubroker_server.gateway.admin.operations import OperationParts
from gpubroker_server.gateway.admin.secrets import SecretParts
from gpubroker_server.gateway.admin.tokens import TokenParts
from gpubroker_server.gateway.arrays import routes as arrays
from gpubroker_server.gateway.arrays.routes import ArrayParts
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
from gpubroker_server.gateway.cluster.idle_templates import IdleTemplateParts
from gpubroker_server.gateway.cluster.parts import ClusterParts
from gpubroker_server.gateway.events import routes as events
from gpubroker_server.gateway.events.routes import EventParts
from gpubroker_server.gateway.explain import plan_routes
from gpubroker_server.gateway.explain import routes as explain
from gpubroker_server.gateway.explain.routes import ExplainParts
from gpubroker_server.gateway.http.identity import Callers
from gpubroker_server.gateway.http.leader_release import LeaderRelease
from gpubroker_server.gateway.http.middleware import RequestMiddleware
from gpubroker_server.gateway.http.openapi import complete
from gpubroker_server.gateway.http.times import Freshness
from gpubroker_server.gateway.http.waiters import LeaderRequests
from gpubroker_server.gateway.inferences import routes as inferences
from gpubroker_server.gateway.inferences.routes import InferenceParts
from gpubroker_server.gateway.leases import routes as leases
from gpubroker_server.gateway.leases.routes import LeaseParts
from gpubroker_server.gateway.models import measure
from gpubroker_server.gateway.models import routes as models
from gpubroker_server.gateway.models.models import ModelParts
from gpubroker_server.gateway.objects import routes as objects
from gpubroker_server.gateway.objects.routes import ObjectParts, ObjectStorage
from gpubroker_server.gateway.parts import AppParts
from gpubroker_server.gateway.status.pending import PendingReasons
from gpubroker_server.gateway.status.records import TaskRecords
from gpubroker_server.gateway.submission.submissions import Submissions
from gpubroker_server.gateway.tasks import batch, cancel_selected, estimates, logs, retry, stack
from gpubroker_server.gateway.tasks import routes as tasks
from gpubroker_server.gateway.tasks.logs import LogParts
from gpubroker_server.gateway.tasks.routes import TaskParts
from gpubroker_server.gateway.workers import routes as workers
from gpubroker_server.gateway.workers.call_routing import CallRouter
from gpubroker_server.gateway.workers.routes import WorkerSetParts
from gpubroker_server.telemetry.metrics import Sources, Telemetry

_RESOURCES = (
    *(
        batch,
        tasks,
        cancel_selected,
        retry,
        arrays,
        workers,
        logs,
        stack,
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
    ),
)
"""In the order in which paths are matched and documented; the busiest first."""

_NO_TRACES: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI would look for an OpenTelemetry provider at each request; our metrics are in `telemetry`."""


def create_app(parts: AppParts) -> FastAPI:
    """The application. It starts nothing: the composition root feeds `follower` and `waiters`."""
    app = _routed()
    world, clock, policy = parts.follower.world, parts.follower.clock, parts.rules.policy

    def fragmented() -> tuple[Fragmentation, ScatteredDemand | None]:
        state = world, policy, clock.now()
        return fragmentation(*state), find_scattered_demand(*state)

    sources = Sources(
        world, parts.follower.age_seconds, parts.leadership.leader, policy, clock.now, fragmented,
        parts.disk_full,
    )  # fmt: skip
    app.state.telemetry = telemetry = Telemetry(sources)
    app.state.parts = {type(of): of for of in _parts_of_resources(parts, telemetry)}
    # This middleware is the whole stack. FastAPI's own layers serve dependencies and uploads, which no route
    # has, and turn exceptions into answers, which the middleware does.
    app.middleware_stack = RequestMiddleware(
        app.router,
        parts=app.state.parts,
        callers=Callers(parts.tokens, parts.rules.allowed_hosts),
        ids=parts.ids,
        limits=parts.rules.limits,
        telemetry=telemetry,
        access_log=parts.access_log,
        disk_full=parts.disk_full,
    )
    return app


def _parts_of_resources(parts: AppParts, telemetry: Telemetry) -> Iterator[object]:
    """What the routes of each resource get."""
    store, blobs, waiters, leadership = parts.store, parts.blobs, parts.waiters, parts.leadership
    world, clock = parts.follower.world, parts.follower.clock
    rules, limits, servers = parts.rules, parts.rules.limits, tuple(parts.servers)
    freshness = Freshness(parts.follower, store, waiters, limits)
    pending = PendingReasons(world, rules.policy, leadership)
    records = TaskRecords(store, blobs, parts.follower, freshness, waiters, pending, limits.page_items)
    release = LeaderRelease(leadership.leader)
    submissions = Submissions(
        store, blobs, parts.secrets, world, parts.ids, clock, rules.defaults, parts.capacity,
        rules.permissions, records, limits.inline_bytes, limits.tenant_pending_tasks,
        limits.tenant_pending_bytes, release, limits.object_seconds, leadership.last_fleet,
    )  # fmt: skip
    requests = LeaderRequests(store, parts.ids, clock, waiters, limits.settle_seconds, release)
    storage = ObjectStorage(store, blobs, clock, limits)
    yield TaskParts(world, records, submissions, requests, limits.wait_seconds)
    yield ArrayParts(submissions, storage, requests)
    router = CallRouter(world, parts.worker_calls, waiters)
    yield WorkerSetParts(world, freshness, submissions, requests, router)
    yield LeaseParts(records, submissions, requests, limits.wait_seconds)
    outside = tuple(server for server in servers if not server.is_managed)
    yield InferenceParts(submissions, storage, parts.residencies, limits.wait_seconds, outside)
    yield ObjectParts(storage)
    yield ModelParts(world, freshness, store, rules.permissions, parts.residencies, servers)
    yield ExplainParts(
        world, clock, rules.policy, freshness, leadership, records, submissions, parts.tokens, rules.kinds
    )
    yield ClusterParts(
        world, clock, freshness, leadership, requests, parts.tokens, rules.policy, limits, rules.defaults,
        rules.kinds, servers, parts.residencies, parts.disk_full, parts.history, blobs,
    )  # fmt: skip
    yield IdleTemplateParts(store, clock, parts.tokens, leadership, submissions)
    yield EventParts(records)
    yield LogParts(records, parts.log_readers)
    yield TokenParts(store, clock, parts.tokens, rules.policy)
    yield SecretParts(store, parts.secrets)
    yield OperationParts(
        store, freshness, leadership, waiters, telemetry, parts.has_executor, parts.shutdown, parts.disk_full
    )


def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document, without any running part."""
    return _routed().openapi()


def _routed() -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_NO_TRACES)
    for module in _RESOURCES:
        # Flat rather than included: FastAPI matches the routes of an included router twice per request.
        app.router.routes.extend(module.resource.routes)
    app.openapi = lambda: complete(app)  # type: ignore[method-assign]  # the documented way to extend it
    return app
