"""Places by what they leave over for the demands that are usual."""

from typing import Any

import pytest
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.places import scores_of
from gpubroker_server.core.world import placement_scores as mixes
from gpubroker_server.core.world.placement_scores import DemandMix, rows
from gpubroker_server.core.world.world import World

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
    key,
    submit,
)
from tests.core.gangs import a_gang, bundles


def usual(world: World, **demands: tuple[int, dict[str, object]]) -> None:
    """So many of each were submitted lately."""
    for count, fields in demands.values():
        for _ in range(count):
            world.mix.add(a_demand(**fields))


def goes_to(world: World, placement: Any = "stranded", **task: object) -> str:
    submit(world, a_task("new", **task))
    commit(world, plan_cycle(world, Policy(placement=placement), NOW).decisions)
    placed = world.tasks[TaskId("new")]
    keys = [lease.device.removeprefix("test/") for lease in world.leases_of(placed)]
    return ",".join(keys) or str(placed.node)


def two_devices() -> World:
    """30 GiB are left on the one, 48 on the other."""
    world = a_world(
        a_device("gpu0"),
        a_device("gpu1"),
        holding(a_task("a", gpu_mb=50 * GIB), "gpu0"),
        holding(a_task("b", gpu_mb=32 * GIB), "gpu1"),
    )
    world.mix = DemandMix()
    return world


def test_a_task_leaves_room_for_typical_demands() -> None:
    world = two_devices()
    usual(world, small=(9, {"gpu_mb": 24 * GIB}), large=(1, {"gpu_mb": 48 * GIB}))
    assert goes_to(world, gpu_mb=24 * GIB) == "n1/gpu1", "two more of them fit: 24 + 24"


def test_best_fit_takes_the_fullest_device_whatever_is_typical() -> None:
    world = two_devices()
    usual(world, small=(9, {"gpu_mb": 24 * GIB}))
    assert goes_to(world, "best_fit", gpu_mb=24 * GIB) == "n1/gpu0"


def test_spread_by_policy_takes_the_emptiest_device() -> None:
    world = two_devices()
    usual(world, small=(9, {"gpu_mb": 24 * GIB}))
    assert goes_to(world, "spread", gpu_mb=8 * GIB) == "n1/gpu1"


def test_a_task_that_asks_to_be_spread_is_whatever_the_policy_says() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"), holding(a_task("a", gpu_mb=1), "gpu0"))
    assert goes_to(world, gpu_mb=8 * GIB, placement="spread") == "n1/gpu1"


def test_a_task_without_devices_keeps_off_the_cpus_that_devices_need() -> None:
    world = a_world(a_node("n1", cpu=8), a_node("n2", cpu=64), a_device("gpu0", "n1"), a_device("gpu0", "n2"))
    usual(world, gpu=(5, {"gpus": 1, "cpu": 8.0}))
    assert goes_to(world, cpu=4.0) == "n2"


def test_rare_devices_are_left_to_those_that_need_them() -> None:
    devices = (
        a_device(f"gpu{n}", "n1" if n < 2 else "n2", kind="H100" if n < 2 else "L40") for n in range(8)
    )
    world = a_world(a_node("n1"), a_node("n2"), *devices)
    usual(
        world,
        any=(5, {"gpus": 1}),
        picky=(5, {"gpus": 1, "where": PlacementConstraints(kinds=("H100",))}),
    )
    assert goes_to(world, gpus=1) == "n2/gpu2"


def test_on_a_node_with_several_device_classes_all_are_scored() -> None:
    world = a_world(a_device("gpu0", mb=80 * GIB), a_device("gpu1", mb=24 * GIB, kind="4090"))
    usual(world, small=(5, {"gpu_mb": 20 * GIB}), large=(5, {"gpu_mb": 80 * GIB}))
    assert goes_to(world, gpu_mb=20 * GIB) == "n1/gpu1"


def test_preferences_come_before_fragmentation() -> None:
    world = a_world(a_device("gpu0", mb=80 * GIB), a_device("gpu1", mb=24 * GIB, kind="4090"))
    usual(world, small=(5, {"gpu_mb": 20 * GIB}), large=(5, {"gpu_mb": 80 * GIB}))
    assert goes_to(world, gpu_mb=20 * GIB, where=PlacementConstraints(prefer_kinds=("H100",))) == "n1/gpu0"


