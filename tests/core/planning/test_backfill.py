"""Forecasts, and who may start ahead of them."""

from collections.abc import Sequence
from math import inf
from typing import Any

from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.estimates import SketchKey, What
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Placement, Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_node,
    a_pledge,
    a_sample,
    a_sketch,
    a_task,
    a_world,
    holding,
    let_go,
    submit,
)
from tests.core.gangs import a_gang, bundles

POLICY = Policy(ageing_seconds_per_point=Seconds(1e9))
AGEING = Policy()
HOUR = 3600.0


def foreseen(
    world: World, policy: Policy = POLICY, now: float = NOW, before: Sequence[Forecast] = ()
) -> list[Forecast]:
    *_, made = make_forecasts(world, policy, Instant(now), before)
    return made


def node_of(forecast: Forecast) -> str:
    [node] = {place.node for place in forecast.places}
    return node


def admitted(
    world: World, policy: Policy = POLICY, forecasts: Sequence[Forecast] | None = None
) -> dict[str, list[str]]:
    """Who is admitted in a cycle, and on which devices, given forecasts of that moment or others."""
    forecasts = foreseen(world, policy) if forecasts is None else forecasts
    plan = plan_cycle(world, policy, NOW, forecasts=forecasts)
    return {
        d.subject: [lease.device.removeprefix("test/") for lease in d.leases]
        for d in plan.decisions
        if d.why == "admit"
    }


def gpus(count: int = 2, node: str = "n1") -> list[Any]:
    return [a_device(f"gpu{i}", node) for i in range(count)]


def a_run(name: str, *devices: str, left: float | None = None, **fields: Any) -> Any:
    """A run of 80 GiB per device that goes on for so long, as was stated."""
    fields = {"gpus": len(devices), "gpu_mb": 80 * GIB, **fields}
    stated = {} if left is None else {"expected_seconds": Seconds(100.0 + left)}
    return holding(a_task(name, **stated, **fields), *devices)


def a_wide_task(**fields: Any) -> Task:
    return a_task("wide", **{"gpus": 2, "gpu_mb": 80 * GIB, "submitted_at": NOW - 10, **fields})


def test_a_forecast_names_the_first_moment_at_which_all_devices_are_free() -> None:
    running = [a_run("one", "gpu0", left=HOUR), a_run("two", "gpu1", left=2 * HOUR)]
    world = a_world(*gpus(), *running, a_wide_task(expected_seconds=Seconds(600.0)))
    [forecast] = foreseen(world)
    assert (forecast.task, node_of(forecast), len(forecast.places[0].devices)) == ("wide", "n1", 2)
    assert forecast.start_at == forecast.p90_at == NOW + 2 * HOUR
    assert forecast.end_at == NOW + 2 * HOUR + 600
    assert (forecast.basis, forecast.n, forecast.reserves_room) == (Basis.STATED, 0, True)


def test_a_forecast_from_past_runs_tells_of_how_many() -> None:
    learned = a_sketch([200.0] * 5 + [1000.0] * 4)
    world = a_world(a_device(), holding(a_task("one", gpu_mb=80 * GIB, subject="fit"), "gpu0"))
    world.learned.put(SketchKey("default", "fit", "H100", What.SECONDS), learned)
    submit(world, a_task("next", gpu_mb=80 * GIB))
    [forecast] = foreseen(world)
    assert (forecast.basis, forecast.n) == (Basis.LEARNED, 9)
    assert abs(forecast.start_at - NOW - 100) < 5
    assert abs(forecast.p90_at - NOW - 900) < 20


def test_run_that_outlasts_its_estimate_makes_the_forecast_a_later_guess() -> None:
    world = a_world(a_device(), a_run("one", "gpu0", left=30.0), a_task("next", gpu_mb=80 * GIB))
    [before] = foreseen(world)
    world.measure([a_sample("gpu0", NOW + 330)])
    [later] = foreseen(world, now=NOW + 330)
    assert (before.start_at, before.basis) == (NOW + 30, Basis.STATED)
    assert (later.start_at, later.basis) == (NOW + 330 + 300, Basis.GUESS)


