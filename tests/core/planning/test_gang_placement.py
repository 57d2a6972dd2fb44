"""Every rank has a place at the same time, or none has."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from gpubroker_server.core.domain.demand import PlacementConstraints, may_use_node, need_mb
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import rank_task
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import DeviceKey, Mib, NodeName
from gpubroker_server.core.planning.fragmentation import fragmentation
from gpubroker_server.core.planning.gangs import gang_search as gang
from gpubroker_server.core.planning.gangs.gang_nodes import gang_nodes_of
from gpubroker_server.core.planning.gangs.gang_search import Gang, fill, place_gang
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.places import scores_of
from gpubroker_server.core.world.placement_scores import DemandMix
from gpubroker_server.core.world.world import World
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GIB, NOW, a_demand, a_device, a_node, a_task, a_world, holding, submit
from tests.core.gangs import a_gang, admit_all, bundles

BIG = 60 * GIB
"""One of these to a device."""


def placed(world: World, task: Task, *usual: dict[str, Any]) -> Gang | None:
    """`usual`: the demands by which places are judged; without any, by room left."""
    world.mix = DemandMix()
    for fields in usual:
        world.mix.add(a_demand(**fields))
    worth = scores_of(world, Policy())
    return place_gang(task, gang_nodes_of(Draft(world), task, Policy(), NOW, worth))


def nodes(found: Gang | None) -> list[str]:
    assert found is not None
    return [place.node for place in found]


def a_cluster(*gpus: int, **node: Any) -> World:
    """n1, n2, ... with so many devices each."""
    parts: list[Any] = [a_node(f"n{at}", **node) for at in range(1, len(gpus) + 1)]
    for at, count in enumerate(gpus, start=1):
        parts += [a_device(f"gpu{index}", f"n{at}") for index in range(count)]
    return a_world(*parts)


def test_all_ranks_have_a_place_of_their_own() -> None:
    found = placed(a_cluster(2), a_gang("gang", *bundles(2, gpu_mb=BIG)))
    assert found is not None
    assert {key for place in found for key, _ in place.devices} == {"test/n1/gpu0", "test/n1/gpu1"}


def test_small_ranks_share_a_device() -> None:
    found = placed(a_cluster(1), a_gang("gang", *bundles(4, gpu_mb=20 * GIB)))
    assert nodes(found) == ["n1"] * 4


def test_without_room_for_the_last_rank_there_is_none_for_the_first() -> None:
    assert placed(a_cluster(1, 1), a_gang("gang", *bundles(3, gpu_mb=BIG))) is None


def test_pack_takes_as_few_nodes_as_it_can() -> None:
    assert nodes(placed(a_cluster(2, 4, 2), a_gang("gang", *bundles(4, gpu_mb=BIG)))) == ["n2"] * 4


def test_pack_leaves_the_larger_node_alone_where_a_smaller_one_will_do() -> None:
    assert nodes(placed(a_cluster(4, 2), a_gang("gang", *bundles(2, gpu_mb=BIG)))) == ["n2"] * 2


def test_spread_takes_as_many_nodes_as_it_can() -> None:
    found = placed(a_cluster(4, 4), a_gang("gang", *bundles(4, gpu_mb=BIG), strategy="spread"))
    assert sorted(nodes(found)) == ["n1", "n1", "n2", "n2"]


def test_strict_pack_takes_one_node_or_none() -> None:
    strict = a_gang("gang", *bundles(3, gpu_mb=BIG), strategy="strict_pack")
    assert nodes(placed(a_cluster(2, 3), strict)) == ["n2"] * 3
    assert placed(a_cluster(2, 2), strict) is None


def test_strict_spread_takes_a_node_for_each_rank_or_none() -> None:
    strict = a_gang("gang", *bundles(2, gpu_mb=BIG), strategy="strict_spread")
    assert sorted(nodes(placed(a_cluster(2, 2), strict))) == ["n1", "n2"]
    assert placed(a_cluster(4), strict) is None


def test_ranks_need_not_be_alike() -> None:
    mixed = a_gang("gang", *bundles(1, cpu=2.0), *bundles(1, gpus=2), *bundles(1, gpu_mb=BIG))
    found = placed(a_cluster(1, 2), mixed)
    assert found is not None
    assert [len(place.devices) for place in found] == [0, 2, 1]
    assert nodes(found)[1:] == ["n2", "n1"]


def test_ranks_share_the_cpu_of_their_node() -> None:
    assert placed(a_cluster(2, cpu=3.0), a_gang("gang", *bundles(2, gpu_mb=BIG, cpu=2.0))) is None
    assert nodes(placed(a_cluster(1, 1, cpu=3.0), a_gang("gang", *bundles(2, gpu_mb=BIG, cpu=2.0))))


def test_what_others_hold_is_no_room() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"), holding(a_task("run", gpu_mb=40 * GIB), "gpu0"))
    assert placed(world, a_gang("gang", *bundles(2, gpu_mb=BIG))) is None


def test_a_preferred_node_is_taken_first() -> None:
    wanted = PlacementConstraints(prefer_nodes=(("node", ("n2",)),))
    found = placed(a_cluster(2, 2), a_gang("gang", *bundles(2, gpu_mb=BIG, where=wanted)))
    assert nodes(found) == ["n2"] * 2


def test_instances_are_told_from_whole_gpus_of_the_same_size() -> None:
    instances = [a_device(f"gpu{index}", "n1", parent="gpu9") for index in range(2)]
    world = a_world(*instances, *(a_device(f"gpu{index}", "n2") for index in range(2)))
    assert nodes(placed(world, a_gang("gang", *bundles(1, gpus=2)))) == ["n2"]


def held(*gib: int) -> World:
    """n1, n2, ... with one device for each number, of which so many GiB are held."""
    parts: list[Any] = []
    for at, held_gib in enumerate(gib, start=1):
        parts += [a_node(f"n{at}"), a_device("gpu0", f"n{at}")]
        if held_gib:
            parts.append(holding(a_task(f"run{at}", gpu_mb=held_gib * GIB), f"n{at}/gpu0"))
    return a_world(*parts)


WHOLE: dict[str, Any] = {"gpus": 1}


@pytest.mark.parametrize("strategy", ["spread", "strict_spread"])
def test_ranks_apart_leave_whole_devices_whole_where_these_are_usual(strategy: str) -> None:
    gang = a_gang("gang", *bundles(2, gpu_mb=10 * GIB), strategy=strategy)
    assert nodes(placed(held(0, 60, 60), gang)) == ["n1", "n2"]
    assert sorted(nodes(placed(held(0, 60, 60), gang, WHOLE))) == ["n2", "n3"]


def test_gang_takes_the_node_where_it_strands_the_least_memory() -> None:
    """The nodes take equally many of its ranks."""
    gang = a_gang("gang", *bundles(1, gpu_mb=20 * GIB))
    usual = {"gpu_mb": 30 * GIB}
    assert nodes(placed(held(50, 30), gang, usual)) == ["n2"], "on n1 10 GiB would be left, and 30 are there"
    assert nodes(placed(held(50, 30), gang)) == ["n1"]
    strict = a_gang("gang", *bundles(1, gpu_mb=20 * GIB), strategy="strict_pack")
    assert nodes(placed(held(50, 30), strict, usual)) == ["n2"]


def test_on_a_node_a_rank_takes_the_device_where_it_strands_the_least() -> None:
    runs = [holding(a_task(f"run{at}", gpu_mb=gib * GIB), f"gpu{at}") for at, gib in enumerate((50, 30))]
    world = a_world(a_device("gpu0"), a_device("gpu1"), *runs)
    gang = a_gang("gang", *bundles(1, gpu_mb=20 * GIB))
    for usual, device in (((), "gpu0"), (({"gpu_mb": 30 * GIB},), "gpu1")):
        found = placed(world, gang, *usual)
        assert found is not None
        assert [key for key, _ in found[0].devices] == [f"test/n1/{device}"]


def test_equal_ranks_fill_device_by_device_so_the_last_free_whole_devices() -> None:
    gang = a_gang("gang", *bundles(4, gpu_mb=30 * GIB, placement="spread"))
    found = placed(a_cluster(2), gang)
    assert found is not None
    devices = [key.rpartition("/")[2] for place in found for key, _ in place.devices]
    assert devices == ["gpu0", "gpu0", "gpu1", "gpu1"]


def test_ranks_that_are_spread_take_the_gpus_with_the_fewest_holders() -> None:
    world = a_world(a_device("gpu0", mb=80 * GIB), *(a_device(f"gpu{n}", mb=24 * GIB) for n in (1, 2)))
    gang = a_gang("gang", *bundles(3, gpu_mb=2 * GIB, placement="spread"))
    found = placed(world, gang)
    assert found is not None
    assert sorted(key for place in found for key, _ in place.devices) == [f"test/n1/gpu{n}" for n in range(3)]


def test_a_gang_that_is_planned_leaves_less_stranded_than_by_room_alone() -> None:
    left = {}
    for placement in ("best_fit", "stranded"):
        world = held(0, 0, 60, 60)
        world.mix = DemandMix()
        for _ in range(9):
            world.mix.add(a_demand(**WHOLE))
        submit(world, a_gang("gang", *bundles(2, gpu_mb=10 * GIB), strategy="strict_spread"))
        admit_all(world, Policy(placement=placement))
        left[placement] = fragmentation(world, Policy(), NOW).total.stranded_mb
    assert left["stranded"] < left["best_fit"] / 2


def test_an_elastic_gang_takes_what_there_is() -> None:
    elastic = a_gang("gang", *bundles(6, gpu_mb=BIG), min_ranks=2)
    assert len(nodes(placed(a_cluster(2, 2), elastic))) == 4
    assert len(nodes(placed(a_cluster(4, 4), elastic))) == 6
    assert placed(a_cluster(1), elastic) is None


def test_the_search_gives_up_after_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = a_gang("gang", *(part for size in (50, 40, 30) for part in bundles(1, gpu_mb=size * GIB)))
    world = a_cluster(2)
    assert placed(world, mixed) is not None
    monkeypatch.setattr(gang, "MAX_STEPS", 2)
    assert placed(world, mixed) is None


SIZES = (10, 20, 30, 50)
RANKS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        *({"gpu_mb": size} for size in SIZES),
        {"gpu_mb": 20, "cpu": 2.0},
        {"gpus": 1},
        {"gpus": 2},
        {"gpus": 2, "gpu_mb": 20},
        {"cpu": 1.0},
        {"gpu_mb": 20, "placement": "spread"},
    ]
)


@st.composite
def clusters(draw: st.DrawFn) -> World:
    parts: list[Any] = []
    for at in range(1, draw(st.integers(1, 3)) + 1):
        facts = {"cpu": draw(st.sampled_from((1.0, 4.0))), "max_runs": draw(st.sampled_from((1, 2, 8)))}
        parts.append(a_node(f"n{at}", **facts))
        for index in range(draw(st.integers(0, 2))):
            parts.append(a_device(f"gpu{index}", f"n{at}", mb=draw(st.sampled_from((40, 60, 80)))))
    return a_world(*parts)


@st.composite
def gangs(draw: st.DrawFn) -> Task:
    shapes: list[dict[str, Any]] = draw(st.lists(RANKS, min_size=1, max_size=4))
    strategy = draw(st.sampled_from(("pack", "spread", "strict_pack", "strict_spread")))
    parts = [part for shape in shapes for part in bundles(1, **shape)]
    return a_gang("gang", *parts, strategy=strategy)


def ways(world: World, task: Task) -> Iterator[Gang]:
    """Every choice of nodes and devices there is, whether it holds or not."""
    options = []
    for bundle in task.demand.bundles:
        mine = [] if bundle.gpus else [Placement(name) for name in world.nodes]
        for name, keys in world.by_node.items() if bundle.gpus else ():
            usable = [(key, need_mb(bundle, world.ledgers[key].device)) for key in keys]
            fit = [(key, need) for key, need in usable if need is not None]
            mine += [Placement(name, tuple(some)) for some in combinations(fit, bundle.gpus)]
        options.append(mine)
    yield from product(*options)


def holds(world: World, task: Task, places: Sequence[Placement]) -> bool:
    """Whether all of it fits together, by adding up."""
    strategy, names = task.demand.strategy, [place.node for place in places]
    if strategy == "strict_pack" and len(set(names)) > 1:
        return False
    if strategy == "strict_spread" and len(set(names)) < len(names):
        return False
    taken: dict[DeviceKey, int] = {}
    cpu: dict[NodeName, float] = {}
    for bundle, place in zip(task.demand.bundles, places, strict=True):
        cpu[place.node] = cpu.get(place.node, 0.0) + bundle.cpu
        for key, mb in place.devices:
            taken[key] = taken.get(key, 0) + mb
    return (
        all(mb <= world.ledgers[key].device.allocatable_mb for key, mb in taken.items())
        and all(used <= world.nodes[name].cpu for name, used in cpu.items())
        and all(names.count(name) <= world.nodes[name].max_runs for name in names)
        and all(may_use_node(b, world.nodes[n]) for b, n in zip(task.demand.bundles, names, strict=True))
    )


USUAL = st.lists(RANKS, max_size=3)


@given(clusters(), gangs(), USUAL)
def test_there_are_places_exactly_if_trying_everything_finds_some(
    world: World, task: Task, usual: list[dict[str, Any]]
) -> None:
    found = placed(world, task, *usual)
    if found is None:
        assert not any(holds(world, task, way) for way in ways(world, task))
    else:
        assert holds(world, task, found)
        assert [len(place.devices) for place in found] == [bundle.gpus for bundle in task.demand.bundles]


@given(clusters(), gangs())
def test_the_same_room_gives_the_same_places(world: World, task: Task) -> None:
    assert placed(world, task) == placed(world, task)


def test_a_rank_without_a_size_takes_whole_devices() -> None:
    found = placed(a_cluster(2), a_gang("gang", *bundles(2, gpus=1)))
    assert found is not None
    assert [mb for place in found for _, mb in place.devices] == [Mib(80 * GIB)] * 2


@given(
    clusters(),
    st.integers(1, 6),
    st.sampled_from(({"gpu_mb": 20}, {"gpu_mb": 40, "cpu": 1.0}, {"gpus": 2, "gpu_mb": 20}, {"cpu": 1.0})),
    st.sampled_from(("pack", "spread", "strict_pack", "strict_spread")),
    USUAL,
)
def test_ranks_that_are_alike_lie_where_the_search_would_put_them(
    world: World, count: int, shape: dict[str, Any], strategy: str, usual: list[dict[str, Any]]
) -> None:
    """One rank that asks for next to nothing more makes them unlike, so that places are searched for."""
    odd = (*bundles(1, memory_mb=1, **shape), *bundles(count - 1, **shape))
    alike = a_gang("gang", *bundles(count, **shape), strategy=strategy)
    filled = placed(world, alike, *usual)
    searched = placed(world, a_gang("gang", *odd, strategy=strategy), *usual)
    assert (filled is None) == (searched is None)
    assert sorted(filled or (), key=repr) == sorted(searched or (), key=repr)


@pytest.mark.parametrize("strategy", ["pack", "spread", "strict_spread"])
@pytest.mark.parametrize("promised", [1, 3])
def test_nodes_that_take_fewer_than_was_counted_are_left_as_they_were(strategy: str, promised: int) -> None:
    world = a_cluster(1)
    part = rank_task(a_gang("gang", *bundles(3, gpu_mb=60 * GIB)), 0)
    [gang_node] = gang_nodes_of(Draft(world), part, Policy(), NOW)
    before = dict(gang_node.free)
    assert fill(strategy, part, 3, [gang_node], {gang_node.node.name: promised}) is None
    assert (gang_node.free, gang_node.ranks) == (before, [])


def test_equal_ranks_are_spread_evenly_over_the_nodes() -> None:
    world = a_cluster(2, 2, 1)
    found = placed(world, a_gang("gang", *bundles(5, gpu_mb=60 * GIB), strategy="spread"))
    assert Counter(nodes(found)) == {"n1": 2, "n2": 2, "n3": 1}


def test_two_sorts_of_ranks_that_fit_alone_and_not_together_have_no_place() -> None:
    unlike = (*bundles(1, gpu_mb=60 * GIB), *bundles(2, gpu_mb=50 * GIB))
    assert placed(a_cluster(1, 1), a_gang("gang", *unlike)) is None


def test_ranks_without_gpus_that_only_fit_one_at_a_time_have_no_place() -> None:
    parts = *bundles(1, cpu=3.0), *bundles(1, cpu=2.0)
    assert placed(a_world(a_node("n1", cpu=4.0)), a_gang("gang", *parts)) is None
    assert nodes(placed(a_world(a_node("n1", cpu=5.0)), a_gang("gang", *parts))) == ["n1", "n1"]
