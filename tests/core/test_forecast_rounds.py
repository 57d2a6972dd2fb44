"""A round of forecasts is made in many steps, between which runs begin and end."""

from service.core.cycle import plan_cycle
from service.core.forecasts import make_forecasts
from service.core.task import TaskState
from service.core.units import TaskId
from tests.builders import GIB, NOW, a_node, a_pledge, a_task, a_world, commit, let_go, submit
from tests.core.test_backfill import POLICY, a_run, gpus


def test_what_changes_while_forecasts_are_made_is_seen_by_those_that_are_made_after_it():
    nodes = [device for number in range(5) for device in gpus(1, f"n{number}")]
    runs = [a_run(f"r{number}", f"n{number}/gpu0", left=600.0) for number in range(5)]
    world = a_world(*nodes, *runs, a_task("one", gpus=1), a_task("two", gpus=1))
    steps = make_forecasts(world, POLICY, NOW)
    next(steps)
    let_go(world, "r2", requeue=False)
    *_, made = steps
    assert [(f.task, f.start_at - NOW) for f in made] == [("one", 600), ("two", 0)]


def test_who_starts_on_its_pledges_while_forecasts_are_made_counts_once():
    small = [a_node(f"n{number}", cpu=8.0) for number in range(4)]
    nodes = [device for number in range(5) for device in gpus(1, f"n{number}")]
    runs = [a_run(f"r{number}", f"n{number}/gpu0", left=600.0) for number in range(4)]
    ready = a_task("ready", gpu_mb=40 * GIB, cpu=40.0)
    waits = a_task("waits", gpus=1), a_pledge(ready, "n4/gpu0", 40 * GIB)
    world = a_world(*small, *nodes, *runs, ready, *waits)
    steps = make_forecasts(world, POLICY, NOW)
    next(steps)
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    assert world.tasks[TaskId("ready")].state is TaskState.ADMITTED
    submit(world, a_task("later", cpu=20.0, priority=10))
    *_, made = steps
    assert [(f.task, f.start_at - NOW) for f in made if f.task == "later"] == [("later", 0)]
