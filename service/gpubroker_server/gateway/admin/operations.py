"""Routes for operators of the service: health, readiness, metrics and shutdown."""

import asyncio
import contextlib
from typing import Annotated

from fastapi import Response
from gpubroker.wire.administration import Health, Readiness, Stopping
from pydantic import Field

from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.bodies import Body, JsonBody
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.routing import Caller, Resource, answer, app_part
from gpubroker_server.ports.store import StoreExhausted, StoreUnavailable
from gpubroker_server.telemetry.exposition import CONTENT_TYPE, text_of
from gpubroker_server.telemetry.metrics import Telemetry

resource = Resource("operations")

OK = "ok"
_READY = frozenset({"connected", "standby"})
"""The states of an executor that takes orders, or that will take orders as soon as this process leads."""
STORE_TIMEOUT_SECONDS = 2.0


class ShutDown(Body):
    stop_cluster: Annotated[bool, Field(description="Also stop the local Ray and all that it runs.")] = False


@resource.route("GET /healthz", "health_get", None, Health)
async def get_health() -> Response:
    """Answer that the process is alive."""
    return answer(Health("ok"))


@resource.route(
    "GET /readyz",
    "readiness_get",
    None,
    Readiness,
    responses={503: {"model": Readiness, "description": "A part does not work; `parts` says which."}},
)
async def get_readiness(parts: Parts) -> Response:
    """Answer whether this process can do its work: database, overview of the cluster, and its executor.

    If the process has no executor of its own, the answer shows the leader and its executor as they were last
    heard of. They do not count, because tasks are accepted without them. `nodes` is `paused: n2, n3 silent`
    while the leader does not give up these silent nodes; `/stats` says why. `clock` is `contradicted` if the
    clock of the database was set ahead or back; the log says what to do.
    """
    executor = parts.leadership.executor_status()
    state = "no-head" if executor.get("head_fault") else str(executor.get("state", "unknown"))
    states = {
        "process": "draining" if parts.waiters.is_closed else OK,
        "store": await _store_state(parts),
        "disk": parts.disk_full() or OK,
        "world": "stale" if parts.freshness.is_stale else OK,
        "executor": OK if state in _READY else state,
    }
    counted = set(states) if parts.has_executor else set(states) - {"executor"}
    if not parts.has_executor:
        states["leader"] = "none" if parts.leadership.leader() is None else OK
    ready = all(states[part] == OK for part in counted)
    paused = parts.leadership.paused()
    states["nodes"] = OK if paused is None else paused.summary
    states["clock"] = "contradicted" if parts.freshness.is_clock_contradicted else OK
    return answer(Readiness("ready" if ready else "not_ready", states), 200 if ready else 503)


async def _store_state(parts: Parts) -> str:
    try:
        async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
            await parts.store.head()
    except StoreExhausted as fault:
        return str(fault)
    except (StoreUnavailable, TimeoutError):
        return "unavailable"
    return OK


@resource.route(
    "GET /metrics",
    "metrics_get",
    Scope.METRICS_READ,
    None,
    responses={
        200: {
            "description": "Prometheus text.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    },
)
async def get_metrics(parts: Parts, telemetry: Annotated[Telemetry, app_part(Telemetry)]) -> Response:
    """Read all metrics in Prometheus's text format. They are listed in docs/reference/metrics.md."""
    try:
        telemetry.note_held_back(await parts.store.held_back())
    except StoreUnavailable:
        telemetry.note_held_back(None)
    return Response(await asyncio.to_thread(text_of, telemetry.metrics()), media_type=CONTENT_TYPE)


@resource.route(
    "POST /shutdown", "service_shutdown", Scope.ADMIN, Stopping, "validation-failed", status_code=202
)
async def shut_down(
    caller: Caller,
    parts: Parts,
    body: JsonBody[ShutDown] = ShutDown(),  # noqa: B008  # frozen
) -> Response:
    """Stop this process. Tasks go on, unless the local cluster is stopped as well. A process that only serves
    HTTP has no local cluster, and `stop_cluster` is false in its answer."""
    stop_cluster = body.stop_cluster and parts.has_executor
    subject = "everything" if stop_cluster else "service"
    with contextlib.suppress(StoreUnavailable):  # The service must stop even without the record.
        await parts.store.audit(by=caller.name, tenant=caller.tenant, action="shutdown", subject=subject)
    parts.shutdown(stop_cluster)
    return answer(Stopping(True, stop_cluster), 202)
