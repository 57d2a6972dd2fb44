"""Plans for components, and searches for victims, in one go."""

from collections.abc import Sequence
from math import inf

from service.core.backfill import Forecast
from service.core.draft import Draft
from service.core.fit import Component, FleetPlan, planning
from service.core.looks import Looks
from service.core.offers import Offers
from service.core.policy import Policy
from service.core.preemption import Eviction, Search, may_preempt
from service.core.task import Task
from service.core.units import Instant
from service.core.world import World
from tests.builders import NOW

POLICY = Policy()


def planned(
    world: World,
    *components: Component,
    policy: Policy = POLICY,
    now: Instant = NOW,
    forecasts: Sequence[Forecast] = (),
) -> FleetPlan:
    steps = planning(world, components, "default", policy, now, forecasts)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            plan: FleetPlan = end.value
            return plan


def eviction_for(draft: Draft, task: Task, policy: Policy = POLICY, now: Instant = NOW) -> Eviction | None:
    """The best of all nodes; None if there is none, or if the task need only wait."""
    offers = Offers(draft, policy, now)
    if not may_preempt(offers, task):
        return None
    search = Search(task, offers.nodes)
    assert search.go_on(offers, Looks(inf))
    return search.eviction(offers, now)
