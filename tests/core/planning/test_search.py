"""How the search for the cheapest eviction goes over nodes, and pauses."""

from collections.abc import Sequence
from typing import Any

from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move, StopReason, Task
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.planning.budget import PROBES_AT_A_TIME
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.offers import Offers
from gpubroker_server.core.planning.preemption.eviction import Eviction, RoomBeingFreed, search_eviction
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, a_device, a_node, a_task, a_world, commit, holding, key
from tests.core.plans import eviction_for

POLICY = Policy()


def three_nodes(**lost: float) -> World:
    """On each node one run of low priority that fills its GPU, begun so many seconds ago."""
    parts: list[Any] = []
    for node, seconds in lost.items():
        parts += [a_node(node), a_device("gpu0", node)]
        run = a_task(f"on-{node}", priority=10, gpu_mb=80 * GIB)
        parts.append(holding(run, key("gpu0", node), started_at=Instant(NOW - seconds)))
    return a_world(*parts)


def step_by_step(
    task: Task, world: World, nodes: Sequence[str]
) -> tuple[Eviction | RoomBeingFreed | None, int]:
    """Return what a search finds that pauses at each step, and how often it did."""
    offers, pauses = Offers(Draft(world), POLICY, NOW), 0
    steps = search_eviction(offers, task, map(NodeName, nodes), NOW)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1


def test_search_that_pauses_at_each_step_finds_what_an_unbroken_one_finds() -> None:
    world, high = three_nodes(n1=30.0, n2=10.0, n3=20.0), a_task("high", priority=80, gpu_mb=80 * GIB)
    eviction, pauses = step_by_step(high, world, ("n1", "n2", "n3"))
    assert isinstance(eviction, Eviction)
    assert eviction.node == "n2"
    assert eviction == eviction_for(Draft(world), high)
    assert pauses == 4  # three costs, and the cheapest node in full; glances come several at a time


def test_glances_at_many_nodes_come_several_at_a_time() -> None:
    names = [f"n{number:02}" for number in range(2 * PROBES_AT_A_TIME)]
    world = a_world(*(a_node(name) for name in names))
    found, pauses = step_by_step(a_task("high", priority=80, gpu_mb=80 * GIB), world, names)
    assert (found, pauses) == (None, 2)


def test_of_nodes_that_cost_the_same_the_first_by_name_is_cleared() -> None:
    world, high = three_nodes(n3=10.0, n1=10.0, n2=10.0), a_task("high", priority=80, gpu_mb=80 * GIB)
    eviction = eviction_for(Draft(world), high)
    assert eviction is not None
    assert eviction.node == "n1"


def test_of_nodes_on_which_room_is_coming_the_first_by_name_is_told() -> None:
    world = three_nodes(n1=10.0, n2=10.0, n3=10.0)
    for name in ("on-n2", "on-n3"):
        task = world.tasks[TaskId(name)]
        until = {"stop_reason": StopReason.CANCEL, "stop_deadline_at": Instant(NOW + 30.0)}
        commit(world, Decision(task.id, "cancel", tasks=(write_move(task, Move.STOPPING, **until),)))
    high = a_task("high", priority=80, gpu_mb=10 * GIB)
    assert step_by_step(high, world, ("n3", "n1", "n2"))[0] == RoomBeingFreed((NodeName("n2"),))
