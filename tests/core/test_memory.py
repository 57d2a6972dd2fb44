"""What the planner remembers holds until something that it depends on changes, be it only the time."""

from service.core.cycle import plan_cycle
from service.core.memory import Memory
from service.core.plan import Decision
from service.core.policy import Policy
from service.core.task import TaskState
from service.core.units import Instant
from service.core.world import World
from tests.builders import GIB, NOW, a_device, a_sample, a_task, a_world, commit, holding, let_go

POLICY = Policy()


def plan(world: World, memory: Memory, now: float = NOW) -> tuple[Decision, ...]:
    return plan_cycle(world, POLICY, Instant(now), memory=memory).decisions


def test_a_plan_that_did_not_come_true_is_made_again():
    world = a_world(a_device(), *(a_task(name, gpu_mb=50 * GIB) for name in ("first", "second")))
    memory = Memory()
    decisions = plan(world, memory)
    assert [decision.subject for decision in decisions] == ["first"]
    assert plan(world, memory) == decisions


def test_a_run_that_comes_out_of_its_shield_may_be_stopped():
    run = holding(a_task("run", priority=10, gpu_mb=80 * GIB, preemptions=3), "gpu0", started_at=NOW)
    world, memory = a_world(run, a_task("high", priority=80, gpu_mb=10 * GIB)), Memory()
    assert plan(world, memory) == ()
    later = NOW + POLICY.shield_seconds
    world.measure([a_sample("gpu0", later)])
    assert [decision.why for decision in plan(world, memory, later)] == ["preempt"]


def test_a_device_that_is_heard_of_again_is_used_again_and_one_that_is_not_is_no_longer():
    world, memory = a_world(a_device(), a_task("a", gpu_mb=GIB)), Memory()
    assert len(plan(world, memory)) == 1
    assert plan(world, memory, NOW + 60.0) == ()
    world.measure([a_sample("gpu0", NOW + 60.0)])
    assert len(plan(world, memory, NOW + 60.0)) == 1


def test_what_this_cycle_admitted_may_be_stopped_in_the_next():
    aged = a_task("aged", priority=60, gpu_mb=50 * GIB, submitted_at=Instant(NOW - 1e6))
    world, memory = a_world(a_device(), aged, a_task("high", priority=65, gpu_mb=40 * GIB)), Memory()
    commit(world, plan(world, memory))
    assert plan(world, memory) == ()
    assert [decision.why for decision in plan(world, memory, NOW + 1.0)] == ["preempt"]


def test_room_that_was_coming_and_goes_to_another_is_looked_for_elsewhere():
    leaving = holding(
        a_task("leaving", priority=50, gpu_mb=80 * GIB),
        "gpu0",
        state=TaskState.STOPPING,
        stop_deadline_at=NOW,
    )
    low = holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu1")
    world = a_world(a_device(), a_device("gpu1"), leaving, low, a_task("waits", priority=50, gpu_mb=60 * GIB))
    memory = Memory()
    assert plan(world, memory) == ()
    let_go(world, "leaving", requeue=False)
    urgent = a_task("urgent", priority=95, gpu_mb=70 * GIB)
    world.add_task(urgent)
    assert [decision.why for decision in plan(world, memory, NOW + 1.0)] == ["admit", "preempt"]


def test_another_world_another_policy_and_an_earlier_time_find_an_empty_memory():
    memory = Memory()
    assert plan(a_world(a_device(mb=GIB), a_task("a", gpu_mb=2 * GIB)), memory) == ()
    world = a_world(a_device(), a_task("a", gpu_mb=2 * GIB))
    assert len(plan(world, memory)) == 1
    assert len(plan(world, memory, NOW - 1.0)) == 1
