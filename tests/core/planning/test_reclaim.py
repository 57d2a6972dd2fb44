"""Who must give back what it has borrowed."""

from typing import Any

import pytest
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.task import TaskState, members_of
from gpubroker_server.core.domain.units import Instant, Mib, TaskId
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.preemption_verdict import PreemptionStatus, Protection
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.find_way import Wait, WaitReason
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import NOW, Holding, a_device, a_node, a_task, a_world, commit, holding, let_go
from tests.core.gangs import a_gang, bundles

POLICY = Policy(
    tenants=(
        TenantPolicy("owner", "lab", Mib(50)),
        TenantPolicy("guest", "lab", Mib(30)),
        TenantPolicy("other", guaranteed_mb=Mib(100)),
    )
)

ROOMY = Policy(tenants=(TenantPolicy("owner", "lab", Mib(80)), TenantPolicy("guest", "lab", Mib(0))))


def a_run(name: str, tenant: str, mb: int, *, seconds: float = 100.0, **fields: Any) -> Holding:
    task = a_task(name, tenant=tenant, gpu_mb=mb, **{"priority": 50, **fields})
    return holding(task, "gpu0", started_at=Instant(NOW - seconds))


def a_full_device(*parts: Any, mb: int = 80) -> World:
    return a_world(a_node(), a_device("gpu0", mb=mb), *parts)


def stopped(world: World, policy: Policy = POLICY) -> list[str]:
    decisions = plan_cycle(world, policy, NOW, budget=10_000).decisions
    return [write.task.id for decision in decisions if decision.why == "preempt" for write in decision.tasks]


def wants(mb: int = 20, **fields: Any) -> Any:
    return a_task("wants", **{"tenant": "owner", "gpu_mb": mb, "priority": 45, **fields})


def test_tenant_below_guarantee_reclaims_from_borrowers_of_any_priority() -> None:
    world = a_full_device(a_run("old", "guest", 40), a_run("new", "guest", 40, seconds=5.0), wants())
    assert stopped(world) == ["new"]


def test_nobody_is_left_with_less_than_its_guarantee() -> None:
    assert stopped(a_full_device(a_run("all", "guest", 80), wants())) == []
    world = a_full_device(a_run("large", "guest", 60), a_run("small", "guest", 20, seconds=900.0), wants())
    assert stopped(world) == ["small"]


def test_the_explanation_says_why_nothing_is_reclaimed() -> None:
    world = a_full_device(a_run("all", "guest", 80), wants())
    task = world.tasks[TaskId("wants")]
    told = advise(diagnose(survey_nodes(Draft(world), task, POLICY, NOW))).preemption
    assert told.why is PreemptionStatus.ALL_SHIELDED
    assert "; others of its cohort have borrowed " in told.message
    borrower = replace(task, tenant="guest")
    told = advise(diagnose(survey_nodes(Draft(world), borrower, POLICY, NOW))).preemption
    assert "borrowed" not in told.message, "it has nothing to reclaim"


def test_what_is_leaving_a_borrower_anyway_is_not_taken_twice() -> None:
    world = a_full_device(*(a_run(f"r{n}", "guest", 20, seconds=n + 1.0) for n in range(4)), wants())
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    more = a_task("more", tenant="owner", gpu_mb=20)
    world.add_task(more)
    commit(world, plan_cycle(world, POLICY, Instant(NOW + 1.0)).decisions)
    third = a_task("third", tenant="owner", gpu_mb=10)
    world.add_task(third)
    assert stopped(world) == []


def test_a_higher_band_is_not_asked_to_give_back() -> None:
    assert (
        stopped(a_full_device(*(a_run(f"r{n}", "guest", 40, priority=70) for n in range(2)), wants())) == []
    )


@pytest.mark.parametrize(("priority", "asked"), [(69, []), (95, ["r0"])])
def test_a_shield_holds_but_not_against_critical_tasks(priority: int, asked: list[str]) -> None:
    runs = [a_run(f"r{n}", "guest", 40, priority=69, preemptions=3) for n in range(2)]
    assert stopped(a_full_device(*runs, wants(priority=priority))) == asked


def test_who_has_its_guarantee_takes_nothing_back() -> None:
    held = a_run("held", "owner", 40)
    world = a_full_device(a_run("r0", "guest", 20), a_run("r1", "guest", 20), held, wants())
    assert stopped(world) == []


def test_only_members_of_the_cohort_give_back() -> None:
    assert stopped(a_full_device(a_run("r0", "other", 80), wants())) == []
    outside = Policy(tenants=(TenantPolicy("owner", guaranteed_mb=Mib(50)), *POLICY.tenants[1:]))
    assert stopped(a_full_device(*(a_run(f"r{n}", "guest", 40) for n in range(2)), wants()), outside) == []


