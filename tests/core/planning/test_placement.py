"""Where a task goes, and what is said where it cannot go."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Placement, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, TaskId
from gpubroker_server.core.explain.blockers import Blocker, room_blockers
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.budget import finish
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.places import Places, PlaceTables
from gpubroker_server.core.world.revisions import RevisionLog
from gpubroker_server.core.world.world import World

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_lease,
    a_node,
    a_pledge,
    a_sample,
    a_task,
    a_world,
    holding,
    key,
    submit,
)
from tests.core.gangs import admit_all

POLICY = Policy(custom_limits=(CustomLimit("licence", 4.0),))


def place_of(world: World, task: Task, now: float = NOW) -> Placement | Blocker:
    """Where it goes, or what above all keeps it from going anywhere."""
    draft = Draft(world)
    place = Places(draft, POLICY, Instant(now)).best(task)
    return place or room_blockers(survey_nodes(draft, task, POLICY, Instant(now)))[0]


def found(world: World, *, now: float = NOW, **task: Any) -> Placement | Blocker:
    return place_of(world, a_task("new", **task), now)


def devices(world: World, **task: Any) -> list[str]:
    """`n1/gpu0` and so on, where it would be placed."""
    placement = found(world, **task)
    assert isinstance(placement, Placement), placement
    return [device.removeprefix("test/") for device, _ in placement.devices]


def reason(world: World, **task: Any) -> Reason:
    placement = found(world, **task)
    assert isinstance(placement, Blocker), placement
    return placement.reason


def filled(*gib: int, node: str = "n1") -> list[Any]:
    """One device of 80 GiB for each number, of which so many GiB are held."""
    parts: list[Any] = []
    for index, held in enumerate(gib):
        parts.append(a_device(f"gpu{index}", node))
        if held:
            parts.append(holding(a_task(f"{node}-{index}", gpu_mb=held * GIB), f"{node}/gpu{index}"))
    return parts


def test_the_fullest_device_that_still_has_room_is_taken() -> None:
    assert devices(a_world(*filled(10, 50, 70)), gpu_mb=20 * GIB) == ["n1/gpu1"]


def test_spread_takes_the_emptiest() -> None:
    assert devices(a_world(*filled(10, 0, 70)), gpu_mb=20 * GIB, placement="spread") == ["n1/gpu1"]


def sizes(*gib: int, held: Sequence[int] = ()) -> list[Any]:
    """GPUs of these sizes on one node, the first of them with so many runs of 2 GiB each."""
    runs = [
        holding(a_task(f"run{index}-{n}", gpu_mb=2 * GIB), f"n1/gpu{index}")
        for index, count in enumerate(held)
        for n in range(count)
    ]
    return [*(a_device(f"gpu{index}", mb=size * GIB) for index, size in enumerate(gib)), *runs]


def test_spread_takes_the_gpu_with_the_fewest_holders_whatever_its_size() -> None:
    spread = {"gpu_mb": 2 * GIB, "placement": "spread"}
    assert devices(a_world(*sizes(80, 24, 24, held=(1,))), **spread) == ["n1/gpu1"]
    assert devices(a_world(*sizes(80, 24, 24, held=(1, 1))), **spread) == ["n1/gpu2"]
    assert devices(a_world(*sizes(24, 80, 24, held=(1, 1, 1))), **spread) == ["n1/gpu1"], (
        "of as many holders, the smallest share is leased of the largest"
    )
    assert devices(a_world(*sizes(80, 24, 24, held=(2, 1, 1))), **spread) == ["n1/gpu1"]
    reserve = a_device("gpu0", mb=80 * GIB), a_device("gpu1", mb=80 * GIB, reserve_mb=16 * GIB)
    run = holding(a_task("run", gpu_mb=2 * GIB), "n1/gpu0")
    assert devices(a_world(*reserve, run), **spread) == ["n1/gpu1"]


def test_spread_tasks_of_one_cycle_go_to_different_gpus() -> None:
    tasks = [a_task(f"t{n}", gpu_mb=2000, placement="spread") for n in range(4)]
    world = a_world(*sizes(80, 24, 24), *tasks)
    plan = plan_cycle(world, POLICY, NOW, budget=10_000)
    assert [lease.device for decision in plan.decisions for lease in decision.leases] == [
        key(f"gpu{index}") for index in (0, 1, 2, 0)
    ]


def test_spread_keeps_off_a_gpu_that_others_use_without_a_lease() -> None:
    used = a_sample(key("gpu0"), used_mb=40 * GIB, foreign_mb=40 * GIB)
    world = a_world(a_device("gpu0"), a_device("gpu1"), used)
    assert devices(world, gpu_mb=2 * GIB, placement="spread") == ["n1/gpu1"]


def test_spread_over_several_gpus_counts_the_holders_of_all_of_them() -> None:
    other = [a_device(f"gpu{n}", "n2", mb=24 * GIB) for n in range(2)]
    world = a_world(*sizes(80, 80, held=(1,)), *other)
    assert devices(world, gpus=2, gpu_mb=2 * GIB, placement="spread") == ["n2/gpu0", "n2/gpu1"]


def test_equal_devices_go_by_name() -> None:
    world = a_world(*filled(0, 0), *filled(0, 0, node="n2"))
    assert devices(world, gpu_mb=20 * GIB) == ["n1/gpu0"]
    assert devices(world, gpu_mb=20 * GIB, placement="spread") == ["n1/gpu0"]


def test_equal_devices_go_to_the_busier_node_and_spread_to_the_idler() -> None:
    busy = holding(a_task("cpu", cpu=8.0), node="n2")
    world = a_world(*filled(0), *filled(0, node="n2"), busy)
    assert devices(world, gpus=1) == ["n2/gpu0"]
    assert devices(world, gpus=1, placement="spread") == ["n1/gpu0"]


def test_spread_prefers_the_node_with_fewer_runs_to_the_first_in_order() -> None:
    runs = [holding(a_task(f"run{n}", gpu_mb=80 * GIB), f"n1/gpu{n}") for n in range(2)]
    other = holding(a_task("other", gpu_mb=80 * GIB), "n2/gpu0")
    world = a_world(*filled(0, 0, 0, 0), *filled(0, 0, node="n2"), *runs, other)
    assert devices(world, gpus=1, placement="spread") == ["n2/gpu1"]
    assert devices(world, gpus=1) == ["n1/gpu2"]


def test_a_spread_task_without_gpu_goes_to_the_node_with_fewer_runs() -> None:
    busy = holding(a_task("run", cpu=1.0), node="n1")
    world = a_world(a_node("n1", cpu=64.0), a_node("n2", cpu=8.0), busy)
    assert found(world, cpu=2.0, placement="spread") == Placement(NodeName("n2"), ())


def test_all_devices_of_a_task_are_on_one_node() -> None:
    world = a_world(*filled(60, 0), *filled(10, 10, node="n2"))
    assert devices(world, gpus=2, gpu_mb=30 * GIB) == ["n2/gpu0", "n2/gpu1"]


def test_a_fraction_is_of_what_may_be_leased_of_the_device() -> None:
    placement = found(a_world(a_device(mb=101, reserve_mb=2)), gpu_fraction=0.5)
    assert placement == Placement(NodeName("n1"), ((key("gpu0"), Mib(49)),))


def test_a_whole_device_is_all_of_an_empty_one() -> None:
    world = a_world(*filled(1, 0))
    assert found(world, gpus=1) == Placement(NodeName("n1"), ((key("gpu1"), Mib(80 * GIB)),))
    assert found(world, gpu_mb=5 * GIB, exclusive=True) == Placement(
        NodeName("n1"), ((key("gpu1"), Mib(80 * GIB)),)
    )


def test_nobody_fits_beside_a_whole_device() -> None:
    world = a_world(holding(a_task("whole", gpus=1), "gpu0", mb=80 * GIB))
    assert reason(world, gpu_mb=1) is Reason.WAITING_FOR_MEMORY


def test_foreign_memory_is_not_given_away() -> None:
    world = a_world(a_device(), a_sample("gpu0", foreign_mb=30 * GIB))
    assert devices(world, gpu_mb=50 * GIB) == ["n1/gpu0"]
    assert reason(world, gpu_mb=51 * GIB) is Reason.WAITING_FOR_MEMORY


@pytest.mark.parametrize(
    "measured", [{"foreign_mb": 1}, {"used_mb": 1 * GIB}, {"used_mb": GIB, "foreign_mb": 1}]
)
def test_a_device_that_strangers_use_is_not_whole(measured: dict[str, Any]) -> None:
    world = a_world(a_device(), a_sample("gpu0", **measured))
    assert reason(world, gpus=1) is Reason.WAITING_FOR_MEMORY
    assert reason(world, gpu_mb=1, exclusive=True) is Reason.WAITING_FOR_MEMORY
    assert devices(world, gpu_mb=70 * GIB) == ["n1/gpu0"]


def test_a_device_is_whole_although_strangers_use_what_was_declared_of_it() -> None:
    world = a_world(a_device(declared_foreign_mb=2 * GIB), a_sample("gpu0", used_mb=GIB, foreign_mb=GIB))
    assert found(world, gpus=1) == Placement(NodeName("n1"), ((key("gpu0"), Mib(78 * GIB)),))


def test_nobody_is_stopped_for_a_whole_device_that_strangers_use() -> None:
    low = holding(a_task("low", priority=10, gpu_mb=8 * GIB), "gpu0")
    world = a_world(a_device(), low, a_sample("gpu0", foreign_mb=1))
    submit(world, a_task("high", priority=95, gpus=1))
    assert plan_cycle(world, POLICY, NOW).decisions == ()


@pytest.mark.parametrize("state", [LeaseState.RELEASING, LeaseState.QUARANTINED])
def test_memory_of_a_run_that_is_not_confirmed_gone_is_not_free(state: LeaseState) -> None:
    over = a_task("over", gpu_mb=60 * GIB, fence=1)
    world = a_world(a_device(), a_lease(over, "gpu0", 60 * GIB, state=state))
    assert reason(world, gpu_mb=30 * GIB) is Reason.WAITING_FOR_MEMORY


def test_a_device_whose_sample_is_too_old_takes_nothing() -> None:
    world = a_world(a_device())
    assert reason(world, gpu_mb=1, now=NOW + 6.5) is Reason.BACKEND_UNAVAILABLE


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"ready": False}, Reason.BACKEND_UNAVAILABLE), ({"cordoned": True}, Reason.NODE_CORDONED)],
)
def test_a_node_that_is_away_or_cordoned_takes_nothing(fields: dict[str, Any], expected: Reason) -> None:
    world = a_world(a_node("n1", **fields), a_device())
    assert reason(world, gpu_mb=1) is expected
    assert reason(world, cpu=1.0) is expected


def test_where_only_smaller_devices_are_ready_no_device_matches() -> None:
    world = a_world(a_node("n1", ready=False), a_device(), a_device("gpu0", "n2", mb=10 * GIB))
    assert reason(world, gpu_mb=20 * GIB) is Reason.NO_MATCHING_DEVICE


def test_what_no_device_could_ever_give_exceeds_capacity() -> None:
    assert reason(a_world(a_device()), gpu_mb=81 * GIB) is Reason.EXCEEDS_CAPACITY


def test_without_any_node_the_backend_is_unavailable() -> None:
    assert reason(World(), cpu=1.0) is Reason.BACKEND_UNAVAILABLE


def test_memory_that_is_free_in_sum_but_not_in_one_piece_is_fragmented() -> None:
    assert reason(a_world(*filled(60, 60)), gpu_mb=40 * GIB) is Reason.FRAGMENTED


def test_gpus_that_are_free_on_different_nodes_are_fragmented() -> None:
    world = a_world(*filled(0, 80), *filled(0, 80, node="n2"))
    assert reason(world, gpus=2) is Reason.FRAGMENTED


def test_too_little_memory_in_sum_is_waited_for() -> None:
    assert reason(a_world(*filled(60, 65)), gpu_mb=40 * GIB) is Reason.WAITING_FOR_MEMORY


@pytest.mark.parametrize("demand", [{"cpu": 3.0}, {"memory_mb": 30 * GIB}, {"gpu_mb": 1, "cpu": 3.0}])
def test_a_full_node_limits_concurrency(demand: dict[str, Any]) -> None:
    node = a_node("n1", cpu=4.0, memory_mb=40 * GIB)
    run = holding(a_task("run", cpu=2.0, memory_mb=20 * GIB), node="n1")
    assert reason(a_world(node, a_device(), run), **demand) is Reason.CONCURRENCY_LIMITED


def test_a_node_takes_no_more_runs_than_it_has_slots() -> None:
    world = a_world(a_node("n1", max_runs=1), holding(a_task("run"), node="n1"))
    assert reason(world) is Reason.CONCURRENCY_LIMITED


def test_a_custom_resource_that_is_used_up_limits_concurrency() -> None:
    world = a_world(a_node("n1"), holding(a_task("run", custom={"licence": 3.0}), node="n1"))
    assert reason(world, custom={"licence": 2.0}) is Reason.CONCURRENCY_LIMITED
    assert isinstance(found(world, custom={"licence": 1.0}), Placement)


def test_task_without_gpu_takes_the_node_with_least_cpu_left() -> None:
    """With placement "spread" it takes the node with most CPU left."""
    world = a_world(a_node("n1", cpu=8.0), a_node("n2", cpu=4.0), a_node("n3", cpu=1.0))
    assert found(world, cpu=2.0) == Placement(NodeName("n2"), ())
    assert found(world, cpu=2.0, placement="spread") == Placement(NodeName("n1"), ())


def test_what_is_pledged_to_the_same_or_a_higher_priority_is_not_free() -> None:
    preemptor = a_task("waiting", priority=80, gpu_mb=60 * GIB)
    world = a_world(a_device(), preemptor, a_pledge(preemptor, "gpu0", 60 * GIB))
    assert reason(world, gpu_mb=80 * GIB, priority=80) is Reason.BEHIND_HIGHER_PRIORITY
    assert devices(world, gpu_mb=30 * GIB, priority=81) == ["n1/gpu0"]
    assert isinstance(place_of(world, preemptor), Placement)


def test_cpu_and_slots_are_kept_for_a_preemptor_as_well() -> None:
    preemptor = a_task("waiting", priority=80, gpu_mb=60 * GIB, cpu=3.0, custom={"licence": 3.0})
    world = a_world(a_node(cpu=4.0), a_device(), preemptor, a_pledge(preemptor, "gpu0", 60 * GIB))
    assert reason(world, cpu=2.0) is Reason.CONCURRENCY_LIMITED
    assert reason(world, custom={"licence": 2.0}) is Reason.CONCURRENCY_LIMITED
    assert isinstance(found(world, cpu=2.0, priority=81), Placement)
    assert isinstance(found(world, cpu=1.0, custom={"licence": 1.0}), Placement)


def test_a_pledge_whose_task_is_gone_keeps_no_cpu() -> None:
    gone = a_task("gone", priority=80, cpu=4.0)
    world = a_world(a_node(cpu=4.0), a_device(), a_pledge(gone, "gpu0", 60 * GIB))
    assert isinstance(found(world, cpu=4.0), Placement)


KINDS = (
    a_device("gpu0", "n1", kind="NVIDIA A100", power=624),
    a_device("gpu0", "n2", kind="NVIDIA H100", power=2000, context_mb=512),
    a_device("gpu0", "n3", kind="NVIDIA L40S"),
    a_node("n1", labels=(("zone", "a"),)),
    a_node("n2", labels=(("zone", "b"),)),
    a_node("n3", labels=(("zone", "b"),)),
)


@pytest.mark.parametrize(
    ("where", "device"),
    [
        (PlacementConstraints(kinds=("H100",)), "n2/gpu0"),
        (PlacementConstraints(min_power=625), "n2/gpu0"),
        (PlacementConstraints(nodes=(("node", ("n3",)),)), "n3/gpu0"),
        (PlacementConstraints(nodes=(("zone", ("b",)),), prefer_kinds=("L40S",)), "n3/gpu0"),
        (PlacementConstraints(prefer_kinds=("B200", "H100", "A100")), "n2/gpu0"),
        (PlacementConstraints(prefer_nodes=(("zone", ("b",)),)), "n2/gpu0"),
    ],
)
def test_a_task_goes_where_it_may_and_rather_where_it_wants(where: PlacementConstraints, device: str) -> None:
    assert devices(a_world(*KINDS), gpu_mb=10 * GIB, where=where) == [device]


def test_a_wish_keeps_nobody_waiting() -> None:
    taken = holding(a_task("run", gpu_mb=80 * GIB), "n2/gpu0")
    assert devices(a_world(*KINDS, taken), gpus=1, where=PlacementConstraints(prefer_kinds=("H100",))) == [
        "n1/gpu0"
    ]


def test_a_task_waits_for_what_it_insists_on() -> None:
    taken = holding(a_task("run", gpu_mb=80 * GIB), "n2/gpu0")
    assert (
        reason(a_world(*KINDS, taken), gpus=1, where=PlacementConstraints(kinds=("H100",)))
        is Reason.WAITING_FOR_MEMORY
    )


def test_what_is_of_no_kind_that_is_asked_for_is_no_match() -> None:
    assert (
        reason(a_world(*KINDS), gpus=1, where=PlacementConstraints(kinds=("B200",)))
        is Reason.NO_MATCHING_DEVICE
    )


def test_a_task_that_is_spread_takes_nothing_that_is_kept_for_others() -> None:
    waits = a_task("waits", priority=90, gpu_mb=80 * GIB)
    world = a_world(a_device("gpu0"), a_device("gpu1"), waits, a_pledge(waits, "gpu0", 80 * GIB))
    assert devices(world, gpu_mb=10 * GIB, placement="spread") == ["n1/gpu1"]


def test_a_node_that_is_cordoned_leaves_the_table_of_places() -> None:
    world, changes, tables = a_world(a_node(), a_device()), RevisionLog(), PlaceTables()
    for cordoned, places in ((False, ["n1"]), (True, [])):
        world.add_node(a_node(cordoned=cordoned))
        changes.mark(NodeName("n1"))
        table = Places(Draft(world, changes), POLICY, NOW, tables=tables).table(a_task("new", gpu_mb=GIB))
        assert list(finish(table)) == places


def starting_on(node: str, count: int) -> list[Any]:
    tasks = [a_task(f"{node}-{n}", cpu=0.1) for n in range(count)]
    return [holding(task, node=node, state=TaskState.ADMITTED) for task in tasks]


@pytest.mark.parametrize(
    ("on_n1", "on_n2", "goes_to"), [(3, 0, "n1"), (4, 0, "n2"), (4, 4, "n1"), (9, 4, "n2"), (0, 4, "n1")]
)
def test_small_tasks_pass_over_a_node_that_has_many_to_start(on_n1: int, on_n2: int, goes_to: str) -> None:
    nodes = [a_node("n1", cpu=8), a_node("n2", cpu=8)]
    world = a_world(*nodes, *starting_on("n1", on_n1), *starting_on("n2", on_n2))
    placement = found(world, cpu=0.1)
    assert isinstance(placement, Placement)
    assert placement.node == goes_to


def test_a_burst_of_small_tasks_is_spread_over_the_nodes_that_start_them() -> None:
    world = a_world(*(a_node(f"n{n}", cpu=64) for n in (1, 2, 3)))
    for n in range(24):
        submit(world, a_task(f"t{n}", cpu=0.25))
    while admit_all(world):  # a slice at a time
        pass
    nodes = Counter(task.node for task in world.tasks.values())
    assert nodes == {"n1": 8, "n2": 8, "n3": 8}


def test_a_node_that_has_started_its_runs_is_as_good_as_before() -> None:
    running = [holding(a_task(f"r{n}", cpu=0.1), node="n1") for n in range(8)]
    world = a_world(a_node("n1", cpu=8), a_node("n2", cpu=8), *running)
    placement = found(world, cpu=0.1)
    assert isinstance(placement, Placement)
    assert placement.node == "n1"


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (1, "it is being started"),
        (2, "being started, and so is 1 other there"),
        (4, "and so are 3 others there"),
    ],
)
def test_a_task_that_is_being_started_says_what_else_its_node_starts(count: int, says: str) -> None:
    world = a_world(a_node("n1", cpu=8), *starting_on("n1", count))
    message = explain(world, TaskId("n1-0"), POLICY, NOW).message
    assert message.partition("; starts are slow")[0].endswith(says)
