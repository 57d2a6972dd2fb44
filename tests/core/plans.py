"""A plan for components in one go."""

from collections.abc import Sequence

from service.core.backfill import Forecast
from service.core.fit import Component, FleetPlan, planning
from service.core.policy import Policy
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
