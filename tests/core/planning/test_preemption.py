"""Who must leave for whom."""

from typing import Any

import pytest
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.explain.blockers import room_blockers
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.victims import cheapest
from gpubroker_server.core.planning.preemption.eviction import Eviction
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_device,
    a_lease,
    a_node,
    a_pledge,
    a_task,
    a_world,
    holding,
    key,
    submit,
)
from tests.core.plans import eviction_for

POLICY = Policy(preemption_budget=3, shield_seconds=Seconds(600.0))


def a_run(
    name: str, device: str, gib: int, *, seconds: float = 100.0, priority: int = 10, **fields: Any
) -> Holding:
    """A run that began so many seconds ago and holds so much of one device."""
    demand = {k: fields.pop(k) for k in ("cpu", "grace_seconds", "preemptions") if k in fields}
    task = a_task(name, priority=priority, gpu_mb=gib * GIB, **demand)
    return holding(task, device, **{"started_at": Instant(NOW - seconds), **fields})


def chosen(world: World, *, policy: Policy = POLICY, **task: Any) -> Eviction | Reason:
    """Who must leave for a task of priority 80, or why nobody does."""
    draft, high = Draft(world), a_task("high", **{"priority": 80, **task})
    eviction = eviction_for(draft, high, policy)
    return eviction or room_blockers(survey_nodes(draft, high, policy, NOW))[0].reason


def victims(world: World, **task: Any) -> list[str]:
    choice = chosen(world, **task)
    assert isinstance(choice, Eviction), choice
    return [victim.id for victim in choice.victims]


def test_the_run_with_the_least_lost_work_must_leave() -> None:
    world = a_world(
        a_device(), a_run("old", "gpu0", 40, seconds=900.0), a_run("young", "gpu0", 40, seconds=5.0)
    )
    assert victims(world, gpu_mb=30 * GIB) == ["young"]


def test_work_that_was_saved_is_not_lost() -> None:
    saved = a_run("saved", "gpu0", 40, seconds=900.0, checkpoint_at=Instant(NOW - 1.0))
    assert victims(a_world(saved, a_run("young", "gpu0", 40, seconds=5.0)), gpu_mb=30 * GIB) == ["saved"]


def test_a_checkpoint_of_an_earlier_attempt_saves_nothing_of_this_one() -> None:
    stale = a_run("stale", "gpu0", 40, seconds=50.0, checkpoint_at=Instant(NOW - 800.0))
    assert victims(a_world(stale, a_run("young", "gpu0", 40, seconds=49.0)), gpu_mb=30 * GIB) == ["young"]


def test_a_run_that_has_not_begun_has_nothing_to_lose() -> None:
    admitted = a_run("admitted", "gpu0", 40, state=TaskState.ADMITTED, started_at=None)
    assert victims(a_world(admitted, a_run("young", "gpu0", 40, seconds=1.0)), gpu_mb=30 * GIB) == [
        "admitted"
    ]


def test_work_on_several_gpus_counts_on_each() -> None:
    pair = holding(a_task("pair", priority=10, gpus=2, gpu_mb=40 * GIB), "gpu0", "gpu1")
    single = a_run("single", "gpu0", 40, seconds=150.0)
    peer = a_run("peer", "gpu1", 40, priority=80)
    assert victims(a_world(a_device(), a_device("gpu1"), pair, single, peer), gpu_mb=30 * GIB) == ["single"]


def test_of_equal_losses_the_fewest_victims_are_chosen() -> None:
    world = a_world(
        a_device(),
        a_device("gpu1"),
        *(a_run(f"small{n}", "gpu0", 40, seconds=50.0) for n in range(2)),
        a_run("large", "gpu1", 80, seconds=100.0),
    )
    assert victims(world, gpu_mb=80 * GIB) == ["large"]


def test_a_victim_that_is_not_needed_is_put_back() -> None:
    """Nine small runs on one device are more than are tried in every combination."""
    small = [a_run(f"small{n}", "gpu0", 4, seconds=1.0) for n in range(8)]
    world = a_world(*small, a_run("large", "gpu0", 48, seconds=10.0))
    assert victims(world, gpu_mb=40 * GIB) == ["large"]


