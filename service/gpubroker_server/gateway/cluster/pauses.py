"""Routes that pause and resume the queue of a tenant or of a work stream."""

from collections import Counter

from fastapi import Response
from gpubroker.wire.answered import Time
from gpubroker.wire.queues import Paused, Queue

from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.known_names import unknown_stream, unknown_tenant
from gpubroker_server.http.bodies import Because, Body, JsonBody
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import STORED, Caller, Resource, answer

resource = Resource("administration")

SUBJECT = "queue"


class ChangePause(Body):
    """`reason` is shown with the tasks that wait, and recorded with the name of your token."""

    reason: Because = ""


_PROBLEMS = "malformed-json not-found validation-failed leader-outdated"
Why = JsonBody[ChangePause]
_NO_REASON = ChangePause()


@resource.route("POST /tenants/{name}/pause", "tenants_pause", Scope.ADMIN, Queue, _PROBLEMS, accepted=STORED)
async def pause_tenant(caller: Caller, parts: Parts, name: str, body: Why = _NO_REASON) -> Response:
    """Pause a tenant's queue: its tasks, leases and queued inferences wait. What runs goes on.

    A task that is preempted while its queue is paused waits, too, unless it only moves to another node. Queue
    TTLs and deadlines are not suspended. A pause outlives restarts of the service.
    """
    _check_tenant(parts, name)
    return await _changed(caller, parts, f"tenant:{name}", body, pauses=True)


@resource.route(
    "POST /tenants/{name}/resume", "tenants_resume", Scope.ADMIN, Queue, _PROBLEMS, accepted=STORED
)
async def resume_tenant(caller: Caller, parts: Parts, name: str, body: Why = _NO_REASON) -> Response:
    """Let a tenant's queue start tasks again."""
    _check_tenant(parts, name)
    return await _changed(caller, parts, f"tenant:{name}", body, pauses=False)


@resource.route("POST /streams/{name}/pause", "streams_pause", Scope.ADMIN, Queue, _PROBLEMS, accepted=STORED)
async def pause_stream(caller: Caller, parts: Parts, name: str, body: Why = _NO_REASON) -> Response:
    """Pause a work stream: the tasks of all tenants that name it wait, as the tasks of a paused tenant do."""
    _check_stream(parts, name)
    return await _changed(caller, parts, f"stream:{name}", body, pauses=True)


@resource.route(
    "POST /streams/{name}/resume", "streams_resume", Scope.ADMIN, Queue, _PROBLEMS, accepted=STORED
)
async def resume_stream(caller: Caller, parts: Parts, name: str, body: Why = _NO_REASON) -> Response:
    """Let a work stream start tasks again."""
    _check_stream(parts, name)
    return await _changed(caller, parts, f"stream:{name}", body, pauses=False)


def _check_tenant(parts: Parts, name: str) -> None:
    """Check that the tenant is known or paused, because a pause can always be ended. Raises Problem
    not-found."""
    fault = unknown_tenant(name, parts.world, parts.policy, parts.tokens)
    if fault and f"tenant:{name}" not in parts.world.queue.pauses:
        raise Problem("not-found", fault)


def _check_stream(parts: Parts, name: str) -> None:
    """Check that the work stream is known or paused, because a pause can always be ended. Raises Problem
    not-found."""
    fault = unknown_stream(name, parts.world, parts.policy)
    if fault and f"stream:{name}" not in parts.world.queue.pauses:
        raise Problem("not-found", fault)


async def _changed(caller: Caller, parts: Parts, queue: str, body: ChangePause, *, pauses: bool) -> Response:
    """Ask the leader to pause or resume a queue, and return the answer. The leader ignores a request for the
    state that the queue has, because another gateway may just have changed it."""
    fields = {"queue": queue, "by": caller.name, "reason": body.reason}
    settled = await parts.requests.ask(SUBJECT, caller.tenant, "pause" if pauses else "unpause", fields)
    paused = next((pause for pause in paused_queues(parts.world) if pause.queue == queue), None)
    return answer(Queue(queue, paused), 200 if settled else 202)


def paused_queues(world: World) -> list[Paused]:
    """Return all paused queues by name. This iterates once over all paused tasks."""
    waiting = Counter(world.queue.pause_of(world.tasks[task]) for task in world.queue.paused)
    return [
        Paused(pause.queue, Time.at(pause.at), pause.actor, pause.reason, waiting[pause])
        for _, pause in sorted(world.queue.pauses.items())
    ]
