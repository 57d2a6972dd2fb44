"""Whether a set of components fits a fleet."""

from typing import Any

import pytest
from gpubroker.wire.plans import Missing, MissingGpus, Totals
from gpubroker.wire.policy import GpuKind, TaskMaximum
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import CustomLimit, Policy, TenantPolicy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import TaskState, members_of
from gpubroker_server.core.domain.units import Instant, Mib, Seconds, TaskId
from gpubroker_server.core.explain.fit import (
    Component,
    Displaced,
    FleetPlan,
    Machine,
    fleet_of,
)
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World

from tests.builders import (
    GIB,
    NOW,
    a_demand,
    a_device,
    a_node,
    a_pledge,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    submit,
)
from tests.core.elastic import at_work, shrunk
from tests.core.gangs import Agents, bundles
from tests.core.plans import planned

POLICY = Policy()


def unplaced(plan: FleetPlan) -> dict[str, int]:
    return {one.component.name: one.count for one in plan.unplaced}


def a_component(name: str, count: int = 1, priority: int = 50, **demand: Any) -> Component:
    return Component(name, count, a_demand(**demand), priority)


def a_machine(name: str = "m1", cpu: float = 16.0, gpus: int = 1) -> Machine:
    return Machine(a_node(name, cpu=cpu, memory_mb=Mib(64 * GIB)), (("H100", Mib(80 * GIB)),) * gpus)


def a_fleet(*machines: Machine) -> World:
    return fleet_of(machines, (), NOW)


def test_a_plan_has_the_places_and_the_number_of_unplaced_tasks() -> None:
    plan = planned(a_fleet(a_machine(gpus=2)), a_component("small", 3, gpu_mb=50 * GIB))
    assert (plan.fits, unplaced(plan)) == (False, {"small": 1})
    assert [placed.places[0].node for placed in plan.placed] == ["m1", "m1"]
    assert len({placed.places[0].devices for placed in plan.placed}) == 2


def test_what_is_hardest_to_place_is_placed_first() -> None:
    world = a_fleet(a_machine(gpus=2))
    plan = planned(world, a_component("small", 1, gpu_mb=GIB), a_component("whole", 2, gpus=1))
    assert unplaced(plan) == {"small": 1}
    plan = planned(world, a_component("small", 2, gpu_mb=30 * GIB), a_component("large", 2, gpu_mb=50 * GIB))
    assert plan.fits


def test_components_of_higher_priority_are_placed_first_and_not_displaced() -> None:
    low, high = a_component("low", 2, 20, gpu_mb=GIB), a_component("high", 1, 80, gpus=1)
    plan = planned(a_fleet(a_machine()), low, high)
    assert ([p.component for p in plan.placed], unplaced(plan), plan.displaced) == (["high"], {"low": 2}, ())


def test_component_without_room_displaces_and_replaces_lower_priority_runs() -> None:
    run = holding(a_task("run", priority=10, gpu_mb=80 * GIB), "gpu0")
    world = a_world(a_device(), run)
    plan = planned(world, a_component("new", 2, gpu_mb=40 * GIB))
    assert plan.fits
    assert [placed.displaced for placed in plan.placed] == [1, 0]
    assert plan.displaced == (Displaced(run.task, None),)
    assert plan.message == "it fits if 1 run leaves"
    assert unplaced(planned(world, a_component("new", 1, 10, gpu_mb=GIB))) == {"new": 1}


def test_planning_a_fleet_changes_nothing() -> None:
    run = holding(a_task("run", priority=10, gpu_mb=80 * GIB), "gpu0")
    world = a_world(a_device(), run)
    planned(world, a_component("new", gpu_mb=40 * GIB))
    assert (world.tasks[TaskId("run")], Draft(world).ledger(a_device().key).unallocated_mb()) == (run.task, 0)


def test_a_component_without_gpus_displaces_no_run() -> None:
    run = holding(a_task("run", priority=10, cpu=64.0), node="n1")
    assert unplaced(planned(a_world(a_device(), run), a_component("new", cpu=1.0))) == {"new": 1}


def test_roles_that_take_turns_are_counted_together_and_apart() -> None:
    roles = (a_demand(gpus=1, cpu=2.0), a_demand(gpu_mb=20 * GIB, cpu=1.0, memory_mb=GIB))
    worker = Component("worker", 2, a_demand(gpus=1, cpu=2.0, memory_mb=GIB), 50, roles)
    plan = planned(a_fleet(a_machine(gpus=2)), worker)
    assert (plan.fits, plan.message) == (True, "it fits")
    assert plan.totals == Totals(gpus=2, whole_gpus=2, gpu_mb=0, cpu=4.0, memory_mb=2 * GIB)
    assert plan.totals_apart == Totals(gpus=4, whole_gpus=2, gpu_mb=40 * GIB, cpu=6.0, memory_mb=2 * GIB)


