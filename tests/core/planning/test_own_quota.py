"""How a task makes room above the quota of its tenant: among that tenant's own runs."""

from typing import Any

from gpubroker_server.core.domain.policy import CustomLimit, Policy, TenantPolicy
from gpubroker_server.core.domain.task import Placement, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, TaskId
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import NOW, a_device, a_sample, a_task, a_world, commit, holding, let_go, submit
from tests.core.gangs import a_gang, bundles
from tests.core.naive import Naive

POLICY = Policy(tenants=(TenantPolicy("small", guaranteed_mb=Mib(40)), TenantPolicy("large")))


def a_run(name: str, device: str = "n1/gpu0", *, seconds: float = 100.0, **fields: Any) -> Any:
    task = a_task(name, **{"tenant": "small", "gpu_mb": 20, "priority": 40, **fields})
    return holding(task, device, started_at=Instant(NOW - seconds))


def a_cluster(*parts: Any, mb: int = 80) -> World:
    """Two nodes with one device each: there is more room than the tenant may have."""
    return a_world(a_device("gpu0", "n1", mb=mb), a_device("gpu0", "n2", mb=mb), *parts)


def urgent(mb: int = 20, **fields: Any) -> Any:
    return a_task("urgent", **{"tenant": "small", "gpu_mb": mb, "priority": 60, **fields})


def asked_to_leave(world: World, policy: Policy = POLICY, cache: PlanCache | None = None) -> list[str]:
    decisions = plan_cycle(world, policy, NOW, cache=cache or PlanCache()).decisions
    return [write.task.id for decision in decisions if decision.why == "preempt" for write in decision.tasks]


def test_task_above_its_quota_stops_runs_of_its_own_tenant_to_make_room() -> None:
    world = a_cluster(a_run("old"), a_run("new", seconds=5.0), urgent())
    assert asked_to_leave(world) == ["new"]
    assert asked_to_leave(a_cluster(a_run("old"), a_run("new"), urgent(40))) == ["new", "old"]


def test_task_above_the_whole_quota_of_its_tenant_stops_no_run() -> None:
    world = a_cluster(a_run("old"), a_run("new"), urgent(50))
    assert asked_to_leave(world) == []
    assert Naive(world, POLICY, NOW).plan() == []


def test_of_many_runs_no_more_are_stopped_than_the_quota_lacks() -> None:
    policy = Policy(tenants=(TenantPolicy("small", guaranteed_mb=Mib(90)),))
    runs = [a_run(f"r{n}", f"n{n % 2 + 1}/gpu0", gpu_mb=10, seconds=100.0 - n) for n in range(9)]
    assert sorted(asked_to_leave(a_cluster(*runs, urgent()), policy)) == ["r7", "r8"]


def test_it_starts_when_they_have_left_and_they_wait() -> None:
    world = a_cluster(a_run("old"), a_run("new", "n2/gpu0", seconds=5.0), urgent())
    told = WhatIf(Draft(world), POLICY, NOW).way(urgent()).eviction
    assert told is not None
    assert [run.id for run in told.victims] == ["new"]
    cache = PlanCache()
    commit(world, plan_cycle(world, POLICY, NOW, cache=cache).decisions)
    assert plan_cycle(world, POLICY, NOW, cache=cache).decisions == (), "it waits for them"
    waiting = world.tasks[TaskId("urgent")]
    assert WhatIf(Draft(world), POLICY, NOW).way(waiting).places is None, "and so it is told"
    let_go(world, "new")
    commit(world, plan_cycle(world, POLICY, Instant(NOW + 1.0), cache=cache).decisions)
    assert world.tasks[TaskId("urgent")].state is TaskState.ADMITTED
    assert world.tasks[TaskId("new")].state is TaskState.PENDING
    assert plan_cycle(world, POLICY, Instant(NOW + 2.0), cache=cache).decisions == ()


def test_neither_others_nor_equals_are_stopped_for_a_quota() -> None:
    other = a_run("other", tenant="large", priority=5)
    world = a_cluster(other, a_run("equal", gpu_mb=40, priority=60), urgent())
    assert asked_to_leave(world) == []
    assert WhatIf(Draft(world), POLICY, NOW).way(urgent()).eviction is None