def test_the_cheapest_device_of_the_cluster_is_cleared() -> None:
    world = a_world(
        a_device("gpu0", "n1"),
        a_device("gpu0", "n2"),
        a_run("dear", "n1/gpu0", 80, seconds=900.0),
        a_run("cheap", "n2/gpu0", 80, seconds=90.0),
    )
    choice = chosen(world, gpu_mb=80 * GIB)
    assert isinstance(choice, Eviction)
    assert (choice.node, choice.devices) == ("n2", ((key("n2/gpu0"), 80 * GIB),))


@pytest.mark.parametrize("priority", [80, 81])
def test_nobody_of_the_same_or_a_higher_priority_is_stopped(priority: int) -> None:
    assert (
        chosen(a_world(a_run("run", "gpu0", 80, priority=priority)), gpu_mb=10 * GIB)
        is Reason.WAITING_FOR_MEMORY
    )


def test_nobody_is_stopped_for_a_demand_that_would_still_not_fit() -> None:
    world = a_world(a_run("low", "gpu0", 40), a_run("peer", "gpu0", 40, priority=80))
    assert chosen(world, gpu_mb=60 * GIB) is Reason.WAITING_FOR_MEMORY


def test_ageing_gives_no_right_to_preempt() -> None:
    world = a_world(a_run("low", "gpu0", 80, priority=50))
    waited: dict[str, Any] = {"priority": 50, "submitted_at": Instant(NOW - 1e6)}
    assert chosen(world, gpu_mb=10 * GIB, **waited) is Reason.WAITING_FOR_MEMORY


def test_a_run_whose_budget_is_spent_is_shielded() -> None:
    shielded = a_run("shielded", "gpu0", 80, preemptions=3)
    assert chosen(a_world(shielded), gpu_mb=10 * GIB) is Reason.WAITING_FOR_MEMORY


@pytest.mark.parametrize(
    "fields",
    [
        {"preemptions": 2},
        {"preemptions": 3, "checkpoint_at": Instant(NOW - 50.0)},
        {"preemptions": 3, "seconds": 600.0},
    ],
)
def test_the_shield_falls_at_the_next_checkpoint_or_after_long_enough(fields: dict[str, Any]) -> None:
    assert victims(a_world(a_run("run", "gpu0", 80, **fields)), gpu_mb=10 * GIB) == ["run"]


@pytest.mark.parametrize(
    "fields",
    [
        {"preemptions": 3, "checkpoint_at": Instant(NOW - 100.0)},
        {"preemptions": 3, "seconds": 599.0},
        {"preemptions": 3, "state": TaskState.ADMITTED, "started_at": None},
    ],
)
def test_the_shield_holds_until_then(fields: dict[str, Any]) -> None:
    assert chosen(a_world(a_run("run", "gpu0", 80, **fields)), gpu_mb=1) is Reason.WAITING_FOR_MEMORY


def test_a_critical_task_ignores_the_shield() -> None:
    shielded = a_run("shielded", "gpu0", 80, preemptions=9)
    assert victims(a_world(shielded), gpu_mb=10 * GIB, priority=90) == ["shielded"]


def test_idle_work_makes_room_for_all_other_work_however_often_preempted() -> None:
    policy = replace(POLICY, min_run_seconds=Seconds(300.0))
    world = a_world(a_run("idle", "gpu0", 80, priority=9, preemptions=9))
    assert victims(world, policy=policy, gpu_mb=10 * GIB, priority=10) == ["idle"]
    other = a_world(a_run("idle", "gpu0", 80, priority=3, preemptions=9))
    assert chosen(other, policy=policy, gpu_mb=10 * GIB, priority=9) is Reason.WAITING_FOR_MEMORY