def test_a_fraction_is_one_of_the_largest_gpu_that_it_may_use() -> None:
    half = a_component("half", 4, gpu_fraction=0.5)
    device_mb = next(iter(a_fleet(a_machine()).ledgers.values())).device.allocatable_mb
    assert planned(a_fleet(a_machine(gpus=2)), half).totals.gpu_mb == 4 * (device_mb // 2)
    assert planned(a_fleet(a_machine(gpus=0)), half).totals.gpu_mb == 0


def test_planned_fleet_has_the_costs_of_the_gpu_kinds_that_are_known() -> None:
    known = GpuKind("H100", 9, Mib(GIB))
    world = fleet_of([a_machine()], [known], NOW)
    [ledger] = world.ledgers.values()
    assert (ledger.device.power, ledger.device.context_mb, ledger.device.physical_mb) == (9, GIB, 80 * GIB)
    assert unplaced(planned(world, a_component("full", gpu_mb=80 * GIB))) == {"full": 1}
    assert planned(world, a_component("rest", gpu_mb=79 * GIB)).fits


def test_plan_names_missing_amounts_and_the_reason_of_the_first_unplaced() -> None:
    gpus = (("H100", Mib(80 * GIB)), ("A100", Mib(40 * GIB)))
    machine = Machine(a_node("m1", cpu=8.0, memory_mb=Mib(64 * GIB)), gpus)
    trainer = a_component(
        "trainer", 3, gpus=1, cpu=3.0, memory_mb=30 * GIB, where=PlacementConstraints(kinds=("H100",))
    )
    plan = planned(a_fleet(machine), trainer)
    assert plan.missing == Missing((MissingGpus(("H100",), 2, 0),), 1.0, 26 * GIB)
    missing = "at least 2 whole H100 GPUs, 1 CPU, 26.0 GiB of host memory"
    assert plan.message == f"it does not fit: there is no place for 2 of trainer; missing: {missing}"
    [why] = plan.unplaced
    assert (why.count, why.reason) == (2, Reason.WAITING_FOR_MEMORY)
    assert why.message == "needs a whole GPU; the largest free block is 0.0 GiB (m1/gpu0)"


def test_parts_of_gpus_are_missing_in_mib_with_what_a_process_costs() -> None:
    world = fleet_of([a_machine(gpus=2)], [GpuKind("H100", 9, Mib(GIB))], NOW)
    plan = planned(world, a_component("part", 6, gpu_mb=39 * GIB))
    assert (unplaced(plan), plan.missing) == ({"part": 2}, Missing((MissingGpus((), 0, 80 * GIB),), 0.0, 0))
    assert plan.message.endswith("missing: at least 80.0 GiB of GPU memory")


def test_what_is_there_in_sum_but_not_in_one_piece_is_no_missing_amount() -> None:
    plan = planned(a_fleet(a_machine(gpus=2)), a_component("part", 3, gpu_mb=50 * GIB))
    assert (unplaced(plan), plan.missing) == ({"part": 1}, Missing((), 0.0, 0))
    assert plan.unplaced[0].reason is Reason.FRAGMENTED
    assert plan.message == f"it does not fit: there is no place for 1 of part; {plan.unplaced[0].message}"


def test_plan_stopped_by_a_quota_alone_misses_nothing_and_says_so() -> None:
    policy = Policy(tenants=(TenantPolicy("default", guaranteed_mb=Mib(50 * GIB)),))
    plan = planned(a_fleet(a_machine(gpus=2)), a_component("part", 3, gpu_mb=40 * GIB), policy=policy)
    assert (unplaced(plan), plan.missing) == ({"part": 2}, Missing((), 0.0, 0))
    assert plan.unplaced[0].reason is Reason.QUOTA_EXHAUSTED


def test_demands_with_the_fewest_usable_gpus_take_the_rest_first() -> None:
    machine = Machine(a_node("m1", cpu=0.0, memory_mb=Mib(0)), (("H100", Mib(80 * GIB)),) * 2)
    picky = a_component("picky", gpus=1, cpu=1.0, where=PlacementConstraints(kinds=("H100",)))
    rare = a_component("rare", gpus=1, cpu=1.0, where=PlacementConstraints(kinds=("B200",)))
    plan = planned(a_fleet(machine), a_component("any", gpus=1, cpu=1.0), picky, rare)
    assert plan.missing == Missing((MissingGpus(("B200",), 1, 0),), 3.0, 0)


def test_all_ranks_of_a_gang_are_placed_or_none() -> None:
    gang = a_component("gang", 2, bundles=bundles(2, gpus=1, cpu=1.0), strategy="strict_spread")
    plan = planned(a_fleet(a_machine("m1", gpus=2), a_machine("m2", gpus=1)), gang)
    assert [[place.node for place in one.places] for one in plan.placed] == [["m1", "m2"]]
    assert (unplaced(plan), plan.totals.gpus, plan.totals.cpu) == ({"gang": 1}, 4, 4.0)
    assert plan.missing == Missing((MissingGpus((), 1, 0),), 0.0, 0)
    assert plan.unplaced[0].message.startswith("there is room for 1 of the 2 ranks that must start together")


def test_a_gang_of_many_gpus_is_placed_before_single_ones() -> None:
    gang = a_component("gang", bundles=bundles(2, gpus=1), strategy="strict_pack")
    one = a_component("a", 1, gpus=1)
    fleet = a_fleet(a_machine("m1", gpus=2), a_machine("m2", gpus=1))
    assert planned(fleet, one, gang).fits


def test_a_gang_displaces_runs_on_all_its_nodes() -> None:
    devices = a_device("gpu0", "n1"), a_device("gpu0", "n2")
    low = [
        holding(a_task(f"low{n}", priority=10, gpu_mb=80 * GIB), device.key, node=f"n{n}")
        for n, device in enumerate(devices, 1)
    ]
    world = a_world(*devices, *low)
    plan = planned(world, a_component("gang", bundles=bundles(2, gpus=1), strategy="spread"))
    assert plan.fits
    assert [one.run.id for one in plan.displaced] == ["low1", "low2"]
    assert plan.message == "it fits if 2 runs leave"
    assert plan.placed[0].displaced == 2


def elastic_fleet() -> Agents:
    """Four ranks of which two will do, on four GPUs that they fill, measured at this moment."""
    gang = at_work()
    gang.world.measure([a_sample(device, gang.now) for device in gang.world.ledgers])
    return gang


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_gang_gives_up_the_ranks_that_the_planner_would_ask_and_no_more(count: int) -> None:
    gang = elastic_fleet()
    policy = Policy(min_run_seconds=Seconds(3600.0))
    new = a_component("new", count, 80, gpu_mb=60 * GIB)
    plan = planned(gang.world, new, policy=policy, now=gang.now)
    for number in range(count):
        submit(gang.world, a_task(f"u{number}", priority=80, gpu_mb=60 * GIB, gpus=1))
    decided = plan_cycle(gang.world, policy, gang.now).decisions
    commit(gang.world, decided)
    leavers = tuple(one.rank for one in members_of(gang.task) if not one.takes_part)
    assert [(one.run.id, one.ranks) for one in plan.displaced] == [("gang", leavers)]
    assert len(plan.placed) == len(leavers) == min(2, count)
    if plan.fits:
        assert plan.message == f"it fits if 1 gang gives up {count} rank{'s' * (count > 1)}"


def test_preemptible_gang_is_displaced_whole_if_its_surplus_is_too_little() -> None:
    gang = elastic_fleet()
    plan = planned(gang.world, a_component("new", 3, 80, gpu_mb=60 * GIB), now=gang.now)
    assert plan.fits
    assert [(one.run.id, one.ranks) for one in plan.displaced] == [("gang", None)]


def test_run_under_notice_counts_as_gone_but_pledged_memory_is_kept() -> None:
    leaver = holding(
        a_task("leaver", priority=10, gpu_mb=80 * GIB),
        "gpu0",
        state=TaskState.STOPPING,
        stop_deadline_at=Instant(NOW + 30),
    )
    new = a_component("new", 1, gpu_mb=40 * GIB)
    plan = planned(a_world(a_device(), leaver), new)
    assert (plan.fits, plan.displaced) == (True, ())
    waits = a_task("waits", priority=50, gpu_mb=60 * GIB)
    pledged = a_world(a_device(), leaver, waits, a_pledge(waits, "gpu0", 60 * GIB))
    assert unplaced(planned(pledged, new)) == {"new": 1}


def test_ranks_that_are_leaving_count_as_gone() -> None:
    gang = shrunk()
    gang.world.measure([a_sample(device, gang.now) for device in gang.world.ledgers])
    plan = planned(gang.world, a_component("small", 1, 10, gpu_mb=20 * GIB), now=gang.now)
    assert plan.fits


def test_what_a_run_that_is_over_still_holds_counts_as_free() -> None:
    over = holding(
        a_task("over", gpu_mb=80 * GIB), "gpu0", state=TaskState.SUCCEEDED, lease_state=LeaseState.RELEASING
    )
    assert planned(a_world(a_device(), over), a_component("new", gpu_mb=40 * GIB)).fits


def test_what_a_submit_refuses_finds_no_place_however_much_is_free() -> None:
    policy = Policy(
        maximum=TaskMaximum(gpus=1), custom_limits=(CustomLimit("seat", 4.0, priority_threshold=70),)
    )
    wide = a_component("wide", 2, gpus=2)
    ring = a_component("ring", bundles=bundles(2, gpus=1))
    seated = a_component("seated", priority=69, custom=(("seat", 1.0),))
    plan = planned(a_fleet(a_machine(gpus=8)), wide, ring, seated, a_component("one", gpus=1), policy=policy)
    assert [(one.component.name, one.count, one.reason) for one in plan.unplaced] == [
        ("seated", 1, Reason.EXCEEDS_CAPACITY),
        ("ring", 1, Reason.EXCEEDS_CAPACITY),
        ("wide", 2, Reason.EXCEEDS_CAPACITY),
    ]
    assert plan.unplaced[2].message == "gpus 2: one task may have at most 1 here; ask for less"
    assert [place.component for place in plan.placed] == ["one"]