def test_several_devices_of_several_classes_are_the_fullest_ones() -> None:
    world = a_world(
        a_device("gpu0", mb=80 * GIB),
        a_device("gpu1", mb=24 * GIB, kind="4090"),
        a_device("gpu2", mb=40 * GIB),
    )
    usual(world, pair=(5, {"gpus": 2, "gpu_mb": 20 * GIB}))
    assert goes_to(world, gpus=2, gpu_mb=20 * GIB) == "n1/gpu1,n1/gpu2"


def test_scores_stay_the_same_until_enough_submissions_are_new() -> None:
    world = a_world(a_device("gpu0"))
    usual(world, first=(80, {"gpu_mb": GIB}))
    before = scores_of(world, Policy())
    usual(world, few=(2, {"gpus": 1}))
    assert scores_of(world, Policy()) is before
    world.add_node(a_node("n2"))
    assert scores_of(world, Policy()) is before, "another node, the same devices"
    usual(world, more=(20, {"gpus": 1}))
    after = scores_of(world, Policy())
    assert after is not before
    world.add_device(a_device("gpu1"))
    assert scores_of(world, Policy()) is not after


def test_after_a_restart_typical_demands_are_those_of_unfinished_tasks() -> None:
    """They come from pending and running tasks."""
    world = a_world(a_device("gpu0"), holding(a_task("runs", gpu_mb=GIB), "gpu0"), a_task("waits", gpus=1))
    assert world.mix.edition == {a_demand(gpu_mb=GIB): 1, a_demand(gpus=1): 1}
    assert scores_of(world, Policy()) is not None


def test_each_rank_of_a_gang_counts_as_a_demand() -> None:
    world = a_world(a_device("gpu0"))
    submit(world, a_gang("gang", *bundles(3, gpu_mb=GIB), *bundles(1, cpu=1.0)))
    assert world.mix.edition == {a_demand(gpu_mb=GIB): 3}


@pytest.mark.parametrize("kind", ["H100", "4090"])
def test_a_placement_needs_as_many_devices_with_room_as_are_asked_for(kind: str) -> None:
    nothing = a_device("gpu2", mb=8, reserve_mb=8)
    world = a_world(a_device("gpu0"), a_device("gpu1", kind=kind), nothing)
    usual(world, any=(1, {"gpu_mb": GIB}))
    worth = scores_of(world, Policy())
    assert worth is not None
    node = rows([(world.ledgers[key(name)].device, mb) for name, mb in (("gpu0", 9), ("gpu1", 5))], 8.0)
    assert worth.spot(a_demand(gpus=2, gpu_mb=7), node) is None
    spot = worth.spot(a_demand(gpus=2, gpu_mb=5), node)
    assert spot is not None
    assert spot.devices == ((key("gpu0"), 5), (key("gpu1"), 5))


def test_the_published_measure_may_be_chosen() -> None:
    world = two_devices()
    usual(world, small=(9, {"gpu_mb": 24 * GIB}), large=(1, {"gpu_mb": 48 * GIB}))
    assert goes_to(world, "fgd", gpu_mb=30 * GIB) == "n1/gpu0", "nothing is left over there"


def test_no_demand_is_typical_if_none_could_run_here() -> None:
    world = a_world(a_device("gpu0", mb=GIB))
    usual(world, large=(5, {"gpu_mb": 80 * GIB}))
    assert scores_of(world, Policy()) is None


def test_old_demands_are_forgotten() -> None:
    mix = DemandMix()
    for _ in range(mixes.MAX_COUNTED):
        mix.add(a_demand(gpu_mb=GIB))
    for _ in range(3 * mixes.MAX_COUNTED):
        mix.add(a_demand(gpus=1))
    counts = [mix.edition.get(a_demand(gpu_mb=GIB), 0), mix.edition[a_demand(gpus=1)]]
    assert counts[0] < counts[1] / 4


def test_the_number_of_counted_demands_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixes, "MAX_DEMANDS", 10)
    mix = DemandMix()
    for size in range(1, 100):
        mix.add(a_demand(gpus=1))
        mix.add(a_demand(gpu_mb=size))
    assert len(mix.edition) <= 10
    assert mix.edition[a_demand(gpus=1)] == max(mix.edition.values())


def test_demands_that_differ_only_beside_devices_count_as_one() -> None:
    mix = DemandMix()
    mix.add(a_demand(gpu_mb=GIB, memory_mb=5, custom={"licence": 1.0}, slots=(("tenant:a", 1.0),), pool="p"))
    mix.add(a_demand(gpu_mb=GIB, placement="spread", where=PlacementConstraints(prefer_kinds=("H100",))))
    mix.add(a_demand(cpu=1.0))
    assert mix.edition == {a_demand(gpu_mb=GIB): 2}
