"""Models loaded by hand: they get leases where they are, if these fit."""

from typing import Any

import pytest
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import HolderKind, LeaseState, Proof
from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.task import Task, TaskState, model_of
from gpubroker_server.core.domain.units import Mib, TaskId
from gpubroker_server.core.lifecycle.model_lifecycle import due
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    a_device,
    a_sample,
    a_task,
    a_world,
    check_ledger,
    commit,
    holding,
    let_go,
    submit,
)
from tests.core.served import (
    LLM,
    WANTED,
    a_model,
    ask,
    at,
    fail,
    index,
    leases,
    loaded,
    pass_time,
    plan,
    the,
)

READY = {"llm": ModelState.READY}


def by_hand(name: str = "llm", **fields: Any) -> Task:
    """As the gateway enters it."""
    model = a_model(name, priority=0, held=True, **fields)
    return replace(model, holder=replace(model_of(model), asked_priority=0))


def used(world: World, gib: int, device: str = "gpu0", seconds: float = 1.0) -> None:
    """By processes that no agent knows."""
    mb = Mib(gib * GIB)
    world.measure([a_sample(device, at(seconds), used_mb=mb, foreign_mb=mb)])


def free_gib(world: World, device: str = "gpu0") -> int:
    [ledger] = [ledger for ledger in world.ledgers.values() if ledger.device.uuid == device]
    return ledger.free_mb() // GIB


def test_a_model_loaded_by_hand_gets_a_lease() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    used(world, 45, "gpu1")
    submit(world, by_hand())
    assert plan(world) == []
    [decision] = index(world, READY, 2.0)
    task = the(world)
    assert (task.state, task.priority, task.held, task.started_at) == (TaskState.RUNNING, 0, False, at(2.0))
    assert leases(world) == [(HolderKind.MODEL, LeaseState.HELD)]
    assert (decision.orders, free_gib(world, "gpu0"), free_gib(world, "gpu1")) == ((), 80, 30)
    check_ledger(world)


def test_model_without_room_for_its_lease_is_foreign_and_preempts_nothing() -> None:
    world = a_world(holding(a_task("run", gpu_mb=60 * GIB, priority=0), "gpu0"))
    used(world, 15)
    submit(world, by_hand())
    assert index(world, READY, 2.0) == []
    assert plan(world, 3.0) == []
    assert (the(world).state, the(world, "run").state) == (TaskState.PENDING, TaskState.RUNNING)
    index(world, {}, 4.0)
    assert LLM not in world.tasks, "it has left before"


def test_model_loaded_by_hand_may_be_unloaded_by_hand_unless_it_is_wanted() -> None:
    for is_wanted in (False, True):
        world = a_world(a_device("gpu0"))
        used(world, 45)
        submit(world, by_hand())
        index(world, READY, 2.0)
        if is_wanted:
            ask(world, "want", 3.0, priority=50, uses=1)
        index(world, {}, 4.0)
        assert (LLM in world.tasks and the(world).state is TaskState.PENDING) is is_wanted


def test_no_model_is_adopted_on_an_unmeasured_device() -> None:
    world = a_world()
    world.ledgers[next(iter(world.ledgers))].require_new_sample(at(1.0))
    submit(world, by_hand())
    assert index(world, READY, 2.0) == []


def test_the_second_of_two_adopted_models_sees_the_leases_of_the_first() -> None:
    world = a_world()
    submit(world, by_hand(), by_hand("other"))
    both = {"llm": ModelState.READY, "other": ModelState.READY}
    assert [decision.subject for decision in index(world, both, 1.0)] == ["llm"]
    assert index(world, both, 2.0) == [], "50 GiB each, of 80"
    check_ledger(world)


def test_adopting_a_model_withdraws_its_pledges() -> None:
    world = a_world(holding(a_task("run", gpu_mb=60 * GIB, priority=10), "gpu0"))
    submit(world, a_model(priority=95))
    plan(world, 100.0)
    pledged = [*world.pledges[LLM].values()]
    assert index(world, READY, 101.0) == [], "its victim has the room for its lease"
    let_go(world, "run")
    [decision] = index(world, READY, 102.0)
    assert [write.pledge for write in decision.pledges] == pledged
    assert LLM not in world.pledges
    check_ledger(world)


def test_a_request_for_a_model_without_room_is_planned_as_usual() -> None:
    world = a_world()
    submit(world, by_hand())
    ask(world, "want", 1.0, priority=60)
    assert (the(world).held, the(world).priority) == (False, 60)
    plan(world, 2.0)
    assert the(world).state is TaskState.ADMITTED


def test_a_model_without_a_gpu_is_where_its_server_is() -> None:
    world = a_world()
    submit(world, by_hand(gpus=0, gpu_mb=None))
    index(world, READY, 1.0)
    assert (the(world).state, the(world).node, leases(world)) == (TaskState.RUNNING, "n1", [])
    elsewhere = a_world()
    submit(elsewhere, by_hand(gpus=0, gpu_mb=None, where=PlacementConstraints(nodes=(("node", ("n9",)),))))
    assert index(elsewhere, READY, 1.0) == []