def test_shields_hold_and_what_is_switched_off_is_off() -> None:
    shielded = [a_run(f"r{n}", seconds=1.0, preemptions=3) for n in range(2)]
    assert asked_to_leave(a_cluster(*shielded, urgent())) == []
    off = Policy(tenants=POLICY.tenants, preemption=False)
    world = a_cluster(a_run("a"), a_run("b"), urgent())
    assert asked_to_leave(world, off) == []
    assert WhatIf(Draft(world), off, NOW).way(urgent()).eviction is None


def test_no_run_is_preempted_for_a_quota_while_a_limit_stops_the_task() -> None:
    policy = replace(POLICY, custom_limits=(CustomLimit("licence", 0.0),))
    world = a_cluster(a_run("a"), a_run("b"), urgent(custom={"licence": 1.0}))
    assert asked_to_leave(world, policy) == []


def test_no_run_is_preempted_for_a_quota_if_there_would_still_be_no_place() -> None:
    foreign = a_run("foreign", gpu_mb=80, tenant="large", priority=60)
    full = a_run("full", "n2/gpu0", gpu_mb=60, tenant="large", priority=60)
    world = a_cluster(foreign, full, a_run("mine", "n2/gpu0", gpu_mb=20), urgent(40))
    cache = PlanCache()
    assert asked_to_leave(world, cache=cache) == []
    assert asked_to_leave(world, cache=cache) == [], "which is remembered"
    let_go(world, "full")
    world.measure([a_sample("n2/gpu0", NOW)])
    assert asked_to_leave(world, cache=cache) == ["mine"]


def test_a_run_elsewhere_gives_quota_and_a_free_gpu_the_place() -> None:
    full = a_run("full", "n1/gpu0", gpu_mb=40, tenant="large", priority=60)
    world = a_cluster(full, a_run("mine", "n1/gpu0", gpu_mb=40), urgent(40))
    decision = plan_cycle(world, POLICY, NOW).decisions[0]
    assert [write.task.id for write in decision.tasks] == ["mine"]
    assert [write.pledge.device for write in decision.pledges] == ["test/n1/gpu0"], "the fullest with room"


def test_quota_that_is_coming_is_waited_for() -> None:
    leaving = a_run("leaving", gpu_mb=20)
    world = a_cluster(leaving, a_run("mine"), urgent())
    assert asked_to_leave(world) in (["leaving"], ["mine"])
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    submit(world, a_task("next", tenant="small", gpu_mb=20, priority=61))
    left = [task.id for task in world.tasks.values() if task.state is TaskState.RUNNING]
    cache = PlanCache()
    for _ in range(2):
        stays = asked_to_leave(world, cache=cache)
        assert stays == [], f"{left} stays: of higher priority, it takes what is being freed"


def test_a_gang_makes_room_in_its_quota_as_well() -> None:
    runs = [a_run("a"), a_run("b", "n2/gpu0", seconds=50.0)]
    gang = a_gang("gang", *bundles(2, gpu_mb=10), tenant="small", priority=60, strategy="strict_spread")
    assert asked_to_leave(a_cluster(*runs, gang)) == ["b"]


def test_what_its_cohort_lends_is_room_in_the_quota_too() -> None:
    tenants = (TenantPolicy("small", "lab", Mib(20)), TenantPolicy("other", "lab", Mib(20)))
    world = a_cluster(a_run("mine"), a_run("lent"), urgent())
    assert len(asked_to_leave(world, Policy(tenants=tenants))) == 1


def test_refusal_of_a_shielded_task_is_not_reused_for_one_that_gives_way() -> None:
    """The first could not be stopped for `wide` by the time that is to start; its likes could be."""
    wide = a_task("wide", tenant="large", priority=65, gpu_mb=80, custom={"licence": 1.0})
    there, start = (Placement(NodeName("n1"), ((DeviceKey("test/n1/gpu0"), Mib(80)),)),), Instant(NOW + 60.0)
    kept = Forecast(wide.id, there, start, start, Instant(NOW + 999.0), 0, Basis.STATED)
    likes = {"tenant": "small", "gpu_mb": 20, "priority": 60}
    shielded = a_task("shielded", preemptions=3, submitted_at=Instant(NOW - 9.0), **likes)
    world = a_cluster(a_run("old"), a_run("new", seconds=5.0), shielded, urgent(), wide)
    policy = replace(POLICY, custom_limits=(CustomLimit("licence", 0.0),))
    cache = PlanCache()
    for moment in (NOW, Instant(NOW + 1.0)):
        plan = plan_cycle(world, policy, moment, cache=cache, forecasts=[kept])
        assert [(decision.subject, decision.why) for decision in plan.decisions] == [("urgent", "preempt")]