def test_a_run_is_gone_by_its_time_limit_at_the_latest() -> None:
    fields = {"timeout_seconds": Seconds(150.0), "grace_seconds": Seconds(5.0)}
    world = a_world(a_device(), a_run("one", "gpu0", **fields), a_task("next", gpu_mb=80 * GIB))
    assert foreseen(world)[0].start_at == NOW + 55
    deadline = {"deadline_at": Instant(NOW + 20), "grace_seconds": Seconds(5.0)}
    world = a_world(a_device(), a_run("one", "gpu0", **deadline), a_task("next", gpu_mb=80 * GIB))
    assert foreseen(world)[0].start_at == NOW + 25
    server = a_run("one", "gpu0", holder=External(Seconds(60.0)), **deadline)
    world = a_world(a_device(), server, a_task("next", gpu_mb=80 * GIB))
    [forecast] = foreseen(world)
    assert (forecast.start_at, forecast.basis) == (NOW + 100, Basis.GUESS), "a lease is renewed"


def test_task_that_waits_for_memory_never_released_has_no_forecast() -> None:
    stuck = holding(a_task("one", gpu_mb=80 * GIB), "gpu0", lease_state=LeaseState.QUARANTINED)
    away: list[Any] = [a_device("gpu0", "n2"), a_node("n2", cordoned=True)]
    assert foreseen(a_world(a_device(), stuck, *away, a_task("next", gpu_mb=80 * GIB))) == []


def test_memory_that_is_on_its_way_back_is_as_good_as_there() -> None:
    leaving = holding(a_task("one", gpu_mb=80 * GIB), "gpu0", lease_state=LeaseState.RELEASING)
    assert foreseen(a_world(a_device(), leaving, a_task("next", gpu_mb=80 * GIB)))[0].start_at == NOW


def test_a_run_under_notice_leaves_by_its_deadline() -> None:
    notice: dict[str, Any] = {"state": TaskState.STOPPING, "stop_deadline_at": Instant(NOW + 20)}
    leaving = holding(a_task("one", gpu_mb=80 * GIB), "gpu0", **notice)
    world = a_world(a_device(), leaving, a_task("next", gpu_mb=80 * GIB))
    assert foreseen(world)[0].start_at == NOW + 20


def test_a_run_that_may_be_stopped_is_in_the_way_for_its_grace_period_only() -> None:
    low = a_run("low", "gpu0", left=HOUR, priority=20, grace_seconds=Seconds(40.0))
    assert foreseen(a_world(a_device(), low, a_task("next", gpu_mb=80 * GIB)))[0].start_at == NOW + 40


def test_each_forecast_leaves_the_earlier_ones_alone() -> None:
    first = a_task("first", gpu_mb=80 * GIB, submitted_at=NOW - 9, expected_seconds=Seconds(600.0))
    second = a_task("second", gpu_mb=80 * GIB, submitted_at=NOW - 8)
    world = a_world(a_device(), a_run("one", "gpu0", left=60.0), first, second)
    assert [(f.task, f.start_at) for f in foreseen(world)] == [("first", NOW + 60), ("second", NOW + 660)]
    assert [f.end_at for f in foreseen(world)] == [NOW + 660, inf]
    unknown = replace(first, expected_seconds=None)
    world = a_world(a_device(), a_run("one", "gpu0", left=60.0), unknown, second)
    assert [f.task for f in foreseen(world)] == ["first"]


def test_short_task_is_forecast_to_start_before_an_earlier_reservation() -> None:
    """It starts now because it ends before the room is needed for the task ahead."""
    short = a_task("short", gpu_mb=80 * GIB, expected_seconds=Seconds(60.0))
    world = a_world(*gpus(), a_run("one", "gpu0", left=600.0), a_wide_task(), short)
    assert [(f.task, f.start_at) for f in foreseen(world)] == [("wide", NOW + 600), ("short", NOW)]


