"""Which tenant comes first, and how the order moves while a cycle gives."""

from typing import Any

from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Mib
from gpubroker_server.core.explain.explain import position_of
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.world.world import World

from tests.builders import (
    NOW,
    a_device,
    a_task,
    a_world,
    holding,
    let_go,
)
from tests.core.gangs import a_gang, bundles
from tests.core.naive import Naive
from tests.core.planning.test_plan_properties import step_of

PLAIN = Policy()


def tasks(tenant: str, count: int, **fields: Any) -> list[Task]:
    return [a_task(f"{tenant}-{n:03}", tenant=tenant, **{"gpu_mb": 10, **fields}) for n in range(count)]


def admitted(world: World, policy: Policy = PLAIN, now: Instant = NOW) -> list[str]:
    """The tenants of what one cycle starts, in order."""
    decisions = plan_cycle(world, policy, now, budget=10_000).decisions
    return [world.tasks[w.task.id].tenant for d in decisions if d.why == "admit" for w in d.tasks]


def test_one_cycle_gives_to_all_tenants_in_turn_however_late_one_submitted() -> None:
    early, late = tasks("early", 10, submitted_at=NOW - 50.0), tasks("late", 10, submitted_at=NOW)
    world = a_world(a_device(mb=100), *early, *late)
    given = admitted(world)
    assert len(given) == 10
    assert given.count("early") == given.count("late") == 5


def test_a_tenant_with_twice_the_weight_gets_twice_as_much() -> None:
    world = a_world(a_device(mb=120), *tasks("heavy", 20), *tasks("light", 20))
    policy = Policy(tenants=(TenantPolicy("heavy", weight=2.0),))
    given = admitted(world, policy)
    assert (given.count("heavy"), given.count("light")) == (8, 4)


def test_a_tenant_that_used_much_comes_after_one_that_used_little() -> None:
    world = a_world(
        a_device("gpu0", mb=100),
        a_device("gpu1", mb=100),
        holding(a_task("run", tenant="busy", gpu_mb=90), "gpu0"),
        *tasks("busy", 10),
        *tasks("idle", 10),
    )
    world.accounts.change("busy", 0, Instant(NOW + 86_400.0))
    let_go(world, "run", requeue=False)
    given = admitted(world)
    assert given.index("idle") == 0
    assert given[:4] == ["idle"] * 4


def test_a_tiny_difference_does_not_decide() -> None:
    """Both are on the same step, so the task that waits longer goes first."""
    world = a_world(
        a_device(mb=1000),
        holding(a_task("run", tenant="acme", gpu_mb=1), "gpu0"),
        *tasks("acme", 1, submitted_at=NOW - 30.0, gpu_mb=100),
        *tasks("zeta", 1, gpu_mb=100),
    )
    assert admitted(world) == ["acme", "zeta"]


def test_who_is_below_its_guarantee_goes_first_whatever_it_has_used() -> None:
    policy = Policy(tenants=(TenantPolicy("owner", "lab", Mib(50)), TenantPolicy("guest", "lab", Mib(0))))
    world = a_world(
        a_device(mb=100),
        *tasks("owner", 10),
        *tasks("guest", 10, submitted_at=NOW - 600.0),
    )
    world.accounts.change("owner", 100, Instant(NOW - 86_400.0))
    world.accounts.change("owner", -100, NOW)
    assert admitted(world, policy)[:5] == ["owner"] * 5


def test_the_band_goes_before_guarantees_and_shares() -> None:
    policy = Policy(tenants=(TenantPolicy("owner", "lab", Mib(50)),))
    world = a_world(a_device(mb=20), *tasks("owner", 2), *tasks("other", 2, priority=80))
    assert admitted(world, policy) == ["other", "other"]


def test_where_one_tenant_waits_alone_its_tasks_go_by_priority_and_age() -> None:
    low, high = a_task("low", gpu_mb=10, priority=40), a_task("high", gpu_mb=10, priority=60)
    world = a_world(low, high, holding(a_task("run", tenant="other", gpu_mb=10), "gpu0"))
    assert FairShares(world, PLAIN, NOW).has_one_tenant
    assert [d.subject for d in plan_cycle(world, PLAIN, NOW).decisions] == ["high", "low"]


def test_the_heavier_stream_goes_first_among_tasks_of_one_aged_priority() -> None:
    policy = Policy(streams=(("nightly", 0.5), ("release", 4.0)))
    world = a_world(
        *(a_task(name, gpu_mb=10, stream=name) for name in ("nightly", "release")),
        a_task("plain", gpu_mb=10),
        a_task("urgent", gpu_mb=10, priority=51, stream="nightly"),
    )
    order = [decision.subject for decision in plan_cycle(world, policy, NOW).decisions]
    assert order == ["urgent", "release", "plain", "nightly"]


def test_a_position_counts_the_tasks_of_all_tenants() -> None:
    world = a_world(
        a_device(mb=100),
        holding(a_task("run", tenant="acme", gpu_mb=50), "gpu0"),
        *tasks("acme", 2, submitted_at=NOW - 30.0),
        *tasks("zeta", 3),
    )
    assert position_of(world, world.tasks[tasks("acme", 1)[0].id], PLAIN, NOW) == 4
    assert position_of(world, world.tasks[tasks("zeta", 1)[0].id], PLAIN, NOW) == 1


def test_what_is_freed_for_a_gang_counts_for_its_tenant_at_once() -> None:
    """In the plain planner's plan as well."""
    low = holding(a_task("low", priority=10, tenant="other", gpu_mb=80), "gpu0")
    high = holding(a_task("high", priority=90, tenant="other", gpu_mb=60), "gpu1")
    gang = a_gang("gang", *bundles(1, gpu_mb=80), priority=60, tenant="zeta")
    last = a_task("first", gpu_mb=20, tenant="zeta"), a_task("second", gpu_mb=20, submitted_at=NOW + 1.0)
    world = a_world(a_device(mb=80), a_device("gpu1", mb=80), low, high, gang, *last)
    steps = [step_of(decision) for decision in plan_cycle(world, Policy(), NOW).decisions]
    assert [step[:2] for step in steps] == [("preempt", "gang"), ("admit", "second")]
    assert Naive(world, Policy(), NOW).plan(steps) == steps
