"""Routes that explain why a task waits, and say what would happen to a task if it were submitted."""

from collections import Counter
from typing import Any

from fastapi import Response
from gpubroker.wire.explanations import Explanation as ShownExplanation
from gpubroker.wire.explanations import Refusal, Simulation
from gpubroker.wire.forecasts import Sizing
from gpubroker.wire.tasks import TaskState as ShownState
from msgspec.structs import replace

from gpubroker_server.core.admission.facts import INVALID, Refused
from gpubroker_server.core.admission.sizing import unstated_size
from gpubroker_server.core.domain.holders import External, Inference
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.blockers import Blocker, expected_send_at
from gpubroker_server.core.explain.diagnosis import Diagnosis, diagnose
from gpubroker_server.core.explain.explain import (
    Explanation,
    explain,
    explain_pending,
)
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.explain.viewpoint import NO_ADVICE, Viewpoint, viewpoint
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.model_faults import model_fault
from gpubroker_server.gateway.status.pending import NOT_YET_SEEN, no_leader
from gpubroker_server.gateway.status.task_view import demand_view
from gpubroker_server.gateway.status.wholes import Whole, failure_of_whole, standing_of, whole_of
from gpubroker_server.gateway.submission.task_body import SimulateTask
from gpubroker_server.gateway.submission.translation import submission_of
from gpubroker_server.http.bodies import JsonBody
from gpubroker_server.http.faults import problem_of
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import Caller, Resource, answer
from gpubroker_server.http.times import rfc3339
from gpubroker_server.ports.store import AdmittedTask, TaskRecord

resource = Resource("tasks")


@resource.route(
    "GET /tasks/{task_id}/explain",
    "tasks_explain",
    Scope.TASKS_READ,
    ShownExplanation,
    "not-found follower-stale too-many-requests",
)
async def explain_task(caller: Caller, parts: Parts, task_id: str) -> Response:
    """Explain why a task waits: every blocker, every device, its place in the queue, and what would help.

    With the id of an array or a worker set, the answer says how many of its workers wait, run and have ended,
    and explains the first waiting worker.
    """
    record = await parts.records.find(caller, task_id)
    whole = await whole_of(parts.records.store, record)
    await parts.freshness.catch_up()
    if whole is None:
        return answer(await _of_task(parts, caller, record))
    return answer(await _of_whole(parts, caller, whole))


async def _of_task(parts: Parts, viewer: Identity, record: TaskRecord) -> ShownExplanation:
    async with parts.answers.slot():
        row = parts.world.tasks.get(record.task.id)
        if row is None or row.is_terminal:
            record = await parts.records.reread(record)  # The task may have ended since it was read.
        explanation = _explanation(parts, viewer, record)
    if explanation.state is not ShownState.PENDING or not isinstance(record.task.holder, Inference):
        return explanation
    fault = await model_fault(parts.store, parts.residencies, parts.outside, record.task)
    return replace(explanation, message=f"{explanation.message}; {fault}") if fault else explanation


_NOT_WANTED = "not wanted"
_NOT_WAITING: dict[str, Any] = NO_ADVICE | {
    "reason": None,
    "position": None,
    "inherits": None,
    "blockers": (),
    "quota": None,
    "ranks": None,
    "devices": (),
}


async def _of_whole(parts: Parts, viewer: Identity, whole: Whole) -> ShownExplanation:
    """Return the explanation of an array or a worker set: its state, the number of workers in each state, and
    why the first waiting worker waits."""
    store, first = parts.records.store, whole.first
    standing = await standing_of(store, whole)
    words = {id: _word(parts.world, whole, id, state) for id, state in standing.workers.items()}
    counts = Counter(words.values())
    waiting = next((id for id, word in words.items() if word == TaskState.PENDING), None)
    record = first if waiting is None else await store.record(waiting) or first
    explanation = await _of_task(parts, viewer, record)
    is_alone = len(words) == 1 and not counts[_NOT_WANTED]
    sentences = (
        [] if is_alone else [f"workers: {', '.join(f'{count} {word}' for word, count in counts.items())}"]
    )
    if is_alone:
        sentences.append(explanation.message)
    elif waiting is not None:
        sentences.append(f"{waiting}: {explanation.message}")
    if (failure := failure_of_whole(whole, standing)) is not None:
        sentences.append(failure.message)
    return replace(
        explanation,
        id=first.task.id,
        state=ShownState(standing.state),
        message="; ".join(sentences),
        worker=None if is_alone else waiting,
        **({} if waiting else _NOT_WAITING),
    )


