"""In which order forecasts are made."""

import pytest
from gpubroker_server.core.domain.policy import TenantPolicy
from gpubroker_server.core.domain.units import Instant, Mib, Seconds
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.waiting import waiting
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from msgspec.structs import replace

from tests.builders import NOW, a_device, a_task, a_world, commit, holding
from tests.core.naive import Naive
from tests.core.naive_foretold import in_order_of_forecasts
from tests.core.scenarios import POLICY, Chapter, Story, clusters, stories

AMPLE = replace(
    POLICY,
    ageing_seconds_per_point=Seconds(1.0),
    custom_limits=tuple(replace(limit, amount=1000.0) for limit in POLICY.custom_limits),
    tenants=tuple(TenantPolicy(tenant.name, weight=tenant.weight) for tenant in POLICY.tenants),
)
"""No limit and no quota is used up, so all wait for room."""


@given(clusters(), stories)
@settings(max_examples=120, deadline=None)
def test_forecasts_are_made_in_the_naive_twins_order(world: World, story: list[Chapter]) -> None:
    tale = Story(world)
    for chapter in story:
        for _ in tale.happens(chapter):
            pass
        world.enter_due(Instant(tale.now))
        found = waiting(Draft(world), AMPLE, Instant(tale.now), 1000)
        expected = in_order_of_forecasts(Naive(world, AMPLE, tale.now))
        assert [one[0].id for one in found if one] == [task.id for task in expected]
        commit(world, plan_cycle(world, AMPLE, Instant(tale.now), budget=10_000).decisions, tale.now)


@pytest.mark.parametrize("guaranteed_mb", [None, Mib(80)], ids=["room", "quota"])
def test_lower_band_run_passes_a_task_only_if_admitted_after_the_task_came(
    guaranteed_mb: Mib | None,
) -> None:
    """The run may have come long before."""
    for admitted_at, first in ((NOW - 50, "aged"), (NOW - 150, "light")):
        run = holding(a_task("run", tenant="zeta", priority=20, gpu_mb=80, submitted_at=NOW - 900), "gpu0")
        run = replace(run, task=replace(run.task, admitted_at=Instant(admitted_at)))
        aged = a_task("aged", tenant="zeta", gpu_mb=80, priority=69, submitted_at=NOW - 100)
        light = a_task("light", tenant="acme", gpu_mb=80, priority=69, submitted_at=NOW - 9)
        world = a_world(a_device(mb=90), run, aged, light)
        policy = replace(AMPLE, tenants=(TenantPolicy("zeta", guaranteed_mb=guaranteed_mb),))
        found = [one[0].id for one in waiting(Draft(world), policy, NOW, 8) if one]
        assert found[0] == first


def test_tasks_of_many_kinds_are_looked_through_in_turns() -> None:
    many = [a_task(f"t{n}", tenant=f"x{n % 2}", gpu_mb=n + 1, priority=69) for n in range(120)]
    found = list(waiting(Draft(a_world(a_device(), *many)), AMPLE, NOW, 1))
    assert found.count(None) >= 2
