"""Find remedies for a waiting task, by planning the task again with one change at a time."""

from collections.abc import Iterator
from functools import cache
from math import inf
from typing import Any

from msgspec.structs import replace

from gpubroker_server.core.admission.feasibility import check_priority
from gpubroker_server.core.domain.task import model_of
from gpubroker_server.core.domain.units import Seconds, in_time
from gpubroker_server.core.explain.blockers import task_label
from gpubroker_server.core.explain.demand_changes import (
    cheaper_kind,
    fewer_gpus,
    fewer_ranks,
    looser_strategy,
    smaller_cpu_and_memory,
    smaller_gpu_memory,
    smaller_ranks,
    wider_constraints,
)
from gpubroker_server.core.explain.helpful_ends import first_end
from gpubroker_server.core.explain.remedy_planner import Remedy, RemedyPlanner, first_step
from gpubroker_server.core.explain.survey import Survey
from gpubroker_server.core.explain.what_if import WhatIf, places_text, seconds_until
from gpubroker_server.core.lifecycle.model_turns import pinned_in_the_way
from gpubroker_server.core.planning.find_way import Start, Wait, Way
from gpubroker_server.core.planning.forecasts.future_capacity import ExpectedEnds
from gpubroker_server.core.planning.nodes.draft import Draft

MIN_SECONDS = 1.0
"""The run time below which a shorter run time is not offered as a remedy."""

MAX_NODES = 12
"""The most nodes on which victims are looked for when a higher priority is tried."""


def remedies(
    survey: Survey, now: Way, expected_ends: ExpectedEnds, what_if: WhatIf, highest_priority: int = 100
) -> tuple[Remedy, ...]:
    """Return remedies for a task without room, the smallest change first. The cost is a few plans of this one
    task. `now` is the planner's present decision; `highest_priority` is the highest that the caller may
    set."""
    planner = RemedyPlanner(survey, what_if)
    is_deferred = planner.is_deferred
    if not isinstance(now, Wait):
        highest_priority = 0  # the task starts without a higher priority
    candidates = (
        iter([_release(planner)]) if is_deferred else _others(planner, expected_ends, highest_priority)
    )
    return tuple(remedy for remedy in candidates if remedy is not None)


def _others(
    planner: RemedyPlanner, expected_ends: ExpectedEnds, highest_priority: int
) -> Iterator[Remedy | None]:
    yield _shorter_run_time(planner)
    yield _after_an_end(planner, expected_ends)
    yield _after_unpinning(planner)
    if planner.task.demand.bundles:
        yield looser_strategy(planner)
        yield fewer_ranks(planner)
        yield smaller_ranks(planner)
    else:
        yield smaller_gpu_memory(planner)
        yield fewer_gpus(planner)
    yield cheaper_kind(planner)
    yield from wider_constraints(planner)
    if not planner.task.demand.bundles:
        yield smaller_cpu_and_memory(planner)
    yield _more_priority(planner, highest_priority)


def _release(planner: RemedyPlanner) -> Remedy | None:
    task = planner.task
    if task.awaits or planner.draft.world.queue.pause_of(task) is not None:
        return None
    change: dict[str, Any] = {}
    if task.held:
        change["held"] = False
    if task.not_before:
        change["not_before"] = None
    free = replace(task, held=False, not_before=None)
    text = "if released" if task.held else "without not_before"
    return planner.remedy(change, free, planner.what_if.way(free), text)


def _shorter_run_time(planner: RemedyPlanner) -> Remedy | None:
    """Return the remedy to state a run time that ends before the start of the first task that it would
    delay."""
    survey, task = planner.survey, planner.task
    ahead = planner.what_if.reserved_from(task) if survey.forecasts else ()
    seconds = Seconds(
        float(int(min((seconds_until(reservation, survey) for reservation in ahead), default=0.0)))
    )
    if seconds < MIN_SECONDS or seconds >= (task.expected_seconds or inf):
        return None
    shorter = replace(task, expected_seconds=seconds)
    places = planner.what_if.places(shorter)
    if places is None:
        return None
    text = f"with expected_seconds at most {seconds:.0f}"
    return planner.remedy({"expected_seconds": seconds}, shorter, Start(places), text)


def _after_an_end(planner: RemedyPlanner, expected_ends: ExpectedEnds) -> Remedy | None:
    task = planner.task
    if planner.draft.pledges_of(task.id):
        return None
    first = first_end(planner.survey, expected_ends)
    if first is None:
        return None
    end = first.within
    due = f"expected within {in_time(end.p50_seconds)}" if end.p50_seconds else "any moment"
    run = task_label(first.run.id, first.run.tenant, task)
    message = f"when {run} ends ({due}), it starts on {places_text(planner.draft, first.places)}"
    return Remedy({}, task, message, Start(first.places), first.run, end)


def _after_unpinning(planner: RemedyPlanner) -> Remedy | None:
    """Return the remedy to unpin the first pinned model without which the task has room."""
    survey, task = planner.survey, planner.task
    for model in pinned_in_the_way(survey.draft.world, task.demand):
        without = Draft(survey.draft.world)
        without.remove_run(model)
        what_if = WhatIf(without, survey.policy, survey.now, survey.forecasts)
        places = what_if.places(task)
        if places is not None:
            name, where = model_of(model).model, places_text(planner.draft, places)
            command = f"`gpubroker pin {name} --off`"
            message = f"when the pinned model {name} is unpinned ({command}), it starts on {where}"
            return Remedy({}, task, message, Start(places), model)
    return None


def _more_priority(planner: RemedyPlanner, highest: int) -> Remedy | None:
    """Return the remedy to raise the priority to the lowest one that helps."""
    task, what_if = planner.task, planner.what_if

    def helps(priority: int) -> bool:
        raised = replace(task, priority=priority)
        if check_priority(raised.demand, priority, planner.survey.policy) is not None:
            return False
        return what_if.could_start(raised)

    @cache
    def attempt(priority: int) -> Way:
        return what_if.way(replace(task, priority=priority), MAX_NODES)

    steps = [step for step in _steps(planner) if task.priority < step <= highest]
    lowest = first_step(steps, helps)
    if lowest is None:
        return None
    priority: int | None = lowest
    if isinstance(attempt(lowest), Wait):
        priority = first_step(
            [step for step in steps if step > lowest], lambda step: not isinstance(attempt(step), Wait)
        )
    if priority is None:
        return None
    raised = replace(task, priority=priority)
    text = f"with priority {priority} or above"
    return planner.remedy({"priority": priority}, raised, attempt(priority), text)


def _steps(planner: RemedyPlanner) -> list[int]:
    """Return the priorities at which the planner's decision may change, in ascending order."""
    steps = planner.what_if.steps(planner.nodes)
    for pledges in planner.draft.world.pledges.values():
        steps |= {pledge.priority + 1 for pledge in pledges.values()}
    steps |= {limit.priority_threshold for limit in planner.survey.policy.custom_limits}
    return sorted(steps)
