"""Why a task waits, what would help, and what would happen to one that is not submitted yet."""

from dataclasses import replace
from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.explain.advice import Advice, advise
from gpubroker_server.core.explain.blockers import Blocker, expected_send_at
from gpubroker_server.core.explain.diagnosis import Diagnosis, diagnose
from gpubroker_server.core.explain.explain import (
    Explanation,
    explain,
    explain_pending,
    is_deferred,
)
from gpubroker_server.core.planning.find_way import Wait
from gpubroker_server.core.planning.forecasts.run_estimates import unstated_size
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.explain.advice import (
    NO_ADVICE,
    PlacementView,
    RunHolder,
    advice_fields,
    place_views,
    run_view,
    start_fields,
)
from gpubroker_server.gateway.explain.explanation import (
    UNEXPLAINED,
    EvaluatedFields,
    ExplainedFields,
    ExplanationView,
    blocker_view,
    explained_fields,
    unadvised_fields,
)
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.routing import Call, Resource, answer
from gpubroker_server.gateway.http.times import rfc3339
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.pending import NOT_YET_SEEN, inherits_view, no_leader
from gpubroker_server.gateway.status.task_view import demand_view, sizing_of
from gpubroker_server.gateway.status.views import DemandView, SizingView
from gpubroker_server.gateway.submission.submissions import PreparedTask
from gpubroker_server.gateway.submission.task_body import SimulateTask
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
        row = parts.world.tasks.get(record.task.id)
        if row is None or row.is_terminal:
            record = await parts.records.reread(record)  # it may just have ended
        view = _view(parts, call.identity, record)
        if notice := parts.records.pending.notice(record.task):
            view["message"] += f" ({notice}; gpubroker stats says why)"
        return answer(view)


def _diagnose(parts: Parts, task: Task) -> Diagnosis:
    """All nodes and devices, judged for this task."""
    forecasts = parts.leadership.forecasts()
    return diagnose(parts.surveys.survey_nodes(parts.world, task, parts.policy, parts.clock.now(), forecasts))


def _view(parts: Parts, viewer: Identity, record: TaskRecord) -> ExplanationView:
    task = record.task
    row = parts.world.tasks.get(task.id)
    if row is not None and row.state is TaskState.PENDING:
        return _waiting(parts, viewer, replace(record, task=row))
    view = _bare(parts, record)
    if row is None:
        return view if task.is_terminal else _not_yet_seen(view)
    found = explain(parts.world, task.id, parts.policy, parts.clock.now())
    message = _ended(replace(record, task=row)) if row.is_terminal else found.message
    return {**view, "state": found.state.value, "message": message}


def _waiting(parts: Parts, viewer: Identity, record: TaskRecord) -> ExplanationView:
    task = record.task
    view, diagnosis = _bare(parts, record), _diagnose(parts, task)
    found = explain_pending(diagnosis)
    explained = _explained(parts, viewer, task, diagnosis, found)
    view = {**view, "inherits": inherits_view(found.inherits), **explained}
    blocker = no_leader(parts.world, parts.leadership, task)
    return view if blocker is None else _without_leader(view, found.blockers, blocker)


def _explained(
    parts: Parts, viewer: Identity, task: Task, diagnosis: Diagnosis, found: Explanation
) -> ExplainedFields:
    now = parts.clock.now()
    if not task.is_inference:
        advice = advise(diagnosis, parts.submissions.permissions.highest_priority(viewer))
        return explained_fields(parts.world, found, advice, viewer, now)
    start = None  # an inference waits for its model, not for room on a node
    if found.reason is Reason.MODEL_LOADING:
        start = expected_send_at(parts.world, task, parts.policy, parts.leadership.forecasts(), now)
    return {**unadvised_fields(found), **start_fields(parts.world, start, now)}


def _without_leader(
    view: ExplanationView, blockers: tuple[Blocker, ...], leaderless: Blocker
) -> ExplanationView:
    """Without a leader no start can be forecast, and nothing else would help."""
    others = [one for one in blockers if one.reason is not Reason.PENDING_EVALUATION]
    first, *more = sorted([leaderless, *others], key=lambda blocker: blocker.reason.tier)
    return {
        **view,
        **NO_ADVICE,
        "reason": first.reason.value,
        "message": first.message,
        "blockers": [blocker_view(blocker) for blocker in (first, *more)],
    }


def _bare(parts: Parts, record: TaskRecord) -> ExplanationView:
    """Of a task that does not wait."""
    task = record.task
    return {
        **_evaluated(parts),
        "id": task.id,
        "name": task.name,
        "state": task.state.value,
        "message": _ended(record),
        "inherits": None,
    }


def _evaluated(parts: Parts) -> EvaluatedFields:
    age = parts.freshness.as_of()
    return {
        **UNEXPLAINED,
        "evaluated_at": rfc3339(parts.clock.now()),
        "queue_length": len(parts.world.queue),
        "as_of": age["as_of"],
        "age_seconds": age["age_seconds"],
        "log_position": age["position"],
    }


def _ended(record: TaskRecord) -> str:
    """How and when. A lease has no run that could succeed, so its message is about its release."""
    task = record.task
    if task.finished_at is None:
        return ""
    at = rfc3339(task.finished_at)
    if task.external is None:
        failure = record.failure or {}
        why = str(failure.get("message") or failure.get("kind") or "").partition("\n")[0]
        return f"{task.state} at {at}, {_how_far(task, task.finished_at)}" + (f": {why}" if why else "")
    match task.state:
        case TaskState.SUCCEEDED:
            return f"released at {at}; it holds nothing any more"
        case TaskState.CANCELLED:
            return f"cancelled at {at}, before it held anything"
        case _:
            return f"ended at {at} without having been released; GET /leases/{task.id} has its error"