def test_a_task_with_pledges_has_no_forecast() -> None:
    waiting = a_task("next", gpu_mb=80 * GIB)
    running = a_run("one", "gpu0", left=60.0)
    assert foreseen(a_world(a_device(), running, waiting, a_pledge(waiting, "gpu0", 80 * GIB))) == []


def test_backfill_starts_tasks_that_end_before_the_reservation_only() -> None:
    """A longer task and one of unknown length wait."""
    world = a_world(*gpus(), a_run("one", "gpu0", left=HOUR), a_wide_task())
    submit(world, a_task("long", gpu_mb=GIB, expected_seconds=Seconds(2 * HOUR)))
    submit(world, a_task("short", gpu_mb=GIB, expected_seconds=Seconds(600.0)))
    submit(world, a_task("unknown", gpu_mb=GIB))
    limited = {"timeout_seconds": Seconds(600.0), "grace_seconds": Seconds(1.0)}
    submit(world, a_task("limited", gpu_mb=GIB, **limited))
    assert admitted(world) == {"limited": ["n1/gpu1"], "short": ["n1/gpu1"]}


def test_a_task_of_unknown_run_time_takes_room_that_no_forecast_needs() -> None:
    narrow = a_world(*gpus(), a_run("one", "gpu0", left=HOUR), a_wide_task(gpu_mb=60 * GIB))
    submit(narrow, a_task("a", gpu_mb=15 * GIB), a_task("b", gpu_mb=15 * GIB))
    assert admitted(narrow) == {"a": ["n1/gpu1"]}


def test_cpu_that_a_forecast_needs_is_kept_as_well() -> None:
    node = a_node("n1", cpu=8.0)
    running = a_run("one", "gpu0", left=HOUR, cpu=4.0)
    wide = a_task("wide", gpu_mb=80 * GIB, cpu=6.0, submitted_at=NOW - 5)
    world = a_world(node, a_device(), running, wide)
    submit(world, a_task("a", cpu=2.0), a_task("b", cpu=2.0))
    assert list(admitted(world)) == ["a"]


def test_a_task_without_gpus_is_foretold_by_the_runs_of_a_node() -> None:
    busy = holding(a_task("busy", cpu=6.0, expected_seconds=Seconds(160.0)), node="n1")
    world = a_world(a_node("n1", cpu=8.0), busy, a_task("next", cpu=4.0))
    [forecast] = foreseen(world)
    assert (forecast.start_at, forecast.places[0].devices, forecast.basis) == (NOW + 60, (), Basis.STATED)


def test_preemptible_task_is_backfilled_unless_shielded_at_the_reservation() -> None:
    """A task fills reserved room if it could be preempted by the time the reservation begins."""

    def fillers(left: float, policy: Policy = POLICY, priority: int = 50) -> list[str]:
        running = a_run("one", "gpu0", left=left, priority=priority)
        world = a_world(*gpus(), running, a_wide_task(priority=priority))
        submit(world, a_task("filler", gpu_mb=GIB, priority=20))
        submit(world, a_task("worn", gpu_mb=GIB, priority=20, preemptions=3, started_at=NOW - 9999))
        return list(admitted(world, policy))

    assert fillers(HOUR) == ["filler", "worn"]
    assert fillers(60.0) == ["filler"], "too often stopped before, it is left alone for ten minutes"
    assert fillers(HOUR, replace(POLICY, preemption=False)) == []
    assert fillers(60.0, priority=95) == ["filler", "worn"]
    young = replace(POLICY, min_run_seconds=Seconds(2 * HOUR))
    assert fillers(HOUR, young) == []
    assert fillers(3 * HOUR, young) == ["filler", "worn"]


