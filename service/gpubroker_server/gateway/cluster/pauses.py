"""Pause the queue of a tenant or of a work stream, and resume it."""

from collections import Counter
from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.bodies import Because, Body
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import STORED, Call, Resource, answer
from gpubroker_server.gateway.http.times import Time, rfc3339
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.known_names import unknown_stream, unknown_tenant

resource = Resource("administration")

SUBJECT = "queue"


class PausedView(TypedDict):
    """A queue that starts nothing. What runs goes on."""

    queue: Annotated[str, Field(description="`tenant:NAME` or `stream:NAME`.")]
    since: Time
    by: Annotated[str, Field(description="Name of the token that paused it.")]
    reason: str
    waiting: Annotated[int, Field(description="Tasks that nothing but this pause keeps from being planned.")]


class QueueView(TypedDict):
    queue: Annotated[str, Field(description="`tenant:NAME` or `stream:NAME`.")]
    paused: Annotated[PausedView | None, Field(description="Null: it is not paused.")]


class ChangePause(Body):
    """`reason` is shown to those who wait, and recorded with the name of your token."""

    reason: Because = ""


_PROBLEMS = "malformed-json not-found validation-failed leader-outdated"
_NO_REASON = ChangePause()


@resource.route(
    "POST /tenants/{name}/pause", "tenants_pause", Scope.ADMIN, QueueView, _PROBLEMS, accepted=STORED
)
async def pause_tenant(call: Call, parts: Parts, name: str, body: ChangePause = _NO_REASON) -> Response:
    """Pause a tenant's queue: its tasks, leases and queued inferences wait. What runs goes on.

    A task that has to leave while its queue is paused waits too, unless it only moves to another node. Times
    to wait and deadlines go on. A pause outlives restarts.
    """
    _check_tenant(parts, name)
    return await _changed(call, parts, f"tenant:{name}", body, pauses=True)


@resource.route(
    "POST /tenants/{name}/resume", "tenants_resume", Scope.ADMIN, QueueView, _PROBLEMS, accepted=STORED
)
async def resume_tenant(call: Call, parts: Parts, name: str, body: ChangePause = _NO_REASON) -> Response:
    """Let a tenant's queue start tasks again."""
    _check_tenant(parts, name)
    return await _changed(call, parts, f"tenant:{name}", body, pauses=False)


@resource.route(
    "POST /streams/{name}/pause", "streams_pause", Scope.ADMIN, QueueView, _PROBLEMS, accepted=STORED
)
async def pause_stream(call: Call, parts: Parts, name: str, body: ChangePause = _NO_REASON) -> Response:
    """Pause a work stream: the tasks of all tenants that name it wait, as those of a paused tenant do."""
    _check_stream(parts, name)
    return await _changed(call, parts, f"stream:{name}", body, pauses=True)


@resource.route(
    "POST /streams/{name}/resume", "streams_resume", Scope.ADMIN, QueueView, _PROBLEMS, accepted=STORED
)
async def resume_stream(call: Call, parts: Parts, name: str, body: ChangePause = _NO_REASON) -> Response:
    """Let a work stream start tasks again."""
    _check_stream(parts, name)
    return await _changed(call, parts, f"stream:{name}", body, pauses=False)


def _check_tenant(parts: Parts, name: str) -> None:
    """One that is paused may be resumed, whatever else is known of it. Raises Problem."""
    fault = unknown_tenant(name, parts.world, parts.policy, parts.tokens)
    if fault and f"tenant:{name}" not in parts.world.queue.pauses:
        raise Problem("not-found", fault)


def _check_stream(parts: Parts, name: str) -> None:
    """As for tenants. Raises Problem."""
    fault = unknown_stream(name, parts.world, parts.policy)
    if fault and f"stream:{name}" not in parts.world.queue.pauses:
        raise Problem("not-found", fault)


async def _changed(call: Call, parts: Parts, queue: str, body: ChangePause, *, pauses: bool) -> Response:
    """The leader ignores what is so already. Not decided here: another gateway may just have changed it."""
    fields = {"queue": queue, "by": call.identity.name, "reason": body.reason}
    settled = await parts.requests.ask(
        SUBJECT, call.identity.tenant, "pause" if pauses else "unpause", fields
    )
    paused = [view for view in paused_views(parts.world) if view["queue"] == queue]
    view: QueueView = {"queue": queue, "paused": paused[0] if paused else None}
    return answer(view, 200 if settled else 202)


def paused_views(world: World) -> list[PausedView]:
    """All, by name. Goes once through all paused tasks."""
    waiting = Counter(world.queue.pause_of(world.tasks[task]) for task in world.queue.paused)
    return [
        {
            "queue": pause.queue,
            "since": rfc3339(pause.at),
            "by": pause.actor,
            "reason": pause.reason,
            "waiting": waiting[pause],
        }
        for _, pause in sorted(world.queue.pauses.items())
    ]
