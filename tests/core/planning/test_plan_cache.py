"""What the planner remembers holds until something that it depends on changes, be it only the time."""

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move, Placement, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.stopping import cancel_pending
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.places import PlaceTable
from gpubroker_server.core.planning.plan_cache import MAX_UNASKED, PlanCache
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_node,
    a_pledge,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    key,
    let_go,
    submit,
)
from tests.core.elastic import BIG, on_one_node

POLICY = Policy()


def plan(world: World, cache: PlanCache, now: float = NOW) -> tuple[Decision, ...]:
    return plan_cycle(world, POLICY, Instant(now), cache=cache).decisions


def test_a_plan_that_did_not_come_true_is_made_again() -> None:
    world = a_world(a_device(), *(a_task(name, gpu_mb=50 * GIB) for name in ("first", "second")))
    cache = PlanCache()
    decisions = plan(world, cache)
    assert [decision.subject for decision in decisions] == ["first"]
    assert plan(world, cache) == decisions


def test_a_run_that_comes_out_of_its_shield_may_be_stopped() -> None:
    run = holding(a_task("run", priority=10, gpu_mb=80 * GIB, preemptions=3), "gpu0", started_at=NOW)
    world, cache = a_world(run, a_task("high", priority=80, gpu_mb=10 * GIB)), PlanCache()
    assert plan(world, cache) == ()
    later = NOW + POLICY.shield_seconds
    world.measure([a_sample("gpu0", later)])
    assert [decision.why for decision in plan(world, cache, later)] == ["preempt"]


def test_run_loses_its_shield_in_time_to_the_tasks_it_went_before() -> None:
    run = a_task("run", priority=50, gpu_mb=80 * GIB, submitted_at=Instant(NOW - 9_999.0))
    fresh = a_task("fresh", priority=60, gpu_mb=10 * GIB)
    begun = holding(run, "gpu0", admitted_at=NOW, started_at=NOW)
    world, cache, policy = a_world(begun, fresh), PlanCache(), replace(POLICY, min_run_seconds=Seconds(20.0))
    for seconds, whys in ((1.0, []), (20.0, []), (POLICY.shield_seconds, ["preempt"])):
        at = Instant(NOW + seconds)
        world.measure([a_sample("gpu0", at)])
        assert [d.why for d in plan_cycle(world, policy, at, cache=cache).decisions] == whys


def test_run_past_its_minimum_time_is_stopped_by_tasks_it_did_not_pass() -> None:
    run = a_task("run", priority=50, gpu_mb=80 * GIB, submitted_at=Instant(NOW - 300.0))
    begun = holding(run, "gpu0", admitted_at=NOW, started_at=NOW)
    before = a_task("p55", priority=55, gpu_mb=80 * GIB, submitted_at=Instant(NOW - 300.0))
    world, cache = a_world(begun, before, a_task("p56", priority=56, gpu_mb=80 * GIB)), PlanCache()
    policy = replace(POLICY, min_run_seconds=Seconds(20.0))
    assert plan_cycle(world, policy, NOW, cache=cache).decisions == ()
    later = Instant(NOW + 20.0)
    world.measure([a_sample("gpu0", later)])
    assert [d.subject for d in plan_cycle(world, policy, later, cache=cache).decisions] == ["p56"]


def test_a_run_whose_start_is_heard_of_late_has_run_long_enough() -> None:
    policy = replace(POLICY, min_run_seconds=Seconds(20.0))
    run = holding(a_task("run", priority=10, gpu_mb=80 * GIB), "gpu0", state=TaskState.ADMITTED)
    world, cache = a_world(run, a_task("high", priority=80, gpu_mb=10 * GIB)), PlanCache()
    assert plan_cycle(world, policy, NOW, cache=cache).decisions == ()
    heard = write_move(run.task, Move.STARTED, started_at=Instant(NOW - 50.0))
    commit(world, Decision("run", "started", tasks=(heard,)))
    later = Instant(NOW + 1.0)
    assert [d.why for d in plan_cycle(world, policy, later, cache=cache).decisions] == ["preempt"]