def test_a_task_ahead_of_the_head_does_not_fill_and_its_later_twin_does() -> None:
    def fillers(left: float, policy: Policy = AGEING) -> list[str]:
        wide = a_wide_task(priority=60, submitted_at=Instant(NOW - 9_999.0))
        world = a_world(*gpus(), a_run("one", "gpu0", left=left, priority=69), wide)
        submit(world, a_task("aged", gpu_mb=GIB, submitted_at=Instant(NOW - 600.0)))
        submit(world, a_task("later", gpu_mb=GIB, submitted_at=Instant(NOW - 599.0)))
        return list(admitted(world, policy))

    assert fillers(60.0) == ["later"], "`aged` has waited for as many points as `wide` is above it"
    assert fillers(HOUR) == ["aged", "later"]
    assert fillers(60.0, replace(AGEING, shield_seconds=Seconds(30.0))) == ["aged", "later"]


def test_an_older_run_is_an_obstacle_until_it_can_be_preempted() -> None:
    came_at = {"submitted_at": Instant(NOW - 9_999.0), "admitted_at": Instant(NOW - 100.0)}
    low = a_run("low", "gpu0", left=2 * HOUR, grace_seconds=Seconds(40.0), **came_at)
    world = a_world(a_device(), low, a_task("next", gpu_mb=80 * GIB, priority=60))
    assert foreseen(world, AGEING)[0].start_at == NOW + 500 + 40, "it has run for 100 s"


def test_a_run_that_is_shielded_for_a_while_is_in_the_way_for_as_long() -> None:
    young = replace(POLICY, min_run_seconds=Seconds(300.0))
    low = a_run("low", "gpu0", left=HOUR, priority=20, grace_seconds=Seconds(40.0))
    world = a_world(a_device(), low, a_task("next", gpu_mb=80 * GIB))
    assert foreseen(world, young)[0].start_at == NOW + 200 + 40, "it has run for 100 s"


def test_task_ahead_of_a_forecast_takes_its_room_only_if_no_other_is_free() -> None:
    running = a_run("one", "gpu0", left=HOUR), a_run("two", "n2/gpu0", left=2 * HOUR)
    world = a_world(*gpus(), *gpus(2, "n2"), *running, a_wide_task())
    forecasts = foreseen(world)
    submit(world, a_task("ahead", gpu_mb=GIB, priority=60))
    assert admitted(world, forecasts=forecasts) == {"ahead": ["n2/gpu1"]}
    world = a_world(*gpus(), running[0], a_wide_task())
    forecasts = foreseen(world)
    submit(world, a_task("ahead", gpu_mb=GIB, priority=60))
    assert admitted(world, forecasts=forecasts) == {"ahead": ["n1/gpu1"]}


def test_of_forecasts_that_are_guesses_only_the_first_reserves_room() -> None:
    running = a_run("one", "gpu0"), a_run("two", "n2/gpu0")
    second = a_task("second", gpus=2, gpu_mb=80 * GIB, submitted_at=NOW - 5)
    world = a_world(*gpus(), *gpus(2, "n2"), *running, a_wide_task(), second)
    submit(world, a_task("small", gpu_mb=GIB))
    assert [(node_of(f), f.basis, f.reserves_room) for f in foreseen(world)][:2] == [
        ("n1", Basis.GUESS, True),
        ("n2", Basis.GUESS, False),
    ]
    assert admitted(world) == {"small": ["n2/gpu1"]}


def test_a_forecast_stays_on_its_node_until_another_is_clearly_better() -> None:
    running = a_run("one", "gpu0", left=1000.0), a_run("two", "n2/gpu0", left=900.0)
    world = a_world(*gpus(), *gpus(2, "n2"), *running, a_wide_task())
    [made] = foreseen(world)
    assert node_of(made) == "n2"
    before = [replace(made, places=(Placement(NodeName("n1"), ()),))]
    assert node_of(foreseen(world, before=before)[0]) == "n1"
    running = a_run("one", "gpu0", left=1000.0), a_run("two", "n2/gpu0", left=400.0)
    world = a_world(*gpus(), *gpus(2, "n2"), *running, a_wide_task())
    assert node_of(foreseen(world, before=before)[0]) == "n2"


