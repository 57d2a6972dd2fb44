"""Room for a gang is made on several nodes at once or not at all, and a gang gives way as a whole."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import PledgeEnd
from gpubroker_server.core.domain.orders import StopOrder
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Mib, TaskId
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.find_way import Wait, WaitReason
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.world import World
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_device,
    a_node,
    a_task,
    a_world,
    check_ledger,
    commit,
    holding,
    let_go,
    submit,
)
from tests.core.gangs import Agents, a_gang, admit_all, bundles, where

BIG = 60 * GIB
LATER = Instant(NOW + 1.0)


def a_run(name: str, device: str, priority: int = 10, **fields: Any) -> Holding:
    demand = {"gpu_mb": fields.pop("gpu_mb", BIG)}
    return holding(a_task(name, priority=priority, **demand), device, **fields)


def four_devices(*parts: Any) -> World:
    return a_world(*(a_device(f"gpu{at}", node) for node in ("n1", "n2") for at in (0, 1)), *parts)


def plan(world: World, policy: Policy | None = None, now: float = LATER) -> list[Decision]:
    return admit_all(world, policy or Policy(), now)


def victims(decisions: list[Decision]) -> list[str]:
    return sorted(order.task for d in decisions for order in d.orders if isinstance(order, StopOrder))


HIGH = a_gang("gang", *bundles(3, gpu_mb=BIG), priority=80)


def test_victims_are_chosen_over_several_nodes() -> None:
    runs = [a_run("a", "n1/gpu0"), a_run("b", "n1/gpu1"), a_run("c", "n2/gpu0"), a_run("d", "n2/gpu1")]
    world = four_devices(*runs, HIGH)
    decisions = plan(world)
    assert len(victims(decisions)) == 3
    assert sum(pledge.pledge.mb for d in decisions for pledge in d.pledges) == 3 * BIG


def test_no_more_are_stopped_than_are_needed() -> None:
    world = four_devices(a_run("a", "n1/gpu0"), a_run("b", "n1/gpu1"), HIGH)
    assert len(victims(plan(world))) == 1


def test_the_cheapest_are_stopped() -> None:
    runs = [
        a_run(name, device, started_at=Instant(NOW - age))
        for name, device, age in (
            ("old", "n1/gpu0", 900.0), ("young", "n1/gpu1", 5.0), ("new", "n2/gpu0", 4.0),
            ("fresh", "n2/gpu1", 3.0),
        )
    ]  # fmt: skip
    assert victims(plan(four_devices(*runs, HIGH))) == ["fresh", "new", "young"]


def test_no_run_is_preempted_for_a_gang_that_would_still_not_fit() -> None:
    world = four_devices(a_run("a", "n1/gpu0"), a_run("b", "n1/gpu1", 90), a_run("c", "n2/gpu0", 90), HIGH)
    assert plan(world) == []


def test_no_run_is_preempted_with_preemption_off_or_for_a_missing_cpu() -> None:
    runs = [a_run("a", "n1/gpu0"), a_run("b", "n1/gpu1"), a_run("c", "n2/gpu0")]
    assert plan(four_devices(*runs, HIGH), Policy(preemption=False)) == []
    busy = holding(a_task("busy", cpu=60.0, priority=10), node="n1")
    assert plan(a_world(a_node(), busy, a_gang("gang", *bundles(2, cpu=8.0), priority=80))) == []


def test_no_run_is_preempted_while_a_licence_is_missing() -> None:
    policy = Policy(custom_limits=(CustomLimit("licence", 1.0),))
    demand = replace(HIGH.demand, custom=(("licence", 3.0),))
    runs = [a_run("a", "n1/gpu0"), a_run("b", "n1/gpu1"), a_run("c", "n2/gpu0")]
    assert plan(four_devices(*runs, replace(HIGH, demand=demand)), policy) == []


def test_a_gang_waits_for_what_is_leaving_anyway() -> None:
    leaving = a_run("leaving", "n1/gpu0", state=TaskState.STOPPING, stop_deadline_at=Instant(NOW + 20.0))
    world = four_devices(leaving, a_run("a", "n1/gpu1"), HIGH)
    assert plan(world) == []
    let_go(world, "leaving", requeue=False)
    plan(world)
    assert world.tasks[TaskId("gang")].state is TaskState.ADMITTED


def test_a_gang_waits_for_runs_that_are_leaving() -> None:
    until = Instant(NOW + 90.0)
    leaving = a_run("leaving", "n1/gpu0", state=TaskState.STOPPING, stop_deadline_at=until)
    world = four_devices(leaving, a_run("a", "n1/gpu1"), a_run("b", "n2/gpu1", 90), HIGH)
    decisions = plan(world)
    assert victims(decisions) == ["a"]
    assert {pledge.pledge.deadline_at for d in decisions for pledge in d.pledges} == {until}


def test_gang_starts_on_the_memory_freed_for_it_and_consumes_its_pledges() -> None:
    runs = [a_run("a", "n1/gpu0"), a_run("b", "n1/gpu1")]
    world = four_devices(*runs, HIGH)
    [stopped] = victims(plan(world))
    assert plan(world) == []
    let_go(world, stopped, requeue=False)
    [decision] = plan(world)
    assert {pledge.end for pledge in decision.pledges} == {PledgeEnd.CONSUMED}
    assert len(where(world)) == 3
    check_ledger(world)


def test_cpu_of_its_ranks_is_kept_for_a_gang_that_waits() -> None:
    high = a_gang("gang", *bundles(2, gpu_mb=BIG, cpu=30.0), priority=80)
    world = a_world(a_device("gpu0"), a_device("gpu1"), a_run("a", "n1/gpu0"), high)
    plan(world)
    submit(world, a_task("greedy", cpu=10.0, priority=10))
    assert plan(world) == []
    submit(world, a_task("modest", cpu=4.0, priority=10))
    assert [decision.subject for decision in plan(world)] == ["modest"]


def test_a_gang_gives_way_as_a_whole() -> None:
    world = four_devices(a_gang("low", *bundles(4, gpu_mb=BIG), priority=10))
    admit_all(world)
    Agents(world, "low").run()
    submit(world, a_task("high", gpu_mb=BIG, priority=80))
    [decision] = plan(world)
    assert victims([decision]) == ["low"] * 4
    assert len(decision.pledges) == 1
    assert world.tasks[TaskId("low")].state is TaskState.STOPPING


def test_the_lost_work_of_a_gang_is_that_of_all_its_ranks() -> None:
    low = a_gang("low", *bundles(2, gpu_mb=BIG), priority=10, strategy="strict_spread")
    world = a_world(a_device("gpu0", "n1"), a_device("gpu0", "n2"), a_device("gpu0", "n3"), low)
    admit_all(world)
    Agents(world, "low").run()
    single = holding(a_task("single", priority=10, gpu_mb=BIG), "n3/gpu0", started_at=Instant(NOW - 1.5))
    world.add_task(single.task)
    world.add_lease(single.leases[0])
    submit(world, a_task("high", gpu_mb=BIG, priority=80))
    assert victims(plan(world, now=NOW + 2.0)) == ["single"]  # 3.5 GPU-seconds, the gang's are 4


def test_what_a_gang_frees_on_other_nodes_counts_as_well() -> None:
    low = a_gang("low", *bundles(2, gpu_mb=BIG, cpu=40.0), priority=10, strategy="strict_spread")
    world = a_world(a_device("gpu0", "n1"), a_device("gpu0", "n2"), low)
    admit_all(world)
    Agents(world, "low").run()
    submit(world, a_gang("gang", *bundles(2, gpu_mb=BIG, cpu=40.0), priority=80))
    assert victims(plan(world)) == ["low", "low"]


def test_two_gangs_that_each_want_all_never_hold_half_each() -> None:
    first, second = (a_gang(name, *bundles(4, gpu_mb=BIG)) for name in ("first", "second"))
    world = four_devices(first, second)
    plan(world)
    assert len(where(world, "first")) == 4
    assert where(world, "second") == []
    let_go(world, "first", requeue=False)
    plan(world)
    assert len(where(world, "second")) == 4


def test_many_victims_are_put_back_as_well() -> None:
    runs = [a_run(f"r{at}", f"n{at}/gpu0") for at in range(1, 13)]
    devices = [a_device("gpu0", f"n{at}") for at in range(1, 13)]
    world = a_world(*devices, *runs, a_gang("gang", *bundles(10, gpu_mb=BIG), priority=80))
    assert len(victims(plan(world))) == 10


SIZES = (10, 20, 30, 50)


@st.composite
def crowded(draw: st.DrawFn) -> World:
    """Runs of low and high priority, and a gang that wants in."""
    parts: list[Any] = []
    for node in ("n1", "n2", "n3")[: draw(st.integers(1, 3))]:
        parts.append(a_node(node, cpu=4.0, max_runs=8))
        for index in range(draw(st.integers(1, 2))):
            parts.append(a_device(f"gpu{index}", node, mb=80))
            left = 80
            for number in range(draw(st.integers(0, 2))):
                size = draw(st.sampled_from(SIZES))
                if size <= left:
                    left -= size
                    age = draw(st.sampled_from((1.0, 50.0, 300.0)))
                    task = a_task(
                        f"{node}-{index}-{number}", priority=draw(st.sampled_from((10, 90))), gpu_mb=Mib(size)
                    )
                    parts.append(holding(task, f"{node}/gpu{index}", started_at=Instant(NOW - age)))
    strategy = draw(st.sampled_from(("pack", "spread", "strict_pack", "strict_spread")))
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4))
    wanted = [part for size in sizes for part in bundles(1, gpu_mb=size)]
    return a_world(*parts, a_gang("gang", *wanted, priority=80, strategy=strategy))


def copy_without(world: World, gone: set[str]) -> World:
    """As if these runs had never been, and nobody else could be stopped."""
    parts: list[Any] = [*world.nodes.values(), *(ledger.device for ledger in world.ledgers.values())]
    for task in world.tasks.values():
        if task.id in gone:
            continue
        parts.append(Holding(task, tuple(world.leases_of(task))) if task.is_active else task)
    return a_world(*parts)


def fits_without(world: World, gone: set[str]) -> bool:
    there = copy_without(world, gone)
    decisions = plan_cycle(there, Policy(preemption=False), LATER).decisions
    return any(decision.subject == "gang" for decision in decisions)


def lower(world: World) -> set[str]:
    return {task.id for task in world.tasks.values() if task.is_active and task.priority < 80}


@given(crowded())
def test_victims_of_a_gang_suffice_and_none_of_them_is_needless(world: World) -> None:
    """There are none where stopping all of lower priority would not do."""
    before = {task.id: task for task in world.tasks.values()}
    decisions = plan_cycle(world, Policy(), LATER).decisions
    stopped = set(victims(list(decisions)))
    for name in stopped:
        assert before[TaskId(name)].priority < 80
        assert not fits_without(world, stopped - {name})
    if stopped:
        assert fits_without(world, stopped)
    elif not decisions:
        assert not fits_without(world, lower(world))
    commit(world, decisions)
    check_ledger(world)


@pytest.mark.parametrize("count", [1, 4])
def test_a_gang_is_as_good_as_its_ranks(count: int) -> None:
    world = four_devices(a_gang("gang", *bundles(count, gpu_mb=BIG)))
    [decision] = plan(world)
    assert len(decision.leases) == count


def a_small_world(*parts: Any) -> World:
    return a_world(a_device("gpu0", mb=40), a_device("gpu1", mb=40), *parts)


def since(seconds: float) -> dict[str, Any]:
    return {"started_at": Instant(NOW - seconds)}


ONE = a_gang("gang", *bundles(1, gpu_mb=30), priority=80)


def test_a_cheap_victim_that_frees_too_little_is_put_back() -> None:
    world = a_small_world(
        a_run("cheap", "gpu0", gpu_mb=10, **since(1.0)),
        a_run("high", "gpu0", 90, gpu_mb=20),
        a_run("needed", "gpu1", gpu_mb=40, **since(50.0)),
        ONE,
    )
    assert victims(plan(world)) == ["needed"]


def test_a_victim_that_other_places_do_without_is_put_back() -> None:
    wide = holding(a_task("wide", priority=10, gpus=2, gpu_mb=20), "gpu0", "gpu1", **since(50.0))
    world = a_small_world(
        a_run("cheap", "gpu0", gpu_mb=10, **since(1.0)),
        a_run("high", "gpu0", 90, gpu_mb=10),
        a_run("other", "gpu1", 90, gpu_mb=10),
        wide,
        ONE,
    )
    assert victims(plan(world)) == ["wide"]


def test_the_victims_of_a_gang_are_shown_before_it_is_planned() -> None:
    world = a_small_world(a_run("a", "gpu0", gpu_mb=40), a_run("b", "gpu1", gpu_mb=40), ONE)
    told = WhatIf(Draft(world), Policy(), LATER).way(ONE).eviction
    assert told is not None
    assert [run.id for run in told.victims] == victims(plan(world))


def test_no_victims_are_shown_for_a_gang_that_a_limit_stops() -> None:
    policy = Policy(custom_limits=(CustomLimit("licence", 1.0),))
    short = replace(ONE, demand=replace(ONE.demand, custom=(("licence", 3.0),)))
    world = a_small_world(a_run("a", "gpu0", gpu_mb=40), a_run("b", "gpu1", gpu_mb=40), short)
    assert WhatIf(Draft(world), policy, LATER).way(short) == Wait(WaitReason.LIMIT)


def test_a_gang_looks_again_when_the_room_that_was_coming_changes() -> None:
    until = Instant(NOW + 90.0)
    leaving = a_run("leaving", "gpu0", gpu_mb=30, state=TaskState.STOPPING, stop_deadline_at=until)
    world = a_small_world(leaving, a_run("low", "gpu1", gpu_mb=40), ONE)
    cache = PlanCache()
    assert plan_cycle(world, Policy(), LATER, cache=cache).decisions == ()
    assert plan_cycle(world, Policy(), LATER, cache=cache).decisions == ()
    taken = holding(a_task("taken", priority=90, gpu_mb=10), "gpu0", state=TaskState.ADMITTED).task
    submit(world, replace(taken, state=TaskState.PENDING, fence=0, node=None, admitted_at=None, version=1))
    first = plan_cycle(world, Policy(), LATER, cache=cache).decisions
    commit(world, first)
    assert [decision.subject for decision in first] == ["taken"]
    assert victims(list(plan_cycle(world, Policy(), LATER, cache=cache).decisions)) == []


def test_victim_that_other_places_do_not_need_is_put_back_among_many() -> None:
    """Both ranks would lie together where two runs left; one alone will do if they lie apart."""

    def on(node: str, name: str, mb: int, seconds: float) -> Any:
        task = a_task(name, gpu_mb=mb, priority=5)
        return holding(task, f"{node}/gpu0", started_at=Instant(NOW - seconds))

    costly = [on("n2", f"r{number}", 10, 500.0) for number in range(8)]
    runs = [on("n1", "a", 10, 10.0), on("n1", "b", 30, 20.0), *costly]
    gang = a_gang("gang", *bundles(1, gpu_mb=30), *bundles(1, gpu_mb=10), priority=60)
    world = a_world(a_device("gpu0", "n1", mb=40), a_device("gpu0", "n2", mb=90), *runs, gang)
    (decision,) = plan_cycle(world, Policy(), NOW).decisions
    assert [write.task.id for write in decision.tasks] == ["b"]


def test_victim_that_frees_nothing_for_the_gang_is_put_back_among_many() -> None:
    """It is put back however cheap it is."""

    def on(node: str, name: str, mb: int, seconds: float) -> Any:
        task = a_task(name, gpu_mb=mb, priority=5)
        return holding(task, f"{node}/gpu0", started_at=Instant(NOW - seconds))

    costly = [on("n2", f"r{number}", 10, 500.0) for number in range(9)]
    runs = [on("n3", "useless", 10, 10.0), on("n1", "needed", 40, 20.0), *costly]
    devices = [a_device("gpu0", node, mb=mb) for node, mb in (("n1", 40), ("n2", 90), ("n3", 20))]
    gang = a_gang("gang", *bundles(1, gpu_mb=30), priority=60)
    (decision,) = plan_cycle(a_world(*devices, *runs, gang), Policy(), NOW).decisions
    assert [write.task.id for write in decision.tasks] == ["needed"]


def test_victim_gang_outside_the_chosen_places_is_put_back_among_many() -> None:
    """The memory that it holds on all of its nodes is of no use."""
    by_room, spread = Policy(placement="best_fit"), {"strategy": "strict_spread"}
    useless = a_gang("useless", *bundles(2, gpu_mb=15), priority=4, **spread)
    needed = a_gang("needed", *bundles(2, gpu_mb=20), priority=5, **spread)
    devices = [a_device(f"gpu{at}", node, mb=mb) for node in ("n1", "n2") for at, mb in ((0, 40), (1, 20))]
    since: dict[str, Any] = {"started_at": Instant(NOW - 500.0)}
    others = [holding(a_task(f"r{n}", gpu_mb=10, priority=5), "n3/gpu0", **since) for n in range(9)]
    world = a_world(*devices, a_device("gpu0", "n3", mb=90), *others, useless)
    plan(world, by_room, now=NOW)
    submit(world, needed)
    plan(world, by_room, now=NOW)
    submit(world, a_gang("gang", *bundles(2, gpu_mb=30), priority=60, **spread))
    assert set(victims(plan(world))) == {"needed"}
