"""Whether a model could be loaded on a server's GPUs soon, before there is a holder for it."""

import pytest
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.lease import quarantine
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.planning.model_places import could_be_loaded
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_task, a_world, holding
from tests.core.planning.test_closed_gpus import CLOSED
from tests.core.served import a_model, ask, at, loaded, the

BERT = a_model("bert", priority=50)
IDLE_SECONDS = 100.0


def fits(world: World, model: Task = BERT, seconds: float = IDLE_SECONDS) -> bool:
    return could_be_loaded(world, model, world.ledgers.values(), Policy(), at(seconds))


def test_free_memory_is_enough_and_too_little_is_not() -> None:
    assert fits(a_world())
    assert not fits(a_world(holding(a_task("run", priority=95), "gpu0", mb=40 * GIB)))
    assert fits(a_world(), a_model("cpu", gpus=0, gpu_mb=None))


def test_gpus_of_another_server_and_closed_ones_do_not_count() -> None:
    elsewhere = replace(BERT, demand=replace(BERT.demand, where=PlacementConstraints(devices=("another",))))
    assert not fits(a_world(), elsewhere)
    world = a_world(a_device(closure=CLOSED))
    assert not fits(world)


def test_runs_that_may_be_preempted_make_room_and_others_stay() -> None:
    for priority, makes_room in ((10, True), (50, False), (95, False)):
        run = a_task("run", priority=priority)
        world = a_world(holding(run, "gpu0", mb=60 * GIB))
        assert fits(world, seconds=10_000.0) is makes_room, priority


@pytest.mark.parametrize(
    ("asked_priority", "seconds", "makes_room"),
    [(50, 1.5, True), (79, 1.5, False), (79, IDLE_SECONDS, True)],
)
def test_models_that_are_idle_or_of_no_higher_priority_make_room(
    asked_priority: int, seconds: float, makes_room: bool
) -> None:
    world = loaded(a_model(priority=asked_priority, terms={"asked_priority": asked_priority}))
    assert fits(world, seconds=seconds) is makes_room


def test_pinned_models_and_quarantined_memory_stay() -> None:
    world = loaded(a_model())
    ask(world, "pin", pinned=True)
    assert not fits(world)
    world = loaded(a_model())
    [lease] = world.leases_of(the(world))
    world.ledgers[lease.device].put(quarantine(lease, NOW))
    assert not fits(world)


def test_memory_of_a_holder_that_is_not_known_stays() -> None:
    world = loaded(a_model())
    [lease] = world.leases_of(the(world))
    world.ledgers[lease.device].put(replace(lease, holder="gone", fence=lease.fence))
    assert not fits(world)