def test_a_task_goes_where_it_would_go_without_idle_work() -> None:
    """Not to the only node with two GPUs, although the idle work there has the least to lose."""
    world = a_world(
        *(
            a_device(gpu, node)
            for gpu, node in (("gpu0", "n1"), ("gpu1", "n1"), ("gpu0", "n2"), ("gpu0", "n3"))
        ),
        *(a_run(f"new{n}", f"n1/gpu{n}", 80, seconds=5.0, priority=9) for n in range(2)),
        a_run("old", "n2/gpu0", 80, seconds=900.0, priority=9),
        a_run("saved", "n3/gpu0", 80, seconds=0.0, priority=10),
    )
    for _ in range(9):
        world.mix.add(Demand(gpus=2))
    submit(world, a_task("task", priority=20, gpu_mb=10 * GIB))
    [decision] = plan_cycle(world, POLICY, NOW).decisions
    assert [write.task.id for write in decision.tasks] == ["old"]


def test_young_run_is_only_preempted_by_critical_tasks() -> None:
    patient = Policy(min_run_seconds=Seconds(60.0))
    young = a_world(a_run("young", "gpu0", 80, seconds=59.0))
    assert chosen(young, policy=patient, gpu_mb=10 * GIB) is Reason.WAITING_FOR_MEMORY
    assert victims(young, policy=patient, gpu_mb=10 * GIB, priority=90) == ["young"]
    starting = a_world(a_run("starting", "gpu0", 80, state=TaskState.ADMITTED, started_at=None))
    assert chosen(starting, policy=patient, gpu_mb=10 * GIB) is Reason.WAITING_FOR_MEMORY
    old = a_world(a_run("old", "gpu0", 80, seconds=60.0))
    assert victims(old, policy=patient, gpu_mb=10 * GIB) == ["old"]


def test_a_checkpoint_does_not_make_a_run_older() -> None:
    saved = a_run("saved", "gpu0", 80, seconds=59.0, preemptions=3, checkpoint_at=Instant(NOW - 1.0))
    policy = Policy(min_run_seconds=Seconds(60.0))
    assert chosen(a_world(saved), policy=policy, gpu_mb=1) is Reason.WAITING_FOR_MEMORY


def test_a_run_that_was_admitted_in_this_very_cycle_may_begin_first() -> None:
    new = a_run("new", "gpu0", 80, state=TaskState.ADMITTED, started_at=None, admitted_at=NOW)
    assert chosen(a_world(new), gpu_mb=10 * GIB) is Reason.WAITING_FOR_MEMORY


def test_preemption_can_be_switched_off() -> None:
    world = a_world(a_run("low", "gpu0", 80))
    assert chosen(world, policy=Policy(preemption=False), gpu_mb=10 * GIB) is Reason.WAITING_FOR_MEMORY


def test_nobody_is_stopped_for_room_that_is_coming_anyway() -> None:
    cancelled = a_run(
        "cancelled",
        "gpu0",
        40,
        state=TaskState.STOPPING,
        stop_reason=StopReason.CANCEL,
        stop_deadline_at=Instant(NOW + 30.0),
    )
    world = a_world(cancelled, a_run("low", "gpu0", 40))
    assert chosen(world, gpu_mb=40 * GIB) is Reason.WAITING_FOR_MEMORY
    assert victims(world, gpu_mb=50 * GIB) == ["low"]


def test_no_run_is_stopped_for_room_a_finished_run_is_about_to_release() -> None:
    over = a_task("over", gpu_mb=40 * GIB, fence=1, state=TaskState.SUCCEEDED)
    releasing = a_lease(over, "gpu0", 40 * GIB, state=LeaseState.RELEASING)
    world = a_world(a_device(), over, releasing, a_run("low", "gpu0", 40))
    assert chosen(world, gpu_mb=40 * GIB) is Reason.WAITING_FOR_MEMORY


def test_quarantined_memory_is_not_counted_on() -> None:
    lost = a_task("lost", gpu_mb=40 * GIB, fence=1)
    quarantined = a_lease(lost, "gpu0", 40 * GIB, state=LeaseState.QUARANTINED)
    world = a_world(a_device(), lost, quarantined, a_run("low", "gpu0", 40))
    assert victims(world, gpu_mb=40 * GIB) == ["low"]