def _how_far(task: Task, finished_at: Instant) -> str:
    if task.started_at is None:
        return "before it started" if not task.fence else f"before attempt {task.fence} started"
    where = f" on {task.node}" if task.node else ""
    which = f" in attempt {task.fence}" if task.fence > 1 else ""
    return f"after {finished_at - task.started_at:.0f} s{which}{where}"


def _not_yet_seen(view: ExplanationView) -> ExplanationView:
    reason, message = Reason.PENDING_EVALUATION, NOT_YET_SEEN["message"]
    blockers = [blocker_view(Blocker(reason, message))]
    return {**view, "reason": reason.value, "message": message, "blockers": blockers}


_REFUSED = 422
"""Problems of this status are part of the answer; any other problem ends the request."""


class RefusalView(TypedDict):
    """The problem with which a submit would be refused."""

    code: str
    detail: str
    errors: list[Fault]


class SimulationView(EvaluatedFields):
    """What would happen to a task if it were submitted now."""

    verdict: Annotated[
        str,
        Field(description="refused; starts: there is room; preempts: `victims` are stopped first; or waits."),
    ]
    refusal: RefusalView | None
    priority: int | None
    resources: Annotated[DemandView | None, Field(description="With all defaults; null if refused early.")]
    sizing: Annotated[
        SizingView | None, Field(description="How its size would be settled, if it states none.")
    ]
    places: Annotated[list[PlacementView], Field(description="Where it would start now.")]
    victims: Annotated[list[RunHolder], Field(description="Runs that would be asked to leave.")]


@resource.route(
    "POST /tasks/simulate",
    "tasks_simulate",
    Scope.TASKS_READ,
    SimulationView,
    "malformed-json priority-not-allowed payload-too-large unsupported-media-type validation-failed "
    "follower-stale too-many-requests leader-outdated",
)
async def simulate_task(call: Call, parts: Parts, body: SimulateTask) -> Response:
    """Say what would happen to a task if it were submitted now, without doing anything.

    The body is that of a submit, or one without `run`: then only its demand is judged. With `run`, the token
    needs the same scopes as for the submit.
    """
    if body.run is not None:
        call.identity.require(Scope.TASKS_WRITE, "simulating a run")
    await parts.freshness.catch_up()
    try:
        new = await parts.submissions.new_task(body, call.identity.tenant)
    except Problem as problem:
        if problem.code == "validation-failed" or problem.kind.status != _REFUSED:
            raise
        return answer(_refused(parts, call.identity, problem))
    async with parts.answers.slot():
        return answer(await _judged(parts, call.identity, body, new))


async def _judged(parts: Parts, viewer: Identity, body: SimulateTask, new: PreparedTask) -> SimulationView:
    try:
        await parts.submissions.check_allowed(viewer, body, new.task)
        parts.submissions.check_possible(new.task)
    except Problem as problem:
        if problem.kind.status != _REFUSED:
            raise
        return _refused(parts, viewer, problem, new)
    return _simulated(parts, viewer, new)


def _simulated(parts: Parts, viewer: Identity, new: PreparedTask) -> SimulationView:
    task, world, now = new.task, parts.world, parts.clock.now()
    diagnosis = _diagnose(parts, task)
    found, advice = explain_pending(diagnosis), advise(diagnosis, _highest_priority(parts, viewer))
    eviction = advice.way.eviction
    victims = eviction.victims if eviction else ()
    return {
        **_unjudged(parts, new),
        "verdict": _verdict(world, task, advice),
        **explained_fields(world, found, advice, viewer, now),
        "message": _message(world, task, found, advice),
        "places": place_views(world, advice.way.places),
        "victims": [run_view(world, run, viewer, now) for run in victims],
    }


def _verdict(world: World, task: Task, advice: Advice) -> str:
    if is_deferred(task, world) or isinstance(advice.way, Wait):
        return "waits"
    return "starts" if advice.way.places is not None else "preempts"


def _message(world: World, task: Task, found: Explanation, advice: Advice) -> str:
    places, eviction = advice.way.places, advice.way.eviction
    if is_deferred(task, world):
        return found.message
    if places is not None:
        return f"the task would start now on {', '.join(sorted({one.node for one in places}))}"
    if eviction is not None:
        victims = advice.preemption.message
        return f"{victims}, and the task would start on {eviction.node}; until then: {found.message}"
    return found.message


def _refused(
    parts: Parts, viewer: Identity, problem: Problem, new: PreparedTask | None = None
) -> SimulationView:
    """Of a valid task that a submit would refuse, with what would help."""
    view: SimulationView = {
        **_unjudged(parts, new),
        "verdict": "refused",
        "refusal": {"code": problem.code, "detail": problem.detail, "errors": list(problem.errors)},
        "message": problem.detail,
    }
    if new is None:
        return view
    advice = advise(_diagnose(parts, new.task), _highest_priority(parts, viewer))
    return {**view, "remedies": advice_fields(parts.world, advice, viewer, parts.clock.now())["remedies"]}


def _highest_priority(parts: Parts, viewer: Identity) -> int:
    return parts.submissions.permissions.highest_priority(viewer)


def _unjudged(parts: Parts, new: PreparedTask | None) -> SimulationView:
    return {
        **_evaluated(parts),
        "verdict": "waits",
        "refusal": None,
        "priority": None if new is None else new.task.priority,
        "resources": None if new is None else demand_view(new.task.demand),
        "sizing": None if new is None else sizing_of(new.learned or unstated_size(new.task.demand)),
        "places": [],
        "victims": [],
    }
