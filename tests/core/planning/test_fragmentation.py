"""Free memory in pieces: how much of it is of no use, and when that keeps tasks waiting."""

from typing import Any

from gpubroker.wire.stats import Scattered
from gpubroker_server.core.domain.decisions import Notice
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.fragmentation import (
    LOOK_SECONDS,
    FreeMemory,
    ScatteredWatch,
    find_scattered_demand,
    fragmentation,
)
from gpubroker_server.core.world.placement_scores import DemandMix
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, a_demand, a_device, a_node, a_task, a_world, holding, submit


def on(*gib_held: int, node: str = "n1") -> list[Any]:
    """One device of 80 GiB for each number, of which so many GiB are held."""
    parts: list[Any] = []
    for index, held in enumerate(gib_held):
        parts += [a_device(f"gpu{index}", node)]
        if held:
            parts.append(holding(a_task(f"{node}-{index}", gpu_mb=held * GIB), f"{node}/gpu{index}"))
    return parts


def stranded(world: World, *usual: dict[str, Any]) -> dict[str, FreeMemory]:
    world.mix = DemandMix()
    for fields in usual:
        world.mix.add(a_demand(**fields))
    found = fragmentation(world, Policy(), NOW)
    return {name.removeprefix("test/"): of for name, of in found.devices.items()}


def waits(world: World, **task: Any) -> Scattered | None:
    for number in range(3):
        submit(world, a_task(f"w{number}", **task))
    return find_scattered_demand(world, Policy(), NOW)


def test_memory_is_stranded_to_the_share_of_demands_that_cannot_use_it() -> None:
    world = a_world(*on(0, 60))
    found = stranded(world, {"gpu_mb": 10 * GIB}, {"gpu_mb": 40 * GIB})
    assert found == {"n1/gpu0": FreeMemory(80 * GIB, 0), "n1/gpu1": FreeMemory(20 * GIB, 10 * GIB)}


def test_idle_devices_without_cpu_beside_them_are_stranded() -> None:
    world = a_world(a_node("n1", cpu=4), a_device("gpu0"))
    assert stranded(world, {"gpus": 1, "cpu": 8.0}) == {"n1/gpu0": FreeMemory(80 * GIB, 80 * GIB)}


def test_devices_too_few_for_a_demand_on_one_node_are_stranded() -> None:
    world = a_world(*on(0), *on(0, node="n2"))
    assert set(stranded(world, {"gpus": 2}).values()) == {FreeMemory(80 * GIB, 80 * GIB)}


def test_nothing_is_stranded_while_nothing_is_usual() -> None:
    assert stranded(a_world(*on(70))) == {"n1/gpu0": FreeMemory(10 * GIB, 0)}


def test_what_takes_no_tasks_is_not_counted() -> None:
    world = a_world(*on(0), a_node("n2", cordoned=True), *on(0, node="n2"))
    assert list(stranded(world, {"gpus": 1})) == ["n1/gpu0"]
    assert fragmentation(world, Policy(), Instant(NOW + 60)).total == FreeMemory()
    assert fragmentation(world, Policy(), Instant(NOW + 60)).total.share is None


def test_the_sums_of_kinds_make_the_total() -> None:
    small = a_device("gpu9", mb=24 * GIB, kind="4090")
    world = a_world(*on(60), small)
    world.mix.add(a_demand(gpu_mb=24 * GIB))
    world.mix.add(a_demand(gpu_mb=24 * GIB))
    found = fragmentation(world, Policy(), NOW)
    assert list(found.kinds) == ["4090", "H100"]
    assert found.total.free_mb == 44 * GIB
    assert found.total.share == found.total.stranded_mb / found.total.free_mb
    assert found.kinds["4090"].stranded_mb < found.kinds["H100"].stranded_mb


def test_answers_are_forgotten_and_found_again(monkeypatch: Any) -> None:
    monkeypatch.setattr("gpubroker_server.core.world.placement_scores.MAX_CACHED_STATES", 1)
    world = a_world(*on(0, 60), *on(30, node="n2"))
    first = stranded(world, {"gpu_mb": 40 * GIB})
    assert stranded(world, {"gpu_mb": 40 * GIB}) == first


def test_tasks_wait_for_pieces_that_are_large_enough() -> None:
    found = waits(a_world(*on(60, 50, 40)), gpu_mb=50 * GIB)
    assert found == Scattered(gpus=1, gpu_mb=50 * GIB, waiting=3, free_mb=90 * GIB, largest_mb=40 * GIB)


def test_tasks_wait_for_enough_devices_on_one_node() -> None:
    assert waits(a_world(*on(0, 10), *on(0, node="n2")), gpus=2) is not None
    assert waits(a_world(*on(0, 0), *on(0, node="n2")), gpus=2) is None


def test_it_is_no_matter_of_pieces_where_memory_is_short_in_sum() -> None:
    assert waits(a_world(*on(60, 70)), gpu_mb=50 * GIB) is None


def test_it_is_no_matter_of_pieces_where_one_is_large_enough() -> None:
    assert waits(a_world(*on(60, 0)), gpu_mb=50 * GIB, cpu=1000.0) is None


def test_tasks_without_devices_wait_for_no_pieces() -> None:
    world = a_world(*on(60, 50))
    for number in range(9):
        submit(world, a_task(f"cpu{number}", cpu=1000.0))
    assert find_scattered_demand(world, Policy(), NOW) is None
    assert waits(world, gpu_mb=50 * GIB) is not None


def test_pieces_on_nodes_that_a_task_may_not_use_do_not_count() -> None:
    here = PlacementConstraints(nodes=(("node", ("n1",)),))
    assert waits(a_world(*on(60, 50), *on(0, node="n2")), gpu_mb=50 * GIB, where=here) is not None


def test_only_the_most_common_waiting_demand_is_examined() -> None:
    world = a_world(*on(60, 60))
    submit(world, a_task("rare", gpu_mb=30 * GIB))
    assert find_scattered_demand(world, Policy(), NOW) is not None
    assert waits(world, gpu_mb=10 * GIB) is None


def test_devices_that_a_task_may_not_use_do_not_count_as_pieces() -> None:
    world = a_world(*on(60, 60))
    assert find_scattered_demand(world, Policy(), NOW) is None
    assert waits(world, gpu_mb=90 * GIB) is None


def test_lasting_fragmentation_is_said_once_and_so_is_its_end() -> None:
    watch = ScatteredWatch()

    def looks(after_seconds: float, *gib_held: int) -> list[Notice]:
        now = Instant(NOW + after_seconds)
        world = a_world(*on(*gib_held), now=now)
        submit(world, a_task("wide", gpu_mb=40 * GIB))
        decided = watch.look(world, Policy(), now)
        assert not any(decision.is_empty() for decision in decided), "written, though no row changes"
        return [notice for decision in decided for notice in decision.notices]

    assert looks(0, 50, 50) == [], "the next start may end it"
    assert looks(LOOK_SECONDS - 1, 50, 50) == [], "too early to look again"
    sizes = {"need_mb": 40 * GIB, "free_mb": 60 * GIB, "largest_mb": 30 * GIB}
    said = Notice("memory.fragmented", "cluster", {"waiting": 1, **sizes})
    assert looks(LOOK_SECONDS, 50, 50) == [said]
    assert looks(2 * LOOK_SECONDS, 50, 50) == []
    assert looks(3 * LOOK_SECONDS, 50, 0) == [Notice("memory.defragmented", "cluster", {})]
    assert looks(4 * LOOK_SECONDS, 50, 0) == []
