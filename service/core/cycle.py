"""The planning cycle: pending tasks in order -> placement -> preemption -> decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.core.agenda import Agenda
from service.core.decide import admit, evict, withdraw
from service.core.demand import Demand
from service.core.draft import Draft
from service.core.offers import Offers
from service.core.ordering import OrderKey
from service.core.placement import Places
from service.core.plan import Decision
from service.core.policy import Policy
from service.core.preemption import plan_eviction
from service.core.task import Task
from service.core.units import Instant
from service.core.world import World


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a cycle stands after one of its slices."""

    ordered_at: Instant
    """Ageing stands still during a cycle, so that every task is examined once."""
    after: OrderKey | None = None
    refused: Mapping[Demand, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """One slice of a cycle. Its decisions build on each other, in this order."""

    decisions: tuple[Decision, ...]
    cursor: Cursor | None
    """None when the cycle is finished."""


def plan_cycle(
    world: World, policy: Policy, now: Instant, cursor: Cursor | None = None, budget: int = 256
) -> Plan:
    """Decide what to start and whom to stop, examining at most `budget` tasks.

    A new cycle (no cursor) first lets delayed tasks whose time has come into the queue of this World,
    which is all that it changes. The next slice needs a World in which this slice's decisions are applied.
    Work-conserving: a task for which there is no room holds nobody back, unless room is pledged to it.
    """
    draft = Draft(world)
    decisions: list[Decision] = []
    if cursor is None:
        world.enter_due(now)
        cursor = Cursor(ordered_at=now)
        stragglers = sorted(task for task in draft.pledged() if task not in world.queue)
        decisions += [withdraw(draft, task) for task in stragglers]
    places, offers = Places(draft, policy, now), Offers(draft, policy, now)
    agenda = Agenda(world, policy, cursor.ordered_at, cursor.after, cursor.refused)
    after = cursor.after
    for _ in range(budget):
        head = agenda.next()
        if head is None:
            return Plan(tuple(decisions), None)
        after = head.key
        task = world.tasks[head.task]
        if not draft.pledges_of(task.id) and agenda.has_refused(task.demand, task.priority):
            continue
        decision = decide(draft, places, offers, task, now)
        if decision is not None:
            decisions.append(decision)
        elif not draft.pledges_of(task.id):
            agenda.refuse(task)
    return Plan(tuple(decisions), Cursor(cursor.ordered_at, after, agenda.refused))


def decide(draft: Draft, places: Places, offers: Offers, task: Task, now: Instant) -> Decision | None:
    """Admit the task, or make room for it, or neither. One with pledges waits for what they bring."""
    placement = places.best(task)
    if placement is not None:
        return admit(draft, task, placement, now)
    if draft.pledges_of(task.id):
        return None
    eviction = plan_eviction(offers, task, now)
    return None if eviction is None else evict(draft, task, eviction, now)