def test_a_servers_base_cost_is_held_until_its_operator_removes_it() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    base = replace(by_hand("base", gpus=2, gpu_mb=2 * GIB), holder=Model("main", ""))
    submit(world, replace(base, expires_at=None))
    index(world, {}, 1.0)
    assert leases(world) == [(HolderKind.SERVER, LeaseState.HELD)] * 2
    assert (the(world, "base").priority, free_gib(world, "gpu1")) == (100, 78)
    decision = ask(world, "cancel", 2.0, task="base")
    assert decision.orders == ()
    [released] = due(world, at(3.0))
    assert {lease.proof for lease in released.leases} == {Proof.STATEMENT}
    [note] = released.audit
    assert (note.actor, note.action, note.subject) == ("settings", "base_mb.release", "base")
    commit(world, [released], at(3.0))
    assert (leases(world), "base" in world.tasks) == ([], False)


@pytest.mark.parametrize("seconds", [40.0, WANTED + 1])
def test_memory_left_by_an_earlier_holder_passes_on_and_counts_once(
    seconds: float,
) -> None:
    """Nobody could say in time that it had gone, and it has not: its server had not heard of it."""
    world = loaded(a_model(gpu_mb=30 * GIB))
    ask(world, "cancel", 2.0)
    pass_time(world, 23.0)
    assert leases(world) == [(HolderKind.MODEL, LeaseState.QUARANTINED)]
    again = by_hand("again", gpu_mb=20 * GIB)
    submit(world, replace(again, holder=replace(model_of(again), model="llm")))
    index(world, READY, seconds)
    assert the(world, "again").state is TaskState.RUNNING
    assert leases(world) == [(HolderKind.MODEL, LeaseState.HELD)]
    assert sum(ledger.held_mb() for ledger in world.ledgers.values()) == 30 * GIB
    assert [task.id for task in world.models.on("main")] == ["again"]
    check_ledger(world)
    assert [ledger.sample for ledger in world.ledgers.values()] == [None], "no sample was taken since"
    used(world, 30, seconds=seconds + 1)
    assert free_gib(world) == 50


def test_memory_left_by_a_failed_load_passes_to_the_next_holder() -> None:
    world = a_world()
    submit(world, a_model(gpu_mb=30 * GIB))
    plan(world)
    fail(world)
    assert leases(world) == [(HolderKind.MODEL, LeaseState.RELEASING)]
    index(world, READY, 40.0)
    assert the(world).state is TaskState.RUNNING
    assert leases(world) == [(HolderKind.MODEL, LeaseState.HELD)]


def an_ensemble(**fields: Any) -> Task:
    return a_model("pipe", terms={"steps": ("first", "second")}, gpu_mb=20 * GIB, **fields)


def a_step(**terms: Any) -> Task:
    return a_model("first", gpu_mb=10 * GIB, terms=terms)


def with_both_loaded(step: Task, ensemble: Task) -> World:
    """The step was loaded alone, and the ensemble after it."""
    world = loaded(step)
    submit(world, ensemble)
    plan(world, 2.0)
    index(world, {"first": ModelState.READY, "second": ModelState.READY, "pipe": ModelState.READY}, 3.0)
    assert the(world, "pipe").state is TaskState.RUNNING
    return world


def test_step_loaded_before_its_ensemble_counts_only_once() -> None:
    world = with_both_loaded(a_step(), an_ensemble())
    [ledger] = world.ledgers.values()
    assert ledger.leased_mb() == 30 * GIB
    stages = {"first": ModelState.READY, "second": ModelState.READY, "pipe": ModelState.READY}
    [covered] = index(world, stages, 4.0)
    assert [lease.proof for lease in covered.leases] == [Proof.HELD_ANEW]
    assert (TaskId("first") in world.tasks, ledger.leased_mb()) == (False, 20 * GIB)
    assert covered.orders == (), "it stays in memory"
    check_ledger(world)
    assert index(world, stages, 5.0) == []


def test_pinned_step_keeps_its_memory_beside_its_ensemble() -> None:
    world = with_both_loaded(a_step(pinned=True), an_ensemble())
    assert index(world, {"first": ModelState.READY, "pipe": ModelState.READY}, 4.0) == []
    assert the(world, "first").state is TaskState.RUNNING


def test_step_on_another_gpu_than_an_ensemble_is_not_covered_by_it() -> None:
    elsewhere = an_ensemble(where=PlacementConstraints(devices=("gpu1",)))
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    submit(world, a_step(), elsewhere)
    plan(world)
    stages = {"first": ModelState.READY, "pipe": ModelState.READY}
    index(world, stages)
    devices = {lease.device for name in ("first", "pipe") for lease in world.leases_of(the(world, name))}
    assert len(devices) == 2
    index(world, stages, 4.0)
    assert the(world, "first").state is TaskState.RUNNING