def test_a_task_refused_by_a_reservation_may_preempt_on_unreserved_nodes() -> None:
    """Where one stands only if it gives way to it."""
    low = a_run("low", "n2/gpu0", left=9 * HOUR, priority=20)
    world = a_world(*gpus(), a_device("gpu0", "n2"), a_run("one", "gpu0", left=HOUR), low, a_wide_task())
    submit(world, a_task("kept", gpu_mb=80 * GIB))
    for cache in (PlanCache(), None):
        plan = plan_cycle(world, POLICY, NOW, cache=cache, forecasts=foreseen(world))
        assert [(d.why, d.subject) for d in plan.decisions] == [("preempt", "kept")]


def test_a_task_behind_a_reservation_does_not_preempt_on_its_node() -> None:
    running = a_run("one", "gpu0", left=HOUR), a_run("low", "gpu1", left=HOUR, priority=20)
    world = a_world(*gpus(), *running, a_wide_task())
    submit(world, a_task("kept", gpu_mb=80 * GIB))
    assert plan_cycle(world, POLICY, NOW, forecasts=foreseen(world)).decisions == ()
    [decision] = plan_cycle(world, POLICY, NOW).decisions
    assert decision.why == "preempt"


def test_at_the_backfill_depth_no_task_is_tried_on_reserved_nodes() -> None:
    policy, cache = replace(POLICY, backfill_depth=2), PlanCache()
    world = a_world(*gpus(), a_run("one", "gpu0", left=HOUR), a_wide_task())
    for number in range(5):
        submit(world, a_task(f"kept{number}", gpu_mb=GIB, submitted_at=NOW - 5 + number))
    submit(world, a_task("short", gpu_mb=GIB, expected_seconds=Seconds(60.0)))
    assert admitted(world, policy) == {}
    assert admitted(world, replace(policy, backfill_depth=6)) == {"short": ["n1/gpu1"]}
    forecasts = foreseen(world, policy)
    for _ in range(2):
        assert plan_cycle(world, policy, NOW, cache=cache, forecasts=forecasts).decisions == ()


def test_a_forecast_ends_with_the_start_of_its_task() -> None:
    """Who was kept away is looked at again in the same cycle."""
    policy = replace(POLICY, backfill_depth=1)
    wide = a_wide_task(submitted_at=NOW - 5, priority=60)
    world = a_world(*gpus(), *gpus(1, "n2"), a_task("early", gpus=1, priority=60, submitted_at=NOW - 9), wide)
    forecasts = foreseen(world, policy)
    plan = plan_cycle(world, policy, NOW, forecasts=forecasts)
    assert {d.subject for d in plan.decisions} == {"early", "wide"}


def test_at_the_backfill_depth_tasks_still_start_on_unreserved_nodes() -> None:
    small = [a_device("gpu0", "n2", mb=40 * GIB)]
    world = a_world(*gpus(), *small, a_run("one", "gpu0", left=HOUR), a_wide_task())
    submit(world, a_task("kept", gpu_mb=60 * GIB))
    there = PlacementConstraints(prefer_nodes=(("node", ("n1",)),))
    submit(world, a_task("next", gpu_mb=GIB, expected_seconds=Seconds(60.0), where=there))
    assert admitted(world, replace(POLICY, backfill_depth=2)) == {"next": ["n1/gpu1"]}
    assert admitted(world, replace(POLICY, backfill_depth=1)) == {"next": ["n2/gpu0"]}


def test_a_task_refused_by_a_reservation_waits_for_room_coming_elsewhere() -> None:
    """Nobody is stopped for it there, and its likes wait with it."""
    policy, cache = replace(POLICY, backfill_depth=1), PlanCache()
    notice: dict[str, Any] = {"state": TaskState.STOPPING, "stop_deadline_at": Instant(NOW + 20)}
    leaving = holding(a_task("leaving", gpu_mb=80 * GIB, priority=20), "n2/gpu0", **notice)
    low = a_run("low", "n3/gpu0", left=9 * HOUR, priority=20)
    others = a_device("gpu0", "n2"), a_device("gpu0", "n3")
    world = a_world(*gpus(), *others, a_run("one", "gpu0", left=HOUR), leaving, low, a_wide_task())
    submit(world, a_task("first", gpu_mb=80 * GIB), a_task("second", gpu_mb=80 * GIB))
    forecasts = [forecast for forecast in foreseen(world, policy) if forecast.task == "wide"]
    assert plan_cycle(world, policy, NOW, cache=cache, forecasts=forecasts).decisions == ()
    let_go(world, "leaving")
    plan = plan_cycle(world, policy, NOW, cache=cache, forecasts=forecasts)
    assert [(d.why, d.subject) for d in plan.decisions][:1] == [("admit", "first")]


