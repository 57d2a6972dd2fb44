"""How the search for the cheapest eviction goes over nodes, and is left and gone on with."""

from dataclasses import replace
from typing import Any

from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move, StopReason
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.looks import Looks
from gpubroker_server.core.planning.offers import Offers
from gpubroker_server.core.planning.preemption import Eviction, Search
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


def step_by_step(search: Search, world: World, steps: int | None = None) -> Eviction | None:
    """Go on with it, a step at a time, on a draft of its own for each."""
    while steps is None or steps > 0:
        if search.go_on(offers := Offers(Draft(world), POLICY, NOW), Looks(0, may_pause=True)):
            return search.eviction(offers, NOW)
        steps = None if steps is None else steps - 1
    return None


def test_a_search_that_is_left_after_each_step_ends_as_one_in_a_single_go():
    world, high = three_nodes(n1=30.0, n2=10.0, n3=20.0), a_task("high", priority=80, gpu_mb=80 * GIB)
    eviction = step_by_step(Search(high, ("n1", "n2", "n3")), world)
    assert eviction is not None
    assert eviction.node == "n2"
    assert eviction == eviction_for(Draft(world), high)


def test_a_search_looks_at_all_nodes_again_if_the_best_so_far_has_changed():
    world, high = three_nodes(n1=30.0, n2=10.0, n3=20.0), a_task("high", priority=80, gpu_mb=80 * GIB)
    search = Search(high, ("n1", "n2", "n3"))
    assert step_by_step(search, world, 7) is None  # three looks, three costs, and the cheapest node in full
    world.tasks["on-n2"] = replace(world.tasks["on-n2"], started_at=Instant(NOW - 100.0))
    search.look_again(["n2"])
    eviction = step_by_step(search, world)
    assert eviction is not None
    assert eviction.node == "n3"


def test_of_nodes_that_cost_the_same_the_first_by_name_is_cleared():
    world, high = three_nodes(n3=10.0, n1=10.0, n2=10.0), a_task("high", priority=80, gpu_mb=80 * GIB)
    eviction = eviction_for(Draft(world), high)
    assert eviction is not None
    assert eviction.node == "n1"


def test_of_nodes_on_which_room_is_coming_the_first_by_name_is_told():
    world = three_nodes(n1=10.0, n2=10.0, n3=10.0)
    for name in ("on-n2", "on-n3"):
        task = world.tasks[TaskId(name)]
        until = {"stop_reason": StopReason.CANCEL, "stop_deadline_at": Instant(NOW + 30.0)}
        commit(world, Decision(task.id, "cancel", tasks=(write_move(task, Move.STOPPING, **until),)))
    nodes = [NodeName(f"n{number}") for number in (3, 1, 2)]
    search = Search(a_task("high", priority=80, gpu_mb=10 * GIB), nodes)
    assert step_by_step(search, world) is None
    assert search.coming_on == "n2"
