"""Plans for components, and searches for victims, in one go."""

from collections.abc import Sequence

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.explain.fit import Component, FleetPlan, plan_fleet
from gpubroker_server.core.planning.budget import finish
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.offers import Offers
from gpubroker_server.core.planning.preemption.eviction import Eviction, may_preempt, search_eviction
from gpubroker_server.core.world.world import World

from tests.builders import NOW

POLICY = Policy()


def planned(
    world: World,
    *components: Component,
    policy: Policy = POLICY,
    now: Instant = NOW,
    forecasts: Sequence[Forecast] = (),
) -> FleetPlan:
    steps = plan_fleet(world, components, "default", policy, now, forecasts)
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
    found = finish(search_eviction(offers, task, offers.nodes, now))
    return found if isinstance(found, Eviction) else None


def whole(_demand: Demand) -> float:
    """The share of a GPU, where it makes no difference."""
    return 1.0
