"""What keeps a task from being placed: of a gang, the first rank for which there is no room, and why."""

from dataclasses import replace

from service.core.admission import Refusal, check_priority
from service.core.blockers import Blocker, room_blockers, waiting_for_preemption
from service.core.decide import admit
from service.core.draft import Draft
from service.core.gang import place_ranks
from service.core.gang_admission import IN_WORDS, check_demand
from service.core.ground import grounds_of
from service.core.member import MemberState
from service.core.policy import Policy
from service.core.ranks import nodes_of, part_of
from service.core.reasons import Reason
from service.core.survey import Survey, survey
from service.core.task import Task
from service.core.units import Instant
from service.core.world import World

_OF_THE_WHOLE = frozenset({Reason.CONCURRENCY_LIMITED, Reason.QUOTA_EXHAUSTED})
"""What counts over all ranks."""


def look(seen: Survey) -> tuple[Survey, list[Blocker]]:
    """What a pending task finds, and everything that stands between it and a placement.

    For a gang both are told of the first rank that finds no room when those before it have theirs.
    """
    task, policy, now, world = seen.task, seen.policy, seen.now, seen.draft.world
    if not task.demand.bundles:
        return seen, room_blockers(seen)
    draft = seen.draft.copy()  # in which ranks are tried
    refusal = _refusal(world, task, policy)
    if refusal is not None:
        misses = refusal.code == "no-matching-device"
        reason = Reason.NO_MATCHING_DEVICE if misses else Reason.EXCEEDS_CAPACITY
        return survey(draft, part_of(task, 0), policy, now), [Blocker(reason, refusal.message)]
    whole = replace(task, demand=replace(task.demand, bundles=()))
    common = [b for b in room_blockers(survey(draft, whole, policy, now)) if b.reason in _OF_THE_WHOLE]
    seen, blocker = _first_without_room(draft, task, policy, now)
    return seen, [*common, *([] if blocker is None else [blocker])]


def _refusal(world: World, task: Task, policy: Policy) -> Refusal | None:
    devices = [book.device for book in world.books.values()]
    refusal = check_demand(task.demand, devices, world.nodes.values(), policy)
    return refusal or check_priority(task.demand, task.priority, policy)


def _first_without_room(
    draft: Draft, task: Task, policy: Policy, now: Instant
) -> tuple[Survey, Blocker | None]:
    least, grounds = task.demand.least_ranks, grounds_of(draft, task, policy, now)
    if place_ranks(task, least, grounds) is not None:
        return survey(draft, part_of(task, 0), policy, now), None
    fit, too_many = 0, least
    while too_many - fit > 1:
        some = (fit + too_many) // 2
        fit, too_many = (fit, some) if place_ranks(task, some, grounds) is None else (some, too_many)
    part = part_of(task, fit)
    if draft.pledges_of(task.id):
        seen = survey(draft, part, policy, now)
        return seen, waiting_for_preemption(seen)
    places = place_ranks(task, fit, grounds) if fit else None
    if places is not None:
        admit(draft, task, places, now)
    seen = survey(draft, part, policy, now)
    found = room_blockers(seen)
    has = f"there is room for {fit or 'none'} of the {least} ranks that must start together"
    if found:
        return seen, Blocker(found[0].reason, f"{has}; rank {fit}: {found[0].message}")
    how = IN_WORDS[task.demand.strategy]
    return seen, Blocker(Reason.FRAGMENTED, f"{has}; for rank {fit} there is none {how}")


def whereabouts(task: Task) -> str:
    """Where an active task is, and how its ranks are doing if it is a gang."""
    nodes = sorted(nodes_of(task))
    names = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    if not task.members:
        return names
    if task.started_at is None:
        ready = sum(member.state is MemberState.READY for member in task.members)
        return f"{names}, {ready} of its {len(task.members)} ranks ready"
    left = sum(not member.takes_part for member in task.members)
    gave_way = f", {left} more gave way" if left else ""
    return f"{names}, {len(task.members) - left} ranks{gave_way}"
