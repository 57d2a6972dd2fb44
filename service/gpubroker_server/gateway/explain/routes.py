"""Why a task waits, and what would help."""

from fastapi import APIRouter, Response

from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.blockers import Blocker
from gpubroker_server.core.explain.explain import Explanation, ended_message, explain, explain_waiting
from gpubroker_server.core.explain.inference_wait import sent_at
from gpubroker_server.core.explain.verdicts import Look, look
from gpubroker_server.gateway.cluster.devices import as_of
from gpubroker_server.gateway.explain.advice import NO_ADVICE, start_fields
from gpubroker_server.gateway.explain.explanation import (
    UNEXPLAINED,
    ExplainedFields,
    ExplanationView,
    blocker_view,
    explained_fields,
    unadvised_fields,
)
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.pending import NOT_YET_SEEN, inherits_view
from gpubroker_server.gateway.status.records import caught_up, find, reread
from gpubroker_server.gateway.status.task_view import rfc3339
from gpubroker_server.gateway.status.unled import unled
from gpubroker_server.gateway.submission.permission import highest_priority
from gpubroker_server.ports.store import TaskRecord

router = APIRouter(route_class=DirectRoute, tags=["tasks"])


@router.get(
    "/tasks/{task_id}/explain",
    operation_id="tasks_explain",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=ExplanationView,
    responses=problems("unauthenticated", "forbidden", "not-found", "follower-stale", "too-many-requests"),
)
async def explain_task(call: Call, task_id: str) -> Response:
    """Explain why a task waits: every blocker, every device, its place in the queue, and what would help."""
    record = await find(call, task_id)
    await caught_up(call.parts)
    async with call.parts.answers.take():
        if record.task.id not in call.parts.world.tasks:
            record = await reread(call.parts, record)  # it may have ended meanwhile
        return answer(_view(call, record))


def _view(call: Call, record: TaskRecord) -> ExplanationView:
    parts, task = call.parts, record.task
    row = parts.world.tasks.get(task.id)
    if row is not None and row.state is TaskState.PENDING:
        return _waiting(call, row)
    view = _bare(call, task)
    if row is None:
        return view if task.is_terminal else _not_yet_seen(view)
    found = explain(parts.world, task.id, parts.policy, parts.clock.now())
    message = _ended(row) if row.is_terminal else found.message
    return {**view, "state": found.state.value, "message": message}


def _waiting(call: Call, task: Task) -> ExplanationView:
    parts, now = call.parts, call.parts.clock.now()
    view = _bare(call, task)
    looked = look(parts.asking.survey(parts.world, task, parts.policy, now, parts.forecasts()))
    found = explain_waiting(looked)
    view = {**view, "inherits": inherits_view(found.inherits), **_explained(call, task, looked, found, now)}
    blocker = unled(parts, task)
    return view if blocker is None else _unled(view, found.blockers, blocker)


def _explained(call: Call, task: Task, looked: Look, found: Explanation, now: Instant) -> ExplainedFields:
    """An inference waits for its model, and no room on nodes would help it."""
    parts = call.parts
    if task.is_inference:
        start = None
        if found.reason is Reason.MODEL_LOADING:
            start = sent_at(parts.world, task, parts.policy, parts.forecasts(), now)
        return {**unadvised_fields(found), **start_fields(parts.world, start, now)}
    advice = advise(looked, highest_priority(call))
    return explained_fields(parts.world, found, advice, call.identity, now)


def _unled(view: ExplanationView, blockers: tuple[Blocker, ...], unled: Blocker) -> ExplanationView:
    """While nobody leads there is no start to tell, and nothing helps but a leader."""
    others = [one for one in blockers if one.reason is not Reason.PENDING_EVALUATION]
    first, *more = sorted([unled, *others], key=lambda blocker: blocker.tier)
    return {
        **view,
        **NO_ADVICE,
        "reason": first.reason.value,
        "message": first.message,
        "blockers": [blocker_view(blocker) for blocker in (first, *more)],
    }


def _bare(call: Call, task: Task) -> ExplanationView:
    """Of a task that waits for nothing."""
    parts = call.parts
    age, now = as_of(parts), parts.clock.now()
    return {
        "id": task.id,
        "state": task.state.value,
        **UNEXPLAINED,
        "message": _ended(task),
        "evaluated_at": rfc3339(now),
        "queue_length": len(parts.world.queue),
        "inherits": None,
        "as_of": age["as_of"],
        "age_seconds": age["age_seconds"],
        "log_position": age["position"],
    }


def _ended(task: Task) -> str:
    """Of a lease that its holder gave back, that it did: there is no run that could have succeeded."""
    if task.external is None or task.finished_at is None:
        return ended_message(task.state)
    at = rfc3339(task.finished_at)
    match task.state:
        case TaskState.SUCCEEDED:
            return f"released at {at}; it holds nothing any more"
        case TaskState.CANCELLED:
            return f"given up at {at}, before it held anything"
        case _:
            return f"ended at {at} without having been released; GET /leases/{task.id} has its error"


def _not_yet_seen(view: ExplanationView) -> ExplanationView:
    reason, message = Reason.PENDING_EVALUATION, NOT_YET_SEEN["message"]
    blockers = [blocker_view(Blocker(reason, message))]
    return {**view, "reason": reason.value, "message": message, "blockers": blockers}
