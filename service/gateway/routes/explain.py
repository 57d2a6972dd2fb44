"""Why a task waits."""

from fastapi import APIRouter, Response

from service.core.blockers import Blocker
from service.core.explain import DeviceVerdict, ended_message, explain
from service.core.reasons import Reason
from service.core.units import TaskId
from service.core.world import World
from service.gateway.direct import Call, DirectRoute, answer, needs, problems
from service.gateway.identity import Identity, Scope
from service.gateway.lookup import find, reread
from service.gateway.overview import as_of, sees
from service.gateway.pending import NOT_YET_SEEN
from service.gateway.translate import rfc3339
from service.gateway.views import BlockerView, DeviceVerdictView, ExplanationView
from service.ports import TaskRecord

router = APIRouter(route_class=DirectRoute, tags=["tasks"])


@router.get(
    "/tasks/{task_id}/explain",
    operation_id="tasks_explain",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=ExplanationView,
    responses=problems("unauthenticated", "forbidden", "not-found", "follower-stale"),
)
async def explain_task(call: Call, task_id: str) -> Response:
    """Explain why a task waits: every blocker, every device, and its place in the queue."""
    record = await find(call, task_id)
    if record.task.id not in call.parts.world.tasks:
        record = await reread(call.parts, record)  # it may have ended meanwhile
    return answer(_view(call, record))


def _view(call: Call, record: TaskRecord) -> ExplanationView:
    parts, task = call.parts, record.task
    age, now = as_of(parts), parts.clock.now()
    view: ExplanationView = {
        "id": task.id,
        "state": task.state.value,
        "reason": None,
        "message": ended_message(task.state),
        "evaluated_at": rfc3339(now),
        "position": None,
        "queue_length": len(parts.world.queue),
        "blockers": [],
        "devices": [],
        "as_of": age["as_of"],
        "age_seconds": age["age_seconds"],
    }
    if task.id not in parts.world.tasks:
        return view if task.is_terminal else _not_yet_seen(view)
    found = explain(parts.world, task.id, parts.policy, now)
    return {
        **view,
        "state": found.state.value,
        "reason": None if found.reason is None else found.reason.value,
        "message": found.message,
        "position": found.position,
        "blockers": [_blocker_view(blocker) for blocker in found.blockers],
        "devices": [_verdict_view(parts.world, verdict, call.identity) for verdict in found.devices],
    }


def _not_yet_seen(view: ExplanationView) -> ExplanationView:
    reason, message = Reason.PENDING_EVALUATION, NOT_YET_SEEN["message"]
    blockers = [_blocker_view(Blocker(reason, message))]
    return {**view, "reason": reason.value, "message": message, "blockers": blockers}


def _blocker_view(blocker: Blocker) -> BlockerView:
    return {"reason": blocker.reason.value, "tier": blocker.tier, "message": blocker.message}


def _verdict_view(world: World, verdict: DeviceVerdict, viewer: Identity) -> DeviceVerdictView:
    leases = [holding.lease for holding in world.books[verdict.device].holdings.values()]
    known = {lease.holder for lease in leases if sees(viewer, lease.tenant)}
    return {
        "key": verdict.device,
        "node": verdict.node,
        "index": verdict.index,
        "kind": verdict.kind,
        "verdict": verdict.verdict.value,
        "message": verdict.message,
        "need_mb": verdict.need_mb,
        "free_mb": verdict.free_mb,
        "allocatable_mb": verdict.allocatable_mb,
        "holders": [
            {
                "id": holder.id if holder.id in known else None,
                "name": _name(world, holder.id) if holder.id in known else None,
                "priority": holder.priority,
                "gpu_mb": holder.mb,
                "stopping": holder.stopping,
            }
            for holder in verdict.holders
        ],
    }


def _name(world: World, holder: str) -> str | None:
    task = world.tasks.get(TaskId(holder))
    return None if task is None else task.name