def test_device_is_used_only_while_its_samples_are_fresh() -> None:
    world, cache = a_world(a_device(), a_task("a", gpu_mb=GIB)), PlanCache()
    assert len(plan(world, cache)) == 1
    assert plan(world, cache, NOW + 60.0) == ()
    world.measure([a_sample("gpu0", NOW + 60.0)])
    assert len(plan(world, cache, NOW + 60.0)) == 1


def test_what_this_cycle_admitted_may_be_stopped_in_the_next() -> None:
    aged = a_task("aged", priority=60, gpu_mb=50 * GIB, submitted_at=Instant(NOW - 1e6))
    world, cache = a_world(a_device(), aged, a_task("high", priority=65, gpu_mb=40 * GIB)), PlanCache()
    policy = Policy(shield_seconds=Seconds(0.0))
    commit(world, plan_cycle(world, policy, NOW, cache=cache).decisions)
    assert plan_cycle(world, policy, NOW, cache=cache).decisions == ()
    later = Instant(NOW + 1.0)
    assert [d.why for d in plan_cycle(world, policy, later, cache=cache).decisions] == ["preempt"]


def test_room_that_was_coming_and_goes_to_another_is_looked_for_elsewhere() -> None:
    leaving = holding(
        a_task("leaving", priority=50, gpu_mb=80 * GIB),
        "gpu0",
        state=TaskState.STOPPING,
        stop_deadline_at=NOW,
    )
    low = holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu1")
    world = a_world(a_device(), a_device("gpu1"), leaving, low, a_task("waits", priority=50, gpu_mb=60 * GIB))
    cache = PlanCache()
    assert plan(world, cache) == ()
    let_go(world, "leaving", requeue=False)
    urgent = a_task("urgent", priority=95, gpu_mb=70 * GIB)
    world.add_task(urgent)
    assert [decision.why for decision in plan(world, cache, NOW + 1.0)] == ["admit", "preempt"]


def test_plan_cache_starts_empty_for_another_world_policy_or_earlier_time() -> None:
    cache = PlanCache()
    assert plan(a_world(a_device(mb=GIB), a_task("a", gpu_mb=2 * GIB)), cache) == ()
    world = a_world(a_device(), a_task("a", gpu_mb=2 * GIB))
    assert len(plan(world, cache)) == 1
    assert len(plan(world, cache, NOW - 1.0)) == 1


def coming(*parts: Any) -> tuple[World, PlanCache]:
    """80 GiB are coming on n1/gpu0, a task for 60 waits for them, and a cycle has found that out."""
    notice: dict[str, Any] = {"state": TaskState.STOPPING, "stop_deadline_at": Instant(NOW + 20.0)}
    leaving = holding(a_task("leaving", gpu_mb=80 * GIB), "gpu0", **notice)
    world = a_world(a_device(), leaving, *parts, a_task("waits", gpu_mb=60 * GIB))
    cache = PlanCache()
    assert plan(world, cache) == ()
    return world, cache


def test_task_waiting_for_coming_room_still_waits_after_other_changes() -> None:
    run = holding(a_task("run", gpu_mb=70 * GIB), "gpu1")
    world, cache = coming(a_device("gpu1"), run)
    for name in ("small", "tiny"):
        submit(world, a_task(name, gpu_mb=2 * GIB))
        decisions = plan(world, cache)
        assert [decision.subject for decision in decisions] == [name]
        commit(world, decisions)
    let_go(world, "leaving", requeue=False)
    assert [decision.subject for decision in plan(world, cache)] == ["waits"]


