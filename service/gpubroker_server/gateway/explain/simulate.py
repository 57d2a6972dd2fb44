"""What would happen to a task if it were submitted now. Nothing is stored."""

from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.explain.advice import Advice, advise
from gpubroker_server.core.explain.explain import Explanation, explain_waiting, stands_aside
from gpubroker_server.core.planning.find_way import Wait
from gpubroker_server.gateway.explain.advice import (
    PlacementView,
    RunHolder,
    advice_fields,
    place_views,
    run_view,
)
from gpubroker_server.gateway.explain.explanation import UNEXPLAINED, ExplainedFields, explained_fields
from gpubroker_server.gateway.explain.parts import Parts
from gpubroker_server.gateway.http.call import Call, answer
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.routing import Resource
from gpubroker_server.gateway.http.times import Time, rfc3339
from gpubroker_server.gateway.status.task_view import demand_view, sizing_of
from gpubroker_server.gateway.status.views import DemandView, SizingView
from gpubroker_server.gateway.submission.submissions import NewTask
from gpubroker_server.gateway.submission.task_body import SimulateTask

resource = Resource("tasks")

_REFUSED = 422
"""Problems of this status are part of the answer; any other problem ends the request."""


class RefusalView(TypedDict):
    """The problem with which a submit would be refused."""

    code: str
    detail: str
    errors: list[Fault]


class SimulationView(ExplainedFields):
    """What would happen to a task if it were submitted now."""

    verdict: Annotated[
        str,
        Field(description="refused; starts: there is room; preempts: `victims` are stopped first; or waits."),
    ]
    refusal: RefusalView | None
    evaluated_at: Time
    priority: int | None
    resources: Annotated[DemandView | None, Field(description="With all defaults; null if refused early.")]
    sizing: Annotated[SizingView | None, Field(description="How `gpu_mb: learned` would be settled.")]
    places: Annotated[list[PlacementView], Field(description="Where it would start now.")]
    victims: Annotated[list[RunHolder], Field(description="Runs that would be asked to leave.")]
    queue_length: int
    as_of: Time
    age_seconds: float
    log_position: Annotated[int, Field(description="Position of the newest event behind this answer.")]


@resource.route(
    "POST /tasks/simulate",
    "tasks_simulate",
    Scope.TASKS_READ,
    SimulationView,
    "malformed-json priority-not-allowed payload-too-large unsupported-media-type validation-failed "
    "follower-stale too-many-requests",
)
async def simulate_task(call: Call, parts: Parts, body: SimulateTask) -> Response:
    """Say what would happen to a task if it were submitted now, without doing anything.

    The body is that of a submit, or one without `run`: then only its demand is judged. With `run`, the token
    needs the same scopes as for the submit.
    """
    if body.run is not None:
        call.identity.require(Scope.TASKS_WRITE, f"{call.method} {call.url.path}")
    await parts.freshness.catch_up()
    try:
        new = await parts.submissions.new_task(body, call.identity.tenant)
    except Problem as problem:
        if problem.code == "validation-failed" or problem.kind.status != _REFUSED:
            raise
        return answer(_refused(parts, call.identity, problem))
    async with parts.answers.slot():
        return answer(_judged(parts, call.identity, body, new))


def _judged(parts: Parts, viewer: Identity, body: SimulateTask, new: NewTask) -> SimulationView:
    try:
        parts.submissions.check_allowed(viewer, body, new.task)
        parts.submissions.check_possible(new.task)
    except Problem as problem:
        if problem.kind.status != _REFUSED:
            raise
        return _refused(parts, viewer, problem, new)
    return _simulated(parts, viewer, new)


def _simulated(parts: Parts, viewer: Identity, new: NewTask) -> SimulationView:
    task, world, now = new.task, parts.world, parts.clock.now()
    looked = parts.look(task)
    found, advice = explain_waiting(looked), advise(looked, _highest_priority(parts, viewer))
    eviction = advice.way.eviction
    victims = eviction.victims if eviction else ()
    return {
        **_bare(parts, new),
        "verdict": _verdict(task, advice),
        **explained_fields(world, found, advice, viewer, now),
        "message": _message(task, found, advice),
        "places": place_views(world, advice.way.places),
        "victims": [run_view(world, run, viewer, now) for run in victims],
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


def _refused(parts: Parts, viewer: Identity, problem: Problem, new: NewTask | None = None) -> SimulationView:
    """Of a valid task that a submit would refuse, with what would help."""
    view: SimulationView = {
        **_bare(parts, new),
        "verdict": "refused",
        "refusal": {"code": problem.code, "detail": problem.detail, "errors": list(problem.errors)},
        "message": problem.detail,
    }
    if new is None:
        return view
    advice = advise(parts.look(new.task), _highest_priority(parts, viewer))
    return {**view, "remedies": advice_fields(parts.world, advice, viewer, parts.clock.now())["remedies"]}


def _highest_priority(parts: Parts, viewer: Identity) -> int:
    return parts.submissions.permissions.highest_priority(viewer)


def _bare(parts: Parts, new: NewTask | None) -> SimulationView:
    age = parts.freshness.as_of()
    return {
        "verdict": "waits",
        "refusal": None,
        **UNEXPLAINED,
        "evaluated_at": rfc3339(parts.clock.now()),
        "priority": None if new is None else new.task.priority,
        "resources": None if new is None else demand_view(new.task.demand),
        "sizing": None if new is None else sizing_of(new.learned),
        "places": [],
        "victims": [],
        "queue_length": len(parts.world.queue),
        "as_of": age["as_of"],
        "age_seconds": age["age_seconds"],
        "log_position": age["position"],
    }