def stopping_for(preemptor: str, name: str, device: str, gib: int) -> Holding:
    until = Instant(NOW + 20.0)
    notice: dict[str, Any] = {
        "stop_reason": StopReason.PREEMPT,
        "stop_deadline_at": until,
        "freeing_for": preemptor,
    }
    return a_run(name, device, gib, state=TaskState.STOPPING, **notice)


@pytest.mark.parametrize(("priority", "expected"), [(80, ["low"]), (79, Reason.WAITING_FOR_MEMORY)])
def test_memory_freed_for_another_task_is_only_taken_by_a_higher_priority(
    priority: int, expected: Any
) -> None:
    other = a_task("other", priority=priority, gpu_mb=40 * GIB)
    world = a_world(
        stopping_for("other", "victim", "gpu0", 40),
        a_run("low", "gpu0", 40),
        other,
        a_pledge(other, "gpu0", 40 * GIB),
    )
    choice = chosen(world, gpu_mb=40 * GIB)
    found = [victim.id for victim in choice.victims] if isinstance(choice, Eviction) else choice
    assert found == expected


def test_the_deadline_is_that_of_whoever_leaves_last() -> None:
    world = a_world(
        a_run("slow", "gpu0", 40, grace_seconds=90.0), a_run("quick", "gpu0", 40, grace_seconds=5.0)
    )
    choice = chosen(world, gpu_mb=80 * GIB)
    assert isinstance(choice, Eviction)
    assert choice.deadline_at == NOW + 90.0


@pytest.mark.parametrize(("gib", "seconds"), [(70, 5.0), (71, 500.0)])
def test_deadline_counts_runs_already_leaving_only_if_their_room_is_needed(gib: int, seconds: float) -> None:
    """10 GiB are free, 60 come from the victim, 10 from a run that was cancelled."""
    until = Instant(NOW + 500.0)
    cancelled = a_run("cancelled", "gpu0", 10, state=TaskState.STOPPING, stop_deadline_at=until)
    choice = chosen(a_world(cancelled, a_run("low", "gpu0", 60, grace_seconds=5.0)), gpu_mb=gib * GIB)
    assert isinstance(choice, Eviction)
    assert choice.deadline_at == NOW + seconds


def test_run_slots_and_cpu_come_from_the_same_victims() -> None:
    node = a_node(cpu=4.0, max_runs=2)
    world = a_world(
        node,
        a_device(),
        a_run("wide", "gpu0", 30, cpu=3.0, seconds=900.0),
        a_run("thin", "gpu0", 30, cpu=1.0),
    )
    assert victims(world, gpu_mb=40 * GIB, cpu=3.0) == ["wide"]
    assert victims(world, gpu_mb=40 * GIB, cpu=1.0) == ["thin"]


def test_a_run_without_gpu_may_have_to_leave_for_its_cpu() -> None:
    hog = holding(a_task("hog", priority=10, cpu=4.0), node="n1")
    assert victims(a_world(a_node(cpu=4.0), a_device(), hog), gpu_mb=40 * GIB, cpu=1.0) == ["hog"]


def test_a_task_without_gpu_preempts_nobody() -> None:
    hog = holding(a_task("hog", priority=10, cpu=4.0), node="n1")
    assert chosen(a_world(a_node(cpu=4.0), hog), cpu=1.0) is Reason.CONCURRENCY_LIMITED


def test_nobody_is_stopped_while_a_custom_resource_is_missing() -> None:
    policy = Policy(custom_limits=(CustomLimit("licence", 1.0),))
    user = holding(a_task("user", priority=95, custom={"licence": 1.0}), node="n1")
    world = a_world(a_device(), user, a_run("low", "gpu0", 80))
    assert (
        chosen(world, policy=policy, gpu_mb=10 * GIB, custom={"licence": 1.0}) is Reason.CONCURRENCY_LIMITED
    )


