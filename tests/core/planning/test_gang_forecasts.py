"""When and where a gang is expected to start, and what is kept for it."""

from collections import Counter
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.lifecycle.gang_runs import stop_ranks
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Basis
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_demand,
    a_device,
    a_node,
    a_task,
    a_world,
    commit,
    holding,
    submit,
)
from tests.core.gangs import Agents, a_gang, admit_all, bundles
from tests.core.planning.test_backfill import HOUR, POLICY, a_run, admitted, foreseen, gpus

NODES = [device for number in range(3) for device in gpus(2, f"n{number}")]
"""Three nodes of two GPUs."""


def busy(**until: float) -> list[Any]:
    """Runs of a whole GPU: (n0g0=60.0) is one on the first device of n0 for 60 s more."""
    return [a_run(name, f"{name[:2]}/gpu{name[3]}", left=left) for name, left in until.items()]


FULL = {"n0g0": 600.0, "n0g1": 600.0, "n1g0": 100.0, "n1g1": 700.0, "n2g0": 200.0, "n2g1": 300.0}


def ranks(count: int, **fields: Any) -> Task:
    return a_gang("gang", *bundles(count, gpus=1), submitted_at=NOW - 10, **fields)


@pytest.mark.parametrize(
    ("strategy", "count", "start", "lies_on"),
    [
        ("pack", 3, 300.0, {"n1": 1, "n2": 2}),
        ("strict_pack", 2, 300.0, {"n2": 2}),
        ("strict_spread", 3, 600.0, {"n0": 1, "n1": 1, "n2": 1}),
        ("spread", 2, 200.0, {"n1": 1, "n2": 1}),
        ("pack", 6, 700.0, {"n0": 2, "n1": 2, "n2": 2}),
    ],
)
def test_a_gang_is_foretold_when_all_its_ranks_fit_as_its_strategy_says(
    strategy: str, count: int, start: float, lies_on: dict[str, int]
) -> None:
    gang = ranks(count, strategy=strategy, expected_seconds=Seconds(50.0))
    [forecast] = foreseen(a_world(*NODES, *busy(**FULL), gang))
    assert (forecast.start_at - NOW, Counter(place.node for place in forecast.places)) == (start, lies_on)
    assert (forecast.end_at - forecast.start_at, forecast.basis) == (50.0, Basis.STATED)


def test_an_elastic_gang_is_foretold_by_the_ranks_that_it_needs_at_least() -> None:
    [forecast] = foreseen(a_world(*NODES, *busy(**FULL), ranks(5, min_ranks=2)))
    assert (forecast.start_at - NOW, len(forecast.places)) == (200.0, 2)


def test_the_maker_of_forecasts_pauses_for_a_gang_every_few_nodes_too() -> None:
    nodes = [device for number in range(17) for device in gpus(1, f"n{number:02}")]
    runs = [a_run(f"run{n:02}", f"n{n:02}/gpu0", left=HOUR) for n in range(17)]
    world = a_world(*nodes, *runs, ranks(2))
    steps = list(make_forecasts(world, POLICY, NOW))
    assert len(steps) == 4 + 3 + 2, "every 4 nodes, after each moment, after the gang, and at the end"


def test_a_gang_that_never_fits_has_no_forecast() -> None:
    world = a_world(*NODES, *busy(**FULL), ranks(3, strategy="strict_pack"))
    assert foreseen(world) == []


def test_forecasts_of_gangs_and_of_single_tasks_do_not_overlap() -> None:
    gang = ranks(2, strategy="strict_pack", expected_seconds=Seconds(1000.0))
    wide = a_task("wide", gpus=2, gpu_mb=80 * GIB, submitted_at=NOW - 5, expected_seconds=Seconds(50.0))
    last = a_gang("last", *bundles(2, gpus=1), strategy="strict_pack", submitted_at=NOW - 4)
    made = foreseen(a_world(*NODES, *busy(**FULL), gang, wide, last))
    assert [(f.task, f.places[0].node, f.start_at - NOW) for f in made] == [
        ("gang", "n2", 300.0),
        ("wide", "n0", 600.0),
        ("last", "n0", 650.0),
    ]


def test_gang_forecast_stays_on_its_nodes_until_others_are_clearly_better() -> None:
    def stands_on(**until: float) -> set[str]:
        gang = ranks(2, strategy="strict_pack")
        before = foreseen(a_world(*NODES, *busy(**FULL), gang))
        [forecast] = foreseen(a_world(*NODES, *busy(**{**FULL, **until}), gang), before=before)
        return {place.node for place in forecast.places}

    assert stands_on(n1g1=250.0) == {"n2"}
    assert stands_on(n1g1=100.0) == {"n1"}


def test_ranks_without_gpus_are_foretold_by_the_runs_of_their_nodes() -> None:
    running = holding(a_task("busy", cpu=6.0, expected_seconds=Seconds(160.0)), node="n1")
    nodes = a_node("n1", cpu=8.0), a_node("n2", cpu=3.0)
    gang = a_gang("gang", *bundles(2, cpu=3.0), strategy="spread", submitted_at=NOW - 10)
    [forecast] = foreseen(a_world(*nodes, running, gang))
    assert (forecast.start_at - NOW, {p.node for p in forecast.places}) == (60.0, {"n1", "n2"})