def test_it_waits_for_room_that_is_coming_rather_than_to_ask_anybody() -> None:
    world = a_full_device(a_run("r0", "guest", 40), a_run("r1", "guest", 40), wants())
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    assert stopped(world) == []
    let_go(world, "r0")
    plan = plan_cycle(world, POLICY, NOW)
    assert [decision.subject for decision in plan.decisions if decision.why == "admit"] == ["wants"]


def test_borrowers_come_before_others_of_lower_priority() -> None:
    low = a_run("low", "other", 40, priority=5, seconds=1.0)
    world = a_full_device(low, a_run("r0", "guest", 40), wants(), mb=80)
    assert stopped(world) == ["low"], "the guest has little more than its guarantee, and cannot be asked"
    more = [a_run("r0", "guest", 35), a_run("r1", "guest", 35)]
    assert stopped(a_full_device(low, *more, wants(), mb=110)) == ["r0"]


def test_several_devices_are_taken_back_together() -> None:
    def on(device: str, name: str) -> Holding:
        return holding(a_task(name, tenant="guest", gpu_mb=20), device)

    runs = [on(f"gpu{n % 2}", f"r{n}") for n in range(4)]
    task = a_task("wants", tenant="owner", gpus=2, gpu_mb=15)
    world = a_world(a_node(), a_device("gpu0", mb=40), a_device("gpu1", mb=40), *runs, task)
    assert len(stopped(world)) == 2


def test_among_many_borrowers_those_are_asked_that_are_needed() -> None:
    runs = [a_run(f"r{n:02}", "guest", 10, seconds=n + 1.0) for n in range(12)]
    world = a_full_device(*runs, wants(35), mb=120)
    assert stopped(world) == ["r00", "r01", "r02", "r03"]
    assert stopped(a_full_device(*runs, wants(50), mb=70 + 50)) == ["r00", "r01", "r02", "r03", "r04"]


def test_among_many_borrowers_the_guarantee_holds_as_well() -> None:
    runs = [a_run(f"r{n:02}", "guest", 4, seconds=n + 1.0) for n in range(10)]
    assert stopped(a_full_device(*runs, wants(11), mb=40)) == []
    assert stopped(a_full_device(*runs, wants(8), mb=40)) == ["r00", "r01"]


def test_what_may_be_taken_back_is_explained() -> None:
    world = a_full_device(a_run("r0", "guest", 40), a_run("r1", "guest", 40), wants())
    told = advise(diagnose(survey_nodes(Draft(world), world.tasks[TaskId("wants")], POLICY, NOW))).preemption
    assert told.why is PreemptionStatus.POSSIBLE
    assert told.counts == {Protection.NONE: 1, Protection.PRIORITY: 1}


def test_nobody_is_said_to_be_stopped_for_a_tenant_without_quota_left() -> None:
    task = a_task("wants", tenant="other", gpu_mb=40)
    low = a_run("low", "guest", 40, priority=5)
    world = a_full_device(a_run("held", "other", 80), low, task, mb=120)
    assert WhatIf(Draft(world), POLICY, NOW).way(task) == Wait(WaitReason.QUOTA, by_tenant=True)


def test_borrower_that_leaves_first_does_not_retake_memory_being_reclaimed() -> None:
    """What is being freed for a guarantee is not free to those from whom it is taken back, whatever their
    priority."""
    runs = [a_run(f"r{n}", "guest", 20, priority=60, seconds=n + 1.0) for n in range(4)]
    world = a_full_device(*runs, wants(40))
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    for victim in ("r0", "r1"):
        let_go(world, victim)
        commit(world, plan_cycle(world, POLICY, Instant(NOW + 1.0)).decisions)
    assert world.tasks[TaskId("wants")].node == "n1"
    assert [world.tasks[TaskId(f"r{n}")].state for n in range(4)] == [TaskState.PENDING] * 2 + [
        TaskState.RUNNING
    ] * 2


def two_nodes(*parts: Any) -> World:
    """Of one device of 40 MiB each."""
    return a_world(a_device("gpu0", "n1", mb=40), a_device("gpu0", "n2", mb=40), *parts)


def on(device: str, name: str, tenant: str = "guest", *, seconds: float = 9.0, **fields: Any) -> Holding:
    task = a_task(name, tenant=tenant, gpu_mb=20, **{"priority": 60, **fields})
    return holding(task, device, started_at=Instant(NOW - seconds))


