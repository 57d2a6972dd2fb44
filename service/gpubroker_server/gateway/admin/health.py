"""Whether the process lives, and whether it can do its work. Open: probes carry no tokens."""

import asyncio

from fastapi import APIRouter, Response

from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, problems
from gpubroker_server.gateway.parts import GatewayParts
from gpubroker_server.gateway.status.views import Health, Readiness
from gpubroker_server.ports.store import StoreUnavailable

router = APIRouter(route_class=DirectRoute, tags=["operations"])

OK = "ok"
_READY = frozenset({"connected", "standby"})
"""What an executor calls its state that takes orders, or will as soon as this process leads."""
STORE_PATIENCE_SECONDS = 2.0


@router.get("/healthz", operation_id="health_get", response_model=Health, responses=problems())
async def get_health(call: Call) -> Response:  # noqa: ARG001  # every endpoint takes the call
    """Answer that the process lives."""
    view: Health = {"status": "ok"}
    return answer(view)


@router.get(
    "/readyz",
    operation_id="readiness_get",
    response_model=Readiness,
    responses={
        503: {"model": Readiness, "description": "A part is away; `parts` says which."},
        **problems(),
    },
)
async def get_readiness(call: Call) -> Response:
    """Answer whether this process can do its part: database, picture of the cluster, and the executor, if it
    has one. Else leader and executor are told as they were last heard of, and do not count: tasks are taken
    without them.

    `nodes` is `paused` while silent ones are not given up; `/stats` says why. Others work meanwhile.
    """
    parts = call.parts
    states = {
        "process": "draining" if parts.waiters.is_closed else OK,
        "store": await _store_state(parts),
        "world": OK if parts.age_seconds() <= parts.limits.stale_seconds else "stale",
        "executor": _executor_state(parts),
    }
    counting = set(states) if parts.has_executor else set(states) - {"executor"}
    if not parts.has_executor:
        states["leader"] = "none" if parts.leader() is None else OK
    ready = all(states[part] == OK for part in counting)
    states["nodes"] = OK if parts.paused() is None else "paused"
    view: Readiness = {"status": "ready" if ready else "not_ready", "parts": states}
    return answer(view, 200 if ready else 503)


async def _store_state(parts: GatewayParts) -> str:
    try:
        async with asyncio.timeout(STORE_PATIENCE_SECONDS):
            await parts.store.head()
    except (StoreUnavailable, TimeoutError):
        return "unavailable"
    return OK


def _executor_state(parts: GatewayParts) -> str:
    state = str(parts.executor_status().get("state", "unknown"))
    return OK if state in _READY else state