def test_coming_room_is_searched_again_after_a_start_on_its_node() -> None:
    run = holding(a_task("run", gpu_mb=70 * GIB), "gpu1")
    world, cache = coming(a_device("gpu1"), run)
    submit(world, *(a_task(name, priority=60, gpu_mb=2 * GIB) for name in ("small", "tiny")))
    assert slices(world, cache) == ["small", "tiny"]
    let_go(world, "leaving", requeue=False)
    assert [decision.subject for decision in plan(world, cache)] == ["waits"]


def test_task_waits_without_a_search_once_room_begins_to_come() -> None:
    run = holding(a_task("run", gpu_mb=80 * GIB), "gpu0")
    world, cache = a_world(a_device(), run, a_task("waits", gpu_mb=60 * GIB)), PlanCache()
    assert plan(world, cache) == ()
    searched = [table.seen for table in cache.places.values()]
    running = world.tasks[TaskId("run")]
    notice = write_move(running, Move.STOPPING, stop_deadline_at=Instant(NOW + 20.0))
    commit(world, Decision(running.id, "cancel", tasks=(notice,)))
    assert plan(world, cache) == ()
    assert cache.refusals.awaited == {NodeName("n1")}
    assert [table.seen for table in cache.places.values()] == searched
    let_go(world, "run", requeue=False)
    assert [decision.subject for decision in plan(world, cache)] == ["waits"]


def test_who_waits_for_room_that_is_coming_takes_what_is_there_before() -> None:
    run = holding(a_task("run", gpu_mb=70 * GIB), "n2/gpu0")
    world, cache = coming(a_device("gpu0", "n2"), run)
    let_go(world, "run", requeue=False)
    decisions = plan(world, cache)
    assert [decision.subject for decision in decisions] == ["waits"]
    commit(world, decisions)
    assert {lease.device for lease in world.leases_of(world.tasks[TaskId("waits")])} == {key("n2/gpu0")}


def test_without_a_cache_no_task_has_a_second_turn_in_the_same_cycle() -> None:
    likes = [a_task(f"of-{tenant}", tenant=tenant, gpu_mb=60 * GIB) for tenant in "ab"]
    world = a_world(a_device(), holding(a_task("run", gpu_mb=70 * GIB), "gpu0"), *likes)
    part = plan_cycle(world, POLICY, NOW, budget=0)
    assert (part.decisions, part.cursor is None) == ((), False)
    let_go(world, "run", requeue=False)
    rest = plan_cycle(world, POLICY, NOW, part.cursor)
    assert [decision.subject for decision in rest.decisions] == ["of-b"]


def slices(world: World, cache: PlanCache, *meanwhile: Callable[[], None]) -> list[str]:
    """Whom a cycle decides on, task by task; `meanwhile` happens after each of its first slices."""
    decided, cursor, happens = [], None, iter(meanwhile)
    while True:
        part = plan_cycle(world, POLICY, NOW, cursor, budget=1, cache=cache)
        commit(world, part.decisions)
        decided += [decision.subject for decision in part.decisions]
        cursor = part.cursor
        if cursor is None:
            return decided
        next(happens, lambda: None)()


def cancels(world: World, *names: str) -> Callable[[], None]:
    def cancel() -> None:
        for name in names:
            task = world.tasks[TaskId(name)]
            commit(world, cancel_pending(world, task, NOW, Decision(name, "cancel")))

    return cancel


def test_who_leaves_the_queue_between_two_slices_is_passed_over() -> None:
    world = a_world(a_device(), *(a_task(name, gpu_mb=GIB) for name in ("a", "b", "c")))
    assert slices(world, PlanCache(), cancels(world, "b")) == ["a", "c"]


def test_limited_task_that_leaves_the_queue_between_slices_is_passed_over() -> None:
    """It is the last of its group, whose next turn had come already."""
    counted = [a_task(name, cpu=cpu, slots=(("label:run=x", 1.0),)) for name, cpu in (("a", 1.0), ("b", 2.0))]
    world = a_world(a_node(), *counted)
    assert slices(world, PlanCache(), cancels(world, "b")) == ["a"]