GANG = a_gang("gang", *bundles(2, gpu_mb=20), tenant="owner", priority=45, strategy="strict_spread")
FOUR = (
    on("n1/gpu0", "a"),
    on("n1/gpu0", "b", seconds=50.0),
    on("n2/gpu0", "c"),
    on("n2/gpu0", "d", seconds=50.0),
)


def test_gang_reclaims_on_several_nodes_from_borrowers_of_any_priority() -> None:
    world = two_nodes(*FOUR, GANG)
    told = WhatIf(Draft(world), POLICY, NOW).way(GANG).eviction
    asked = stopped(world)
    assert told is not None
    assert [run.id for run in told.victims] == asked == ["a", "c"]
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    for victim in asked:
        let_go(world, victim)
        commit(world, plan_cycle(world, POLICY, Instant(NOW + 1.0)).decisions)
    assert [member.node for member in members_of(world.tasks[GANG.id])] == ["n1", "n2"]


def test_a_gang_leaves_borrowers_what_they_are_guaranteed() -> None:
    policy = Policy(tenants=(TenantPolicy("owner", "lab", Mib(50)), TenantPolicy("guest", "lab", Mib(45))))
    assert stopped(two_nodes(*FOUR, GANG), policy) == []
    alone = replace(GANG, demand=replace(GANG.demand, bundles=bundles(1, gpu_mb=20)))
    assert stopped(two_nodes(*FOUR, alone), policy) == ["a"]


def test_gang_that_can_reclaim_nothing_still_preempts_lower_priority() -> None:
    low = on("n1/gpu0", "low", "other", priority=5), on("n2/gpu0", "low2", "other", priority=5)
    world = two_nodes(FOUR[0], FOUR[2], *low, GANG)
    told = WhatIf(Draft(world), POLICY, NOW).way(GANG).eviction
    assert stopped(world) == ["low", "low2"]
    assert told is not None
    assert [run.id for run in told.victims] == ["low", "low2"]


def test_a_gang_takes_nothing_back_where_preemption_is_off() -> None:
    assert stopped(two_nodes(*FOUR, GANG), replace(POLICY, preemption=False)) == []


def test_a_gang_without_gpus_takes_nothing_back() -> None:
    busy = holding(a_task("busy", tenant="guest", gpu_mb=40, cpu=64.0), "n1/gpu0")
    gang = a_gang("gang", *bundles(2, cpu=40.0), tenant="owner")
    assert stopped(two_nodes(busy, gang)) == []


def test_a_gang_waits_for_room_that_is_coming_rather_than_to_take_it_back() -> None:
    world = two_nodes(*FOUR, GANG)
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    assert stopped(world) == []


def test_a_gang_leaves_guarantees_whole_among_many_borrowers_too() -> None:
    runs = [on(f"n{n % 2 + 1}/gpu0", f"r{n}", seconds=n + 1.0) for n in range(10)]
    policy = Policy(tenants=(TenantPolicy("owner", "lab", Mib(80)), TenantPolicy("guest", "lab", Mib(120))))
    gang = a_gang("gang", *bundles(2, gpu_mb=40), tenant="owner", priority=45, strategy="strict_spread")
    world = a_world(a_device("gpu0", "n1", mb=100), a_device("gpu0", "n2", mb=100), *runs, gang)
    assert stopped(world, policy) == ["r0", "r1", "r2", "r3"]
    poorer = Policy(tenants=(TenantPolicy("owner", "lab", Mib(80)), TenantPolicy("guest", "lab", Mib(130))))
    assert stopped(world, poorer) == []


def test_owner_waits_if_too_little_is_lent_though_its_equal_was_refused() -> None:
    """The more urgent task of another tenant was refused the same before; only the owner may ask `guest`."""
    fixed = a_run("fixed", "outsider", 40, priority=90)
    lent = [a_run("lent", "guest", 35), wants(60)]
    before = a_task("before", tenant="outsider", gpu_mb=60, priority=80)
    assert stopped(a_full_device(fixed, *lent, before)) == []
    assert stopped(a_full_device(*lent, before)) == ["lent"]


def test_nothing_is_taken_back_where_too_few_gpus_could_be_cleared() -> None:
    lent = a_run("lent", "guest", 80)
    taken = holding(a_task("taken", tenant="outsider", gpu_mb=70, priority=90), "gpu1")
    both = wants(20, gpus=2)
    assert stopped(a_full_device(lent, a_device("gpu1", mb=80), taken, both), ROOMY) == []
    assert stopped(a_full_device(lent, a_device("gpu1", mb=80), both), ROOMY) == ["lent"]
