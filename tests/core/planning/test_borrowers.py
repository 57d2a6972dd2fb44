"""Whom a task may stop whose tenant would borrow for it."""

from collections import Counter
from typing import Any

from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Checkpointed, Gone, Report, Started
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, Seconds
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.preemption_verdict import Protection
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import NOW, a_device, a_sample, a_task, a_world, commit, holding, submit
from tests.core.gangs import a_gang, bundles

TWO = (TenantPolicy("owner", "lab", Mib(40)), TenantPolicy("guest", "lab", Mib(20)))
"""Of the devices of these stories, one of 40 MiB is there: the others have gone."""


def a_run(name: str, tenant: str, mb: int, device: str = "gpu0", **fields: Any) -> Any:
    task = a_task(name, tenant=tenant, gpu_mb=mb, **{"priority": 40, **fields})
    return holding(task, device, started_at=Instant(NOW - 100.0))


def asked_to_leave(world: World, policy: Policy) -> list[str]:
    decisions = plan_cycle(world, policy, NOW, cache=PlanCache()).decisions
    return [write.task.id for decision in decisions if decision.why == "preempt" for write in decision.tasks]


POLICY = Policy(tenants=TWO)


def test_a_borrower_does_not_stop_a_run_of_a_tenant_within_its_guarantee() -> None:
    urgent = a_task("urgent", tenant="guest", gpu_mb=20, priority=60)
    mine, theirs = a_run("mine", "owner", 20), a_run("theirs", "guest", 20, priority=60)
    world = a_world(a_device("gpu0", mb=40), mine, theirs, urgent)
    assert asked_to_leave(world, POLICY) == []
    assert WhatIf(Draft(world), POLICY, NOW).way(urgent).eviction is None
    told = advise(diagnose(survey_nodes(Draft(world), urgent, POLICY, NOW))).preemption
    assert told.counts == {Protection.GUARANTEED: 1, Protection.PRIORITY: 1}
    assert "within their tenants' guarantee" in told.message
    assert asked_to_leave(world, Policy()) == ["mine"], "without quotas priority decides"


def test_who_holds_nothing_of_a_quota_is_covered_by_no_guarantee() -> None:
    """Nor could it ever take anything back."""
    urgent = a_task("urgent", tenant="guest", gpu_mb=30, cpu=10.0, priority=60)
    on_cpu = holding(a_task("on_cpu", tenant="owner", cpu=60.0, priority=0), node="n1")
    world = a_world(a_device("gpu0", mb=40), on_cpu, urgent)
    assert asked_to_leave(world, POLICY) == ["on_cpu"]


def waiting_for_more(**fields: Any) -> tuple[World, Task]:
    """A task that would borrow behind a run that is within the guarantee of its tenant."""
    urgent = a_task("urgent", tenant="guest", gpu_mb=30, priority=60, expected_seconds=Seconds(100.0))
    run = a_run("mine", "owner", 20, expected_seconds=Seconds(5000.0), **fields)
    return a_world(a_device("gpu0", mb=40), run, urgent), urgent


def test_a_forecast_does_not_count_on_a_stop_that_a_guarantee_forbids() -> None:
    world, urgent = waiting_for_more()
    [*_, [forecast]] = make_forecasts(world, POLICY, NOW)
    assert forecast.start_at == NOW + 4900.0
    [*_, [forecast]] = make_forecasts(world, Policy(), NOW)
    assert (forecast.task, forecast.start_at) == (urgent.id, NOW + 30.0), "the grace period"


def test_who_could_not_be_stopped_for_a_forecast_does_not_start_before_it() -> None:
    for tenant, mb, starts in (("owner", 20, []), ("owner", 10, ["late"]), ("guest", 20, ["late"])):
        world, _ = waiting_for_more()
        [*_, forecasts] = make_forecasts(world, POLICY, NOW)
        late = a_task("late", tenant=tenant, gpu_mb=mb, priority=30, expected_seconds=Seconds(9000.0))
        submit(world, late)
        plan = plan_cycle(world, POLICY, NOW, forecasts=forecasts)
        assert [d.subject for d in plan.decisions if d.why == "admit"] == starts, (tenant, mb)