def test_gang_behind_a_forecast_takes_no_room_and_stops_no_run_there() -> None:
    """Elsewhere it may do both."""
    running = a_run("one", "gpu0", left=HOUR), a_run("low", "gpu1", left=HOUR, priority=20)
    gang = a_gang("gang", *bundles(1, gpu_mb=80 * GIB))
    free = a_world(*gpus(), running[0], a_wide_task())
    forecasts = foreseen(free)
    submit(free, gang)
    assert admitted(free, forecasts=forecasts) == {}
    assert admitted(free, forecasts=()) == {"gang": ["n1/gpu1"]}
    held = a_world(*gpus(), *running, a_wide_task())
    submit(held, gang)
    assert plan_cycle(held, POLICY, NOW, forecasts=forecasts).decisions == ()
    [decision] = plan_cycle(held, POLICY, NOW).decisions
    assert (decision.why, decision.subject) == ("preempt", "gang")
    elsewhere = a_world(*gpus(), *gpus(1, "n2"), running[0], a_wide_task())
    submit(elsewhere, gang)
    assert admitted(elsewhere, forecasts=forecasts) == {"gang": ["n2/gpu0"]}


def test_a_device_with_late_samples_counts_in_forecasts_for_a_while() -> None:
    """What is kept there must be kept when they come again: that plan sees the forecasts made before."""
    stays = a_run("stays", "n2/gpu0", left=HOUR)
    world = a_world(*gpus(1), *gpus(1, "n2"), a_run("one", "gpu0", left=HOUR / 2), stays)
    submit(world, a_task("next", gpus=1, submitted_at=NOW - 9))
    late = NOW + 3 * POLICY.sample_period_seconds + 20
    world.measure([a_sample("n2/gpu0", late + 20)])
    assert [node_of(forecast) for forecast in foreseen(world, now=late)] == ["n1"]
    assert [node_of(forecast) for forecast in foreseen(world, now=late + 20)] == ["n2"]


def test_the_maker_of_forecasts_pauses_every_few_nodes() -> None:
    nodes = [device for number in range(17) for device in gpus(1, f"n{number:02}")]
    runs = [a_run(f"run{n:02}", f"n{n:02}/gpu0", left=HOUR - n) for n in range(17)]
    world = a_world(*nodes, *runs, a_task("next", gpu_mb=80 * GIB))
    first, *_, whole = make_forecasts(world, POLICY, NOW, ())
    assert [node_of(forecast) for forecast in whole] == ["n16"]
    assert len(list(make_forecasts(world, POLICY, NOW, ()))) == 6, (
        "after 4 nodes four times, after the task, at the end"
    )
    assert first is whole


def test_equal_tasks_refused_from_the_cache_count_towards_backfill_depth() -> None:
    """A shorter task behind the equal ones is still backfilled if the depth allows it."""
    waits = a_task("next", gpus=1, submitted_at=NOW - 9)
    world = a_world(a_device(), a_run("one", "gpu0", left=100.0, gpu_mb=60 * GIB), waits)
    for name, said in (("l1", 500.0), ("l2", None), ("l3", 400.0), ("short", 50.0)):
        submit(world, a_task(name, gpu_mb=10 * GIB, expected_seconds=said))
    assert list(admitted(world)) == ["short"]
    assert list(admitted(world, replace(POLICY, backfill_depth=4))) == ["short"]
    assert list(admitted(world, replace(POLICY, backfill_depth=3))) == []