def test_what_a_gang_waits_for_is_kept_on_each_of_its_nodes() -> None:
    world = a_world(*NODES[:4], *busy(n0g0=600.0, n1g0=600.0), ranks(4))
    submit(world, a_task("long", gpus=1), a_task("short", gpus=1, expected_seconds=Seconds(500.0)))
    submit(world, a_gang("gang2", *bundles(2, gpus=1)))
    submit(world, a_gang("quick", *bundles(1, gpus=1), expected_seconds=Seconds(500.0)))
    assert admitted(world) == {"quick": ["n1/gpu1"], "short": ["n0/gpu1"]}, "`short` is foretold on n0"


def a_kept_gpu(*others: Any) -> World:
    """40 GiB of the second GPU, and 6 CPUs of 8, are kept for a task that starts in an hour."""
    wanted = a_task("wanted", gpus=2, gpu_mb=40 * GIB, cpu=6.0, submitted_at=NOW - 5)
    running = a_run("one", "gpu0", left=HOUR, cpu=4.0, gpu_mb=80 * GIB)
    return a_world(a_node("n1", cpu=8.0), *gpus(), running, wanted, *others)


def behind(*parts: Any, policy: Policy = POLICY, **fields: Any) -> int:
    """How many ranks of a gang behind that forecast are admitted."""
    world = a_kept_gpu()
    submit(world, a_gang("gang", *parts, **fields))
    return len(admitted(world, policy).get("gang", ()))


def test_what_the_ranks_of_a_gang_take_together_is_what_must_be_left() -> None:
    """Of memory and of CPU: each rank alone could have it."""
    assert behind(*bundles(2, gpu_mb=20 * GIB)) == 2
    assert behind(*bundles(2, gpu_mb=30 * GIB)) == 0
    assert behind(*bundles(1, gpu_mb=30 * GIB)) == 1
    assert behind(*bundles(2, gpu_mb=GIB, cpu=1.0)) == 2
    assert behind(*bundles(2, gpu_mb=GIB, cpu=2.0)) == 0
    assert behind(*bundles(2, gpu_mb=GIB, cpu=2.0), expected_seconds=Seconds(600.0)) == 2


def test_an_elastic_gang_takes_as_many_ranks_as_delay_no_reservation() -> None:
    assert behind(*bundles(4, gpu_mb=15 * GIB), min_ranks=1) == 2


def test_at_the_backfill_depth_a_gang_is_not_tried_on_reserved_nodes() -> None:
    world = a_kept_gpu()
    submit(world, a_task("ahead", gpu_mb=70 * GIB), a_gang("gang", *bundles(1, gpu_mb=GIB)))
    assert admitted(world, replace(POLICY, backfill_depth=2)) == {"gang": ["n1/gpu1"]}
    assert admitted(world, replace(POLICY, backfill_depth=1)) == {}


def test_equal_gang_that_ends_before_the_reservation_is_backfilled() -> None:
    """The refusal of the one before it says nothing about this one."""
    world = a_kept_gpu()
    alike = bundles(2, gpu_mb=30 * GIB)
    submit(world, a_gang("long", *alike), a_gang("quick", *alike, expected_seconds=Seconds(600.0)))
    assert admitted(world) == {"quick": ["n1/gpu1", "n1/gpu1"]}


def test_ranks_of_a_gang_are_placed_where_they_delay_no_reservation() -> None:
    """Beside the forecast on its node, and the others elsewhere."""
    world = a_kept_gpu(a_node("n2", cpu=3.0), a_device("gpu0", "n2", mb=40 * GIB))
    submit(world, a_gang("gang", *bundles(2, gpu_mb=35 * GIB)))
    assert admitted(world) == {"gang": ["n1/gpu1", "n2/gpu0"]}


def test_lower_priority_runs_delay_a_gang_by_their_grace_period_only() -> None:
    low = [a_run(f"low{n}", f"n{n}/gpu0", left=HOUR, priority=20, grace_seconds=Seconds(9.0)) for n in (0, 1)]
    world = a_world(*gpus(1, "n0"), *gpus(1, "n1"), *low, ranks(2))
    assert foreseen(world)[0].start_at == Instant(NOW + 9)


def test_rank_under_notice_holds_its_room_until_its_own_deadline() -> None:
    """All that is free is kept for a task that starts before that rank has left."""
    parts = a_demand(gpu_mb=80 * GIB), a_demand(gpu_mb=20 * GIB)
    ends_soon = a_run("one", "gpu0", left=5.0, gpu_mb=20 * GIB, priority=90)
    world = a_world(*gpus(), ends_soon, a_gang("gang", *parts, min_ranks=1, priority=10))
    admit_all(world)
    agents = Agents(world)
    agents.run()
    task, orders = stop_ranks(world, agents.task, [1], TaskId("nobody"), NOW)
    commit(world, Decision(agents.id, "preempt", tasks=(task,), orders=orders))
    on_gpu0 = PlacementConstraints(devices=("gpu0",))
    submit(world, a_task("wanted", gpu_mb=60 * GIB, where=on_gpu0, submitted_at=NOW - 5))
    submit(world, a_task("long", gpu_mb=20 * GIB, where=on_gpu0))
    assert [(f.task, f.start_at - NOW) for f in foreseen(world)] == [("wanted", 5.0), ("long", 30.0)]
    assert admitted(world) == {}