def _word(world: World, whole: Whole, worker: TaskId, state: TaskState) -> str:
    """Return the word for a worker's state. A held worker of a worker set is shown as not wanted: the set
    holds it, and clients need not release it."""
    row = world.tasks.get(worker)
    is_held = state is TaskState.PENDING and row is not None and row.held
    return _NOT_WANTED if is_held and not whole.is_array else state


def _diagnose(parts: Parts, task: Task) -> Diagnosis:
    """Return the diagnosis of a task over all nodes and devices."""
    forecasts = parts.leadership.forecasts()
    return diagnose(parts.surveys.survey_nodes(parts.world, task, parts.policy, parts.clock.now(), forecasts))


def _explanation(parts: Parts, viewer: Identity, record: TaskRecord) -> ShownExplanation:
    view, task = viewpoint(parts, viewer), record.task
    row = parts.world.tasks.get(task.id)
    if row is not None and row.state is TaskState.PENDING:
        explanation, fields = _waiting(parts, view, row)
    else:
        explanation = _not_waiting(parts, view.now, record)
        fields = view.outlook(explanation)
    if notice := parts.records.pending.notice(task):
        fields["message"] += f" ({notice}; gpubroker stats says why)"
    state = ShownState(explanation.state)
    return ShownExplanation(**fields, id=task.id, name=task.name, state=state, inherits=explanation.inherits)


def _not_waiting(parts: Parts, now: Instant, record: TaskRecord) -> Explanation:
    """Return the explanation of a task that does not wait: what it does, how it ended, or that the World does
    not have it yet."""
    world, task = parts.world, record.task
    row = world.tasks.get(task.id)
    latest = task if row is None else row
    if latest.is_terminal:
        ended = _ended(replace(record, task=latest))
        return Explanation(task.id, latest.state, ended, len(world.queue))
    if row is None:
        unseen = Blocker(Reason.PENDING_EVALUATION, NOT_YET_SEEN.message)
        waits = Explanation(task.id, task.state, unseen.message, len(world.queue), unseen.reason)
        return replace(waits, blockers=(unseen,))
    return explain(world, task.id, parts.policy, now)


def _waiting(parts: Parts, view: Viewpoint, task: Task) -> tuple[Explanation, dict[str, Any]]:
    """Return the explanation of a waiting task, and the fields of the answer."""
    diagnosis = _diagnose(parts, task)
    explanation, advice, start = explain_pending(diagnosis), None, None
    if not isinstance(task.holder, Inference):
        advice = advise(diagnosis, _highest_priority(parts, view.viewer))
    elif explanation.reason is Reason.MODEL_LOADING:  # It waits for its model, not for room on a node.
        start = expected_send_at(parts.world, task, parts.policy, parts.leadership.forecasts(), view.now)
    leaderless = no_leader(parts.world, parts.leadership, task)
    if leaderless is None:
        return explanation, view.outlook(explanation, advice, start)
    explanation = _without_leader(explanation, leaderless)
    return explanation, view.outlook(explanation, advice, start) | NO_ADVICE


def _without_leader(found: Explanation, leaderless: Blocker) -> Explanation:
    """Return the explanation with the missing leader as a blocker, beside the blockers that would remain with
    a leader."""
    others = [blocker for blocker in found.blockers if blocker.reason is not Reason.PENDING_EVALUATION]
    first, *more = sorted([leaderless, *others], key=lambda blocker: blocker.reason.tier)
    return replace(found, reason=first.reason, message=first.message, blockers=(first, *more))