def test_tenant_within_its_guarantee_preempts_any_run_of_lower_priority() -> None:
    urgent = a_task("urgent", tenant="guest", gpu_mb=20, priority=60)
    world = a_world(a_device("gpu0", mb=40), a_run("a", "owner", 20), a_run("b", "owner", 20), urgent)
    assert len(asked_to_leave(world, POLICY)) == 1


def test_borrower_preempts_other_borrowers_down_to_their_guarantees_only() -> None:
    runs = [a_run(f"r{n}", "guest", 10) for n in range(5)]
    policy = Policy(tenants=(*TWO, TenantPolicy("*", "lab", Mib(0))))
    world = a_world(a_device("gpu0", mb=50), *runs)
    submit(world, task := a_task("urgent", tenant="third", gpu_mb=10, priority=60))
    assert asked_to_leave(world, policy) == ["r0"]
    other = a_world(a_device("gpu0", mb=50), *runs)
    submit(other, a_task("urgent", tenant="third", gpu_mb=40, priority=60))
    assert asked_to_leave(other, policy) == [], "the last one would be within the guarantee by then"
    assert WhatIf(Draft(world), policy, NOW).way(task).eviction is not None


def test_a_borrower_finds_another_way_than_the_cheapest() -> None:
    """The run it may not stop has less work to lose."""
    policy = Policy(tenants=(*TWO, TenantPolicy("outside")))
    mine, theirs = a_run("mine", "owner", 20), a_run("theirs", "outside", 20, "gpu1", checkpoint_at=None)
    held = a_run("held", "guest", 20, "gpu1", priority=60)
    urgent = a_task("urgent", tenant="guest", gpu_mb=20, priority=60)
    world = a_world(a_device("gpu0", mb=20), a_device("gpu1", mb=40), mine, theirs, held, urgent)
    assert asked_to_leave(world, policy) == ["theirs"]
    told = WhatIf(Draft(world), policy, NOW).way(urgent).eviction
    assert told is not None
    assert [run.id for run in told.victims] == ["theirs"]


def test_a_gang_of_a_borrower_leaves_guarantees_alone_as_well() -> None:
    runs = [a_run(f"r{n}", "owner", 20, f"gpu{n}") for n in range(2)]
    tenants = (*TWO, TenantPolicy("third", "lab", Mib(0)), TenantPolicy("away", "lab", Mib(40)))
    policy = Policy(tenants=tenants)
    gang = a_gang("gang", *bundles(2, gpu_mb=20), tenant="third", priority=60)
    world = a_world(a_device("gpu0", mb=20), a_device("gpu1", mb=20), *runs, gang)
    assert asked_to_leave(world, policy) == []
    assert WhatIf(Draft(world), policy, NOW).way(gang).eviction is None
    assert sorted(asked_to_leave(world, Policy())) == ["r0", "r1"]


def test_refusal_of_a_borrower_is_cached_until_another_tenant_borrows() -> None:
    policy = Policy(tenants=(*TWO, TenantPolicy("away", "lab", Mib(60))))
    runs = a_run("mine", "owner", 20), a_run("theirs", "guest", 20, priority=60)
    world = a_world(a_device("gpu0", mb=40), a_device("gpu1", mb=40), *runs)
    submit(
        world,
        a_task(
            "urgent", tenant="guest", gpu_mb=20, priority=60, where=PlacementConstraints(devices=("gpu0",))
        ),
    )
    cache = PlanCache()
    assert plan_cycle(world, policy, NOW, cache=cache).decisions == ()
    assert plan_cycle(world, policy, NOW, cache=cache).decisions == ()
    more = a_task("more", tenant="owner", gpu_mb=40, priority=40)
    submit(world, more)
    admitted, decision = plan_cycle(world, policy, NOW, cache=cache).decisions
    assert admitted.subject == "more"
    assert [write.task.id for write in decision.tasks] == ["mine"], "its tenant has more than its guarantee"
    assert plan_cycle(world, policy, NOW).decisions == (admitted, decision), "as without a memory"