def test_several_gpus_are_cleared_on_one_node() -> None:
    world = a_world(
        *(a_device(f"gpu{n}", "n1") for n in range(3)),
        a_device("gpu0", "n2"),
        a_run("a", "gpu0", 80, seconds=10.0),
        a_run("b", "gpu1", 80, seconds=500.0),
        a_run("c", "gpu2", 80, seconds=20.0),
    )
    choice = chosen(world, gpus=2)
    assert isinstance(choice, Eviction)
    assert [victim.id for victim in choice.victims] == ["a", "c"]
    assert choice.devices == ((key("gpu0"), 80 * GIB), (key("gpu2"), 80 * GIB))


def test_one_run_on_two_gpus_may_be_cheaper_than_two_on_one_each() -> None:
    pair = holding(
        a_task("pair", priority=10, gpus=2), "gpu0", "gpu1", mb=80 * GIB, started_at=Instant(NOW - 40.0)
    )
    world = a_world(
        *(a_device(f"gpu{n}") for n in range(4)),
        pair,
        a_run("c", "gpu2", 80, seconds=50.0),
        a_run("d", "gpu3", 80, seconds=50.0),
    )
    assert victims(world, gpus=2) == ["pair"]


def test_with_many_runs_on_a_node_only_those_on_the_cheapest_devices_leave() -> None:
    parts: list[Any] = []
    for device in range(4):
        parts.append(a_device(f"gpu{device}"))
        for n in range(3):
            seconds = 100.0 - 20.0 * device + n
            parts.append(a_run(f"d{device}-{n}", f"gpu{device}", 25, seconds=seconds))
    assert victims(a_world(*parts), gpus=2, gpu_mb=50 * GIB) == ["d2-0", "d2-1", "d3-0", "d3-1"]


def test_with_many_runs_on_a_node_cpu_is_freed_as_well() -> None:
    parts: list[Any] = [a_node(cpu=10.0), holding(a_task("hog", priority=10, cpu=4.0), node="n1")]
    for device in range(3):
        parts.append(a_device(f"gpu{device}"))
        parts += (a_run(f"d{device}-{n}", f"gpu{device}", 25, cpu=0.5) for n in range(3))
    assert victims(a_world(*parts), gpus=2, gpu_mb=30 * GIB, cpu=6.0) == ["d0-0", "d1-0", "hog"]


def test_with_many_runs_nobody_is_stopped_if_all_of_them_are_not_enough() -> None:
    parts: list[Any] = [a_device(), a_device("gpu1")]
    for device in range(2):
        parts += (a_run(f"d{device}-{n}", f"gpu{device}", 10) for n in range(5))
        parts.append(a_run(f"peer{device}", f"gpu{device}", 25, priority=80))
    assert chosen(a_world(*parts), gpus=2, gpu_mb=60 * GIB) is Reason.WAITING_FOR_MEMORY


def test_where_everybody_together_is_too_little_nobody_is_chosen() -> None:
    assert cheapest([], lambda _gone: False) is None


def test_devices_that_cost_more_together_than_another_node_are_not_cleared() -> None:
    """Each of the other node's devices alone costs less than both of this one, so it is looked at as well."""
    parts: list[Any] = [a_device(f"gpu{at}", node) for node in ("n1", "n2") for at in (0, 1)]
    for device, seconds in (("n1/gpu0", 10.0), ("n1/gpu1", 11.0), ("n2/gpu0", 12.0), ("n2/gpu1", 12.0)):
        parts.append(a_run(f"on-{device}", device, 80, seconds=seconds))
    assert victims(a_world(*parts), gpus=2) == ["on-n1/gpu0", "on-n1/gpu1"]


def test_a_run_that_is_over_and_not_gone_sets_no_deadline_for_a_pledge() -> None:
    over = a_task("over", gpu_mb=40, fence=1, state=TaskState.SUCCEEDED)
    low = holding(a_task("low", priority=10, gpu_mb=40, grace_seconds=7.0), "gpu0")
    world = a_world(a_device(mb=80), over, a_lease(over, "gpu0", 40, state=LeaseState.RELEASING), low)
    submit(world, a_task("high", priority=80, gpu_mb=80))
    (decision,) = plan_cycle(world, Policy(), NOW).decisions
    assert [written.pledge.deadline_at for written in decision.pledges] == [NOW + 7.0]