def _ended(record: TaskRecord) -> str:
    """Return a text that says how and when the task ended. A lease has no run that could succeed, so its text
    is about its release."""
    task = record.task
    if task.finished_at is None:
        return ""
    finished_at = rfc3339(task.finished_at)
    if not isinstance(task.holder, External):
        failure = record.failure or {}
        reason = str(failure.get("message") or failure.get("kind") or "").partition("\n")[0]
        return f"{task.state} at {finished_at}, {_how_far(task, task.finished_at)}" + (
            f": {reason}" if reason else ""
        )
    match task.state:
        case TaskState.SUCCEEDED:
            return f"released at {finished_at}; it holds nothing any more"
        case TaskState.CANCELLED:
            return f"cancelled at {finished_at}, before it held anything"
        case _:
            return f"ended at {finished_at} without having been released; GET /leases/{task.id} has its error"


def _how_far(task: Task, finished_at: Instant) -> str:
    if task.started_at is None:
        return "before it started" if not task.fence else f"before attempt {task.fence} started"
    on_node = f" on {task.node}" if task.node else ""
    attempt = f" in attempt {task.fence}" if task.fence > 1 else ""
    return f"after {finished_at - task.started_at:.0f} s{attempt}{on_node}"


_REFUSED = 422
"""The status of problems that are part of the answer. Any other problem ends the request."""


@resource.route(
    "POST /tasks/simulate",
    "tasks_simulate",
    Scope.TASKS_READ,
    Simulation,
    "malformed-json priority-not-allowed payload-too-large unsupported-media-type validation-failed "
    "follower-stale too-many-requests leader-outdated",
)
async def simulate_task(caller: Caller, parts: Parts, body: JsonBody[SimulateTask]) -> Response:
    """Say what would happen to a task if it were submitted now, without doing anything.

    The body is that of a submit, but `run` may be left out: only the demand is then judged. With `run`, the
    token needs the scopes that the submit needs.
    """
    if body.run is not None:
        caller.require(Scope.TASKS_WRITE, "simulating a run")
    await parts.freshness.catch_up()
    verdict = await parts.submissions.judged(caller, submission_of(body, caller.tenant))
    async with parts.answers.slot():
        view = viewpoint(parts, caller)
        if not isinstance(verdict, Refused):
            return answer(_simulated(parts, view, verdict))
        problem = problem_of(verdict)
        is_invalid = verdict.code == INVALID and verdict.would_be is None
        if is_invalid or problem.kind.status != _REFUSED:
            raise problem
        return answer(_refused(parts, view, problem, verdict.would_be))


def _simulated(parts: Parts, view: Viewpoint, new: AdmittedTask) -> Simulation:
    diagnosis = _diagnose(parts, new.task)
    explanation, advice = explain_pending(diagnosis), advise(diagnosis, _highest_priority(parts, view.viewer))
    explanation = replace(explanation, message=advice.message(explanation))
    eviction = advice.way.eviction
    return Simulation(
        **view.outlook(explanation, advice),
        **_asked(new),
        verdict=advice.verdict,
        refusal=None,
        places=view.places(advice.way.places),
        victims=tuple(map(view.run, eviction.victims)) if eviction else (),
    )


def _refused(parts: Parts, view: Viewpoint, problem: Problem, new: AdmittedTask | None) -> Simulation:
    """Return the simulation of a task that a submit would refuse, with the refusal and its remedies."""
    fields = view.outlook(Explanation(TaskId(""), TaskState.PENDING, problem.detail, len(parts.world.queue)))
    if new is not None:
        advice = advise(_diagnose(parts, new.task), _highest_priority(parts, view.viewer))
        fields["remedies"] = view.remedies(advice)
    refusal = Refusal(problem.code, problem.detail, tuple(problem.errors))
    return Simulation(**fields, **_asked(new), verdict="refused", refusal=refusal, places=(), victims=())


def _highest_priority(parts: Parts, viewer: Identity) -> int:
    return parts.submissions.permissions.highest_priority(viewer)


def _asked(new: AdmittedTask | None) -> dict[str, Any]:
    """Return the fields of a simulation that describe the demand of the task. They are None without a
    task."""
    return {
        "priority": None if new is None else new.task.priority,
        "resources": None if new is None else demand_view(new.task.demand),
        "sizing": None if new is None else _sizing(new),
    }


def _sizing(new: AdmittedTask) -> Sizing | None:
    """Return how the size of the task was learned, or that the task takes whole devices because it states no
    size."""
    return new.spec.sizing or unstated_size(new.task.demand)