@pytest.mark.parametrize("priority", [50, 20])
def test_task_that_gives_up_its_pledge_between_slices_is_passed_over(priority: int) -> None:
    kept = a_task("kept", priority=priority, gpu_mb=10 * GIB)
    world = a_world(a_device(), a_task("a", priority=60, gpu_mb=GIB), kept, a_pledge(kept, "gpu0", 10 * GIB))
    assert slices(world, PlanCache(), cancels(world, "kept")) == ["a"]


def test_who_was_refused_and_left_is_not_asked_again_when_there_is_room() -> None:
    run = holding(a_task("run", priority=90, gpu_mb=60 * GIB), "gpu0")
    large = [a_task(f"large{n}", priority=60, gpu_mb=50 * GIB) for n in range(3)]
    world = a_world(run, *large, *(a_task(f"small{n}", priority=50, gpu_mb=GIB) for n in range(3)))

    def room() -> None:
        cancels(world, *(task.id for task in large))()
        let_go(world, "run", requeue=False)

    assert slices(world, PlanCache(), lambda: None, room) == ["small0", "small1", "small2"]


def test_plan_cache_forgets_demands_that_no_task_has_any_more() -> None:
    world, cache = a_world(a_device(), a_task("a", gpu_mb=GIB)), PlanCache()
    plan(world, cache)
    cache.places.update({TaskId(f"gone{n}"): PlaceTable() for n in range(MAX_UNASKED + 10)})
    assert [decision.subject for decision in plan(world, cache, NOW + 1.0)] == ["a"]
    assert len(cache.places) < 10


def test_task_shut_out_is_passed_over_in_every_band_and_at_every_wakeup() -> None:
    run = holding(a_task("run", priority=90, gpu_mb=80 * GIB), "gpu0")
    low = holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu1")
    waits = [a_task(f"waits{at}", priority=at, gpus=2, gpu_mb=60 * GIB) for at in (80, 60, 20)]
    world, cache = a_world(a_device(), a_device("gpu1"), run, low, *waits), PlanCache()
    assert plan(world, cache) == ()
    world.add_task(a_task("one", priority=55, gpu_mb=60 * GIB))
    assert [decision.subject for decision in plan(world, cache, NOW + 1.0)] == ["one"]


def test_who_was_refused_within_the_cycle_stays_so_when_others_are_woken() -> None:
    run = holding(a_task("run", priority=90, gpu_mb=80 * GIB), "gpu0")
    low = holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu1")
    large = [a_task(name, priority=60, gpus=2, gpu_mb=60 * GIB) for name in ("large", "larger")]
    world = a_world(
        a_device(), a_device("gpu1"), run, low, *large, a_task("one", priority=55, gpu_mb=60 * GIB)
    )
    assert [decision.subject for decision in plan(world, PlanCache())] == ["one"]


def test_refusal_of_a_joining_rank_is_cached_until_a_node_has_more_room() -> None:
    """A node that is no longer reserved counts as well."""
    gang = on_one_node()
    world, now, cache = gang.world, gang.now, PlanCache()

    def plan_again(*forecasts: Forecast) -> list[str]:
        world.measure(a_sample(device, now) for device in world.ledgers)
        decisions = plan_cycle(world, POLICY, now, cache=cache, forecasts=forecasts).decisions
        return [decision.why for decision in decisions]

    assert plan_again() == plan_again() == []
    submit(world, a_task("wide", gpus=3, gpu_mb=BIG))
    world.add_node(a_node("n2"))
    world.add_device(a_device("gpu0", "n2"))
    place = Placement(NodeName("n2"), ((key("n2/gpu0"), Mib(BIG)),))
    kept = Forecast(TaskId("wide"), (place,), now, now, Instant(inf), 0, Basis.GUESS)
    assert plan_again(kept) == plan_again(kept) == []
    assert plan_again() == ["grow"]
