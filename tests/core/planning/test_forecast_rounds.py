"""A round of forecasts is made in many steps, and holds for a while: in between runs begin, last and end."""

from typing import Any

from gpubroker_server.core.domain.estimates import SketchKey, What
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.future_capacity import ExpectedEnds
from gpubroker_server.core.planning.forecasts.reservations import Basis
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_node,
    a_pledge,
    a_sketch,
    a_task,
    a_world,
    commit,
    holding,
    let_go,
    submit,
)
from tests.core.planning.test_backfill import POLICY, a_run, foreseen, gpus


def test_forecast_round_sees_changes_made_while_it_is_computed() -> None:
    nodes = [device for number in range(5) for device in gpus(1, f"n{number}")]
    runs = [a_run(f"r{number}", f"n{number}/gpu0", left=600.0) for number in range(5)]
    world = a_world(*nodes, *runs, a_task("one", gpus=1), a_task("two", gpus=1))
    steps = make_forecasts(world, POLICY, NOW)
    next(steps)
    let_go(world, "r2", requeue=False)
    *_, made = steps
    assert [(f.task, f.start_at - NOW) for f in made] == [("one", 600), ("two", 0)]


def test_who_starts_on_its_pledges_while_forecasts_are_made_counts_once() -> None:
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


def admitted_at(world: World, seconds: float, policy: Any = POLICY) -> list[str]:
    """Who starts so long after forecasts were made."""
    forecasts, now = foreseen(world, policy), Instant(NOW + seconds)
    world.measure(replace(ledger.sample, at=now) for ledger in world.ledgers.values() if ledger.sample)
    return [d.subject for d in plan_cycle(world, policy, now, forecasts=forecasts).decisions]


def a_full_node(**hog: Any) -> World:
    """16 CPUs, of which a run of unknown length has so many, a task that waits for some, and an idle GPU."""
    runs = holding(a_task("hog", **{"cpu": 16.0, **hog}), node="n1")
    waits = a_task("waits", cpu=8.0, submitted_at=Instant(NOW - 50.0))
    return a_world(a_node("n1", cpu=16.0), a_device(), runs, waits)


def test_gpu_task_does_not_wait_behind_a_task_that_waits_for_cpus() -> None:
    for seconds in (0.0, 0.5, 30.0, 3600.0):
        world = a_full_node()
        submit(world, a_task("gpu", gpu_mb=20 * GIB))
        assert admitted_at(world, seconds) == ["gpu"]


def test_task_that_fits_beside_a_guessed_forecast_starts_whatever_its_age() -> None:
    """The longer the run lasts, the later it is expected to end: of whom the forecast was sure enough is not
    taken to be there still when it comes true."""
    for seconds in (0.0, 0.5, 30.0):
        world = a_full_node(cpu=12.0)
        submit(world, a_task("one", cpu=1.0), a_task("three", cpu=3.0), a_task("five", cpu=5.0))
        assert admitted_at(world, seconds) == ["one", "three"]


def test_what_was_learned_of_a_run_is_asked_as_of_the_forecast_too() -> None:
    """Those of its likes count that took longer than it has: they are fewer, and longer, each moment."""
    world = a_full_node(cpu=12.0, subject="fit")
    spread = a_sketch([float(10 * number) for number in range(1, 100)])
    world.learned.put(SketchKey("default", "fit", "", What.SECONDS), spread)
    submit(world, a_task("one", cpu=1.0))
    assert foreseen(world)[0].basis is Basis.LEARNED
    assert admitted_at(world, 20.0) == ["one"]


def test_a_run_that_began_after_the_forecast_is_judged_by_when_it_began() -> None:
    world = a_full_node()
    young = replace(world.tasks[TaskId("hog")], started_at=Instant(NOW + 10.0))
    ends = ExpectedEnds(Draft(world), POLICY, Instant(NOW + 20.0), NOW).of(young)
    assert (ends.p50_at - NOW, ends.is_guess) == (10 + 60, True)


a_length = st.sampled_from((None, 50.0, 150.0, 900.0))


@given(
    st.lists(st.tuples(st.sampled_from((1.0, 2.0, 4.0)), a_length, st.booleans()), max_size=6),
    st.lists(st.tuples(st.sampled_from((10, 30, 60, 80)), a_length), min_size=1, max_size=4),
    st.sampled_from((0.0, 1.0, 70.0, 2000.0)),
)
@settings(max_examples=150, deadline=None)
def test_nobody_is_kept_waiting_for_whom_he_takes_nothing_from(
    takers: list[tuple[float, float | None, bool]], others: list[tuple[int, float | None]], later: float
) -> None:
    """Whatever runs on CPUs and waits for some, those who ask for memory of GPUs alone start as without."""

    def plan(*beside: Any) -> list[str]:
        world = a_world(a_node("n1", cpu=4.0), *gpus(2), *beside)
        for number, (gib, said) in enumerate(others):
            submit(world, a_task(f"gpu{number}", gpu_mb=gib * GIB, expected_seconds=said))
        return [name for name in admitted_at(world, later) if name.startswith("gpu")]

    used, parts = 0.0, list[Any]()
    for number, (cpu, said, runs) in enumerate(takers):
        fields = {"cpu": cpu, "memory_mb": GIB, "expected_seconds": said}
        if runs and used + cpu <= 4.0:
            used += cpu
            parts.append(holding(a_task(f"run{number}", **fields), node="n1"))
        else:
            parts.append(a_task(f"waits{number}", **fields, submitted_at=Instant(NOW - 99.0)))
    assert plan(*parts) == plan()