def test_what_was_found_for_a_borrower_is_not_held_against_others() -> None:
    """The same demand and priority, of a tenant that may."""
    policy = Policy(tenants=(*TWO, TenantPolicy("outside", weight=0.1)))
    fields: dict[str, Any] = {"gpu_mb": 20, "priority": 60}
    world = a_world(a_device("gpu0", mb=40), a_run("a", "owner", 20), a_run("g", "guest", 20, priority=60))
    submit(world, a_task("first", tenant="guest", **fields))
    submit(world, a_task("second", tenant="outside", submitted_at=Instant(NOW + 1.0), **fields))
    cache = PlanCache()
    decisions = plan_cycle(world, policy, NOW, cache=cache).decisions
    assert [decision.subject for decision in decisions] == ["second"]


@st.composite
def crowds(draw: st.DrawFn) -> tuple[World, Policy]:
    """Tenants of one cohort that are guaranteed more than there is, and a queue of theirs."""
    names = ("a", "b", "c")
    tenants = [TenantPolicy(name, "lab", Mib(draw(st.sampled_from((0, 20, 40, 60))))) for name in names]
    devices = [
        a_device(f"gpu{n}", mb=draw(st.sampled_from((40, 60)))) for n in range(draw(st.integers(1, 2)))
    ]
    world = a_world(*devices)
    for number in range(draw(st.integers(2, 7))):
        fields = {"gpu_mb": draw(st.sampled_from((10, 20, 40))), "priority": draw(st.integers(40, 44))}
        submit(world, a_task(f"t{number}", tenant=draw(st.sampled_from(names)), **fields))
    return world, Policy(tenants=tuple(tenants), shield_seconds=Seconds(20.0))


@given(crowds())
@settings(max_examples=200, deadline=None)
def test_no_run_is_preempted_twice_for_the_same_task(crowd: tuple[World, Policy]) -> None:
    """Though each run saves its work at once, so that nothing shields it, and none ever ends."""
    world, policy = crowd
    now, stopped = NOW, Counter[tuple[str, str]]()
    for _ in range(40):
        now = Instant(now + 5.0)
        world.measure([a_sample(device, now) for device in world.ledgers])
        for decision in plan_cycle(world, policy, now).decisions:
            commit(world, [decision], now)
            if decision.why == "preempt":
                stopped.update((decision.subject, write.task.id) for write in decision.tasks)
        reports = [report for task in list(world.tasks.values()) for report in _heard_of(task, now)]
        for report in reports:
            commit(world, apply_reports(world, [report], now, policy), now)
    assert all(count == 1 for count in stopped.values())


def _heard_of(task: Task, now: Instant) -> list[Report]:
    match task.state:
        case TaskState.STOPPING:
            return [Gone(task.id, task.fence, now, Proof.PROCESS_ABSENT)]
        case TaskState.ADMITTED:
            saved = Checkpointed(task.id, task.fence, Instant(now + 1.0), 1, "", None, "uri")
            return [Started(task.id, task.fence, now, 1), saved]
    return []


def test_borrower_refused_by_a_reservation_preempts_no_guaranteed_run() -> None:
    """Where it could preempt a run outside any guarantee, another task is to start before it."""
    gpus = (a_device("gpu0", mb=40), a_device("gpu1", mb=40), a_device("gpu0", "n2", mb=40))
    stays = a_run("stays", "other", 40, priority=50, expected_seconds=Seconds(5000.0))
    low = a_run("low", "other", 40, "gpu1", priority=20, expected_seconds=Seconds(5000.0))
    mine = a_run("mine", "owner", 20, "n2/gpu0", priority=20)
    wide = a_task("wide", tenant="guest", gpus=2, gpu_mb=10, submitted_at=Instant(NOW - 10.0))
    world = a_world(*gpus, stays, low, mine, wide)
    [*_, forecasts] = make_forecasts(world, POLICY, NOW)
    submit(world, a_task("urgent", tenant="guest", gpu_mb=35))
    cache = PlanCache()
    for _ in range(2):
        assert plan_cycle(world, POLICY, NOW, cache=cache, forecasts=forecasts).decisions == ()
    [decision] = plan_cycle(world, POLICY, NOW).decisions
    assert [task.task.id for task in decision.tasks] == ["low"], "were it not for the forecast"
