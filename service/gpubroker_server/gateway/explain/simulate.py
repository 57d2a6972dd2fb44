"""What would become of a task if it were submitted now. Nothing is stored."""

from fastapi import APIRouter, Response

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.explain.advice import Advice, advise
from gpubroker_server.core.explain.explain import Explanation, explain_waiting, stands_aside
from gpubroker_server.core.explain.verdicts import look
from gpubroker_server.core.planning.find_way import Wait
from gpubroker_server.gateway.cluster.devices import as_of
from gpubroker_server.gateway.explain.advice import advice_fields, place_views, run_view
from gpubroker_server.gateway.explain.explanation import UNEXPLAINED, explained_fields
from gpubroker_server.gateway.explain.simulation import SimulationView
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.records import caught_up
from gpubroker_server.gateway.status.task_view import rfc3339, sizing_of
from gpubroker_server.gateway.submission.demand import resources_view
from gpubroker_server.gateway.submission.permission import highest_priority
from gpubroker_server.gateway.submission.submissions import Intake, check_allowed, check_possible, take_in
from gpubroker_server.gateway.submission.task_body import SimulateTask

router = APIRouter(route_class=DirectRoute, tags=["tasks"])

_REFUSED = 422
"""Of this status are the refusals that a simulation tells of; whatever else is wrong ends it."""


@router.post(
    "/tasks/simulate",
    operation_id="tasks_simulate",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=SimulationView,
    responses=problems(
        "malformed-json",
        "unauthenticated",
        "forbidden",
        "priority-not-allowed",
        "payload-too-large",
        "unsupported-media-type",
        "validation-failed",
        "follower-stale",
        "too-many-requests",
    ),
)
async def simulate_task(call: Call, body: SimulateTask) -> Response:
    """Say what would become of a task if it were submitted now, without doing anything.

    The body is that of a submit, or one without `run`: then only its demand is judged. With `run`, the token
    needs what submitting it would need.
    """
    if body.run is not None:
        call.require(Scope.TASKS_WRITE)
    await caught_up(call.parts)
    try:
        intake = await take_in(call, body)
    except Problem as problem:
        if problem.code == "validation-failed" or problem.kind.status != _REFUSED:
            raise
        return answer(_refused(call, problem))
    async with call.parts.answers.take():
        return answer(_judged(call, body, intake))


def _judged(call: Call, body: SimulateTask, intake: Intake) -> SimulationView:
    try:
        check_allowed(call, body, intake.task)
        check_possible(call, intake.task)
    except Problem as problem:
        if problem.kind.status != _REFUSED:
            raise
        return _refused(call, problem, intake)
    return _simulated(call, intake)


def _simulated(call: Call, intake: Intake) -> SimulationView:
    task, parts = intake.task, call.parts
    now = parts.clock.now()
    looked = look(parts.asking.survey(parts.world, task, parts.policy, now, parts.forecasts()))
    found, advice = explain_waiting(looked), advise(looked, highest_priority(call))
    eviction = advice.way.eviction
    view = _bare(call, intake)
    return {
        **view,
        "verdict": _verdict(task, advice),
        **explained_fields(parts.world, found, advice, call.identity, now),
        "message": _message(task, found, advice),
        "places": place_views(parts.world, advice.way.places),
        "victims": [run_view(parts.world, run, call.identity, now) for run in eviction.victims]
        if eviction
        else [],
    }


def _verdict(task: Task, advice: Advice) -> str:
    if stands_aside(task) or isinstance(advice.way, Wait):
        return "waits"
    return "starts" if advice.way.places is not None else "preempts"


def _message(task: Task, found: Explanation, advice: Advice) -> str:
    places, eviction = advice.way.places, advice.way.eviction
    if stands_aside(task):
        return found.message
    if places is not None:
        return f"it would start now on {', '.join(sorted({one.node for one in places}))}"
    if eviction is not None:
        return f"{advice.spared.message}, and it would start on {eviction.node}; until then: {found.message}"
    return found.message


def _refused(call: Call, problem: Problem, intake: Intake | None = None) -> SimulationView:
    """A task of the right form that a submit would refuse. What would help is still told."""
    view: SimulationView = {
        **_bare(call, intake),
        "verdict": "refused",
        "refusal": {"code": problem.code, "detail": problem.detail, "errors": list(problem.errors)},
        "message": problem.detail,
    }
    if intake is None:
        return view
    parts, now = call.parts, call.parts.clock.now()
    looked = look(parts.asking.survey(parts.world, intake.task, parts.policy, now, parts.forecasts()))
    advice = advise(looked, highest_priority(call))
    return {**view, "remedies": advice_fields(parts.world, advice, call.identity, now)["remedies"]}


def _bare(call: Call, intake: Intake | None) -> SimulationView:
    age = as_of(call.parts)
    return {
        "verdict": "waits",
        "refusal": None,
        **UNEXPLAINED,
        "evaluated_at": rfc3339(call.parts.clock.now()),
        "priority": None if intake is None else intake.task.priority,
        "resources": None if intake is None else resources_view(intake.task.demand),
        "sizing": None if intake is None else sizing_of(intake.learned),
        "places": [],
        "victims": [],
        "queue_length": len(call.parts.world.queue),
        "as_of": age["as_of"],
        "age_seconds": age["age_seconds"],
        "log_position": age["position"],
    }
