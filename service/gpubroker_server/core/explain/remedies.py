"""What would let a task start that waits: found by planning it again with one thing changed, not guessed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from gpubroker_server.core.explain.admission import check_priority
from gpubroker_server.core.explain.blockers import called
from gpubroker_server.core.explain.demand_changes import (
    elsewhere,
    fewer_gpus,
    fewer_ranks,
    less_memory,
    less_of_the_node,
    looser,
    other_kind,
    smaller_ranks,
)
from gpubroker_server.core.explain.helpful_ends import first_end
from gpubroker_server.core.explain.remedy_planner import Remedy, Trials, first
from gpubroker_server.core.explain.survey import Survey
from gpubroker_server.core.explain.what_if import WhatIf, in_words, short_enough
from gpubroker_server.core.planning.find_way import Start, Wait, Way
from gpubroker_server.core.planning.forecasts.future_capacity import ExpectedEnds

MOST_NODES = 12
"""On so many nodes victims are looked for who would have to leave for a higher priority."""


def remedies(
    seen: Survey, now: Way, expected_ends: ExpectedEnds, what_if: WhatIf, highest_priority: int = 100
) -> tuple[Remedy, ...]:
    """All that were found for a task without room, what changes least first.

    `now`: what the planner would decide for it as it is; `highest_priority`: the most that whoever asks may
    give it. The work is bounded: a few plans for this one task, however large the cluster.
    """
    trials = Trials(seen, what_if)
    aside = trials.stands_aside
    if not isinstance(now, Wait):
        highest_priority = 0  # it has its turn as it is
    found = iter([_release(trials)]) if aside else _others(trials, expected_ends, highest_priority)
    return tuple(remedy for remedy in found if remedy is not None)


def _others(trials: Trials, expected_ends: ExpectedEnds, highest_priority: int) -> Iterator[Remedy | None]:
    yield _sooner_over(trials)
    yield _after_an_end(trials, expected_ends)
    if trials.task.demand.bundles:
        yield looser(trials)
        yield fewer_ranks(trials)
        yield smaller_ranks(trials)
    else:
        yield less_memory(trials)
        yield fewer_gpus(trials)
    yield other_kind(trials)
    yield from elsewhere(trials)
    if not trials.task.demand.bundles:
        yield less_of_the_node(trials)
    yield _more_priority(trials, highest_priority)


def _release(trials: Trials) -> Remedy | None:
    """What a person holds, or what waits for its hour, may have room."""
    task = trials.task
    if task.awaits:
        return None
    change: dict[str, Any] = {}
    if task.held:
        change["held"] = False
    if task.not_before:
        change["not_before"] = None
    free = replace(task, held=False, not_before=None)
    said = "released" if task.held else "without not_before"
    return trials.remedy(change, free, trials.what_if.way(free), said)


def _sooner_over(trials: Trials) -> Remedy | None:
    """Done before those start for whom its room is kept."""
    if not trials.seen.forecasts:
        return None
    found = short_enough(trials.seen, trials.what_if)
    if found is None:
        return None
    task, seconds = found
    said = f"said to end within {seconds:.0f} s (expected_seconds)"
    places = trials.what_if.places(task)
    if places is None:
        return None
    return trials.remedy({"expected_seconds": seconds}, task, Start(places), said)


def _after_an_end(trials: Trials, expected_ends: ExpectedEnds) -> Remedy | None:
    task = trials.task
    if trials.draft.pledges_of(task.id):
        return None
    found = first_end(trials.seen, expected_ends)
    if found is None:
        return None
    end = found.within
    when = f"expected within {end.p50_seconds:.0f} s" if end.p50_seconds else "any moment"
    who = called(found.run.id, found.run.tenant, task)
    message = f"when {who} ends ({when}) it starts on {in_words(trials.draft, found.places)}"
    return Remedy({}, task, message, found.places, after=found.run, within=end)


def _more_priority(trials: Trials, highest: int) -> Remedy | None:
    """The lowest priority that would do."""
    task, what_if = trials.task, trials.what_if

    def would_do(priority: int) -> bool:
        raised = replace(task, priority=priority)
        if check_priority(raised.demand, priority, trials.seen.policy) is not None:
            return False
        return what_if.could_start(raised)

    @cache
    def attempt(priority: int) -> Way:
        return what_if.way(replace(task, priority=priority), MOST_NODES)

    steps = [step for step in _steps(trials) if task.priority < step <= highest]
    hopeful = first(steps, would_do)
    if hopeful is None:
        return None
    priority: int | None = hopeful
    if isinstance(attempt(hopeful), Wait):
        priority = first(
            [step for step in steps if step > hopeful], lambda step: not isinstance(attempt(step), Wait)
        )
    if priority is None:
        return None
    raised = replace(task, priority=priority)
    said = f"with priority {priority} or above"
    return trials.remedy({"priority": priority}, raised, attempt(priority), said)


def _steps(trials: Trials) -> list[int]:
    """The priorities from which on a task may do what it may not below."""
    steps = trials.what_if.steps(trials.nodes)
    for pledges in trials.draft.world.pledges.values():
        steps |= {pledge.priority + 1 for pledge in pledges.values()}
    steps |= {limit.priority_threshold for limit in trials.seen.policy.custom_limits}
    return sorted(steps)
