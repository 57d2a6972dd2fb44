"""Why a task waits, and what would help."""

from fastapi import Response

from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.blockers import Blocker, sent_at
from gpubroker_server.core.explain.explain import Explanation, ended_message, explain, explain_waiting
from gpubroker_server.core.explain.verdicts import Look
from gpubroker_server.gateway.explain.advice import NO_ADVICE, start_fields
from gpubroker_server.gateway.explain.explanation import (
    UNEXPLAINED,
    ExplainedFields,
    ExplanationView,
    blocker_view,
    explained_fields,
    unadvised_fields,
)
from gpubroker_server.gateway.explain.parts import Parts
from gpubroker_server.gateway.http.call import Call, answer
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.routing import Resource
from gpubroker_server.gateway.http.times import rfc3339
from gpubroker_server.gateway.status.pending import NOT_YET_SEEN, inherits_view, no_leader
from gpubroker_server.ports.store import TaskRecord

resource = Resource("tasks")


@resource.route(
    "GET /tasks/{task_id}/explain",
    "tasks_explain",
    Scope.TASKS_READ,
    ExplanationView,
    "not-found follower-stale too-many-requests",
)
async def explain_task(call: Call, parts: Parts, task_id: str) -> Response:
    """Explain why a task waits: every blocker, every device, its place in the queue, and what would help."""
    record = await parts.records.find(call.identity, task_id)
    await parts.freshness.catch_up()
    async with parts.answers.slot():
        if record.task.id not in parts.world.tasks:
            record = await parts.records.reread(record)  # it may just have ended
        return answer(_view(parts, call.identity, record))


def _view(parts: Parts, viewer: Identity, record: TaskRecord) -> ExplanationView:
    task = record.task
    row = parts.world.tasks.get(task.id)
    if row is not None and row.state is TaskState.PENDING:
        return _waiting(parts, viewer, row)
    view = _bare(parts, task)
    if row is None:
        return view if task.is_terminal else _not_yet_seen(view)
    found = explain(parts.world, task.id, parts.policy, parts.clock.now())
    message = _ended(row) if row.is_terminal else found.message
    return {**view, "state": found.state.value, "message": message}


def _waiting(parts: Parts, viewer: Identity, task: Task) -> ExplanationView:
    view, looked = _bare(parts, task), parts.look(task)
    found = explain_waiting(looked)
    explained = _explained(parts, viewer, task, looked, found)
    view = {**view, "inherits": inherits_view(found.inherits), **explained}
    blocker = no_leader(parts.world, parts.leadership, task)
    return view if blocker is None else _without_leader(view, found.blockers, blocker)


def _explained(
    parts: Parts, viewer: Identity, task: Task, looked: Look, found: Explanation
) -> ExplainedFields:
    now = parts.clock.now()
    if not task.is_inference:
        advice = advise(looked, parts.submissions.permissions.highest_priority(viewer))
        return explained_fields(parts.world, found, advice, viewer, now)
    start = None  # an inference waits for its model, not for room on a node
    if found.reason is Reason.MODEL_LOADING:
        start = sent_at(parts.world, task, parts.policy, parts.leadership.forecasts(), now)
    return {**unadvised_fields(found), **start_fields(parts.world, start, now)}


def _without_leader(
    view: ExplanationView, blockers: tuple[Blocker, ...], leaderless: Blocker
) -> ExplanationView:
    """Without a leader no start can be forecast, and nothing else would help."""
    others = [one for one in blockers if one.reason is not Reason.PENDING_EVALUATION]
    first, *more = sorted([leaderless, *others], key=lambda blocker: blocker.tier)
    return {
        **view,
        **NO_ADVICE,
        "reason": first.reason.value,
        "message": first.message,
        "blockers": [blocker_view(blocker) for blocker in (first, *more)],
    }


def _bare(parts: Parts, task: Task) -> ExplanationView:
    """Of a task that does not wait."""
    age = parts.freshness.as_of()
    return {
        "id": task.id,
        "state": task.state.value,
        **UNEXPLAINED,
        "message": _ended(task),
        "evaluated_at": rfc3339(parts.clock.now()),
        "queue_length": len(parts.world.queue),
        "inherits": None,
        "as_of": age["as_of"],
        "age_seconds": age["age_seconds"],
        "log_position": age["position"],
    }


def _ended(task: Task) -> str:
    """A lease has no run that could succeed, so its message is about its release."""
    if task.external is None or task.finished_at is None:
        return ended_message(task.state)
    at = rfc3339(task.finished_at)
    match task.state:
        case TaskState.SUCCEEDED:
            return f"released at {at}; it holds nothing any more"
        case TaskState.CANCELLED:
            return f"cancelled at {at}, before it held anything"
        case _:
            return f"ended at {at} without having been released; GET /leases/{task.id} has its error"


def _not_yet_seen(view: ExplanationView) -> ExplanationView:
    reason, message = Reason.PENDING_EVALUATION, NOT_YET_SEEN["message"]
    blockers = [blocker_view(Blocker(reason, message))]
    return {**view, "reason": reason.value, "message": message, "blockers": blockers}
