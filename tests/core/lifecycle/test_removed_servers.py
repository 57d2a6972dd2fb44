"""Servers of models that were taken out of the settings, and what they had in memory."""

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import HolderKind, LeaseState, Proof
from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState, ServerIndex
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.task import TaskState, model_of
from gpubroker_server.core.lifecycle.model_adoption import follow_settings, left_processes, server_gone
from gpubroker_server.core.lifecycle.model_lifecycle import seen
from gpubroker_server.core.lifecycle.quarantine import quarantined
from gpubroker_server.core.world.model_index import ModelIndex
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, a_sample, a_task, a_world, check_ledger, commit, holding, submit
from tests.core.served import LLM, POLICY, a_model, ask, at, index, leases, loaded, plan, the

OTHER = {"other": "other:8001"}


def removed(world: World, seconds: float = 10.0, servers: dict[str, str] = OTHER) -> list[Decision]:
    decisions = follow_settings(world, servers, at(seconds))
    commit(world, decisions, at(seconds))
    check_ledger(world)
    return decisions


def test_models_of_a_removed_server_count_as_used_until_its_index_is_read() -> None:
    world = loaded()
    assert removed(world, servers={"main": "host:8001"}) == []
    [decision] = removed(world)
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert "no longer in triton.servers" in decision.outcome.failure.message
    assert leases(world) == [(HolderKind.MODEL, LeaseState.QUARANTINED)]
    submit(world, a_task("run", gpu_mb=60 * GIB, priority=99))
    assert plan(world, 11.0) == []
    index(world, {}, 12.0)
    plan(world, 13.0)
    assert the(world, "run").state is TaskState.ADMITTED


@pytest.mark.parametrize("begun", [False, True])
def test_ordered_and_pending_loads_of_a_removed_server_are_given_up(begun: bool) -> None:
    world = a_world() if begun else a_world(holding(a_task("run", gpu_mb=60 * GIB, priority=10), "gpu0"))
    submit(world, a_model(priority=95))
    plan(world, 1.0)
    ended = [write.task for decision in removed(world) for write in decision.tasks]
    assert [task.state for task in ended if task.id == LLM] == [TaskState.FAILED]
    assert world.pledges == {}
    states = {state for kind, state in leases(world) if kind is HolderKind.MODEL}
    assert states == ({LeaseState.QUARANTINED} if begun else set())


def test_a_stopping_model_of_a_removed_server_keeps_its_deadline() -> None:
    world = loaded()
    ask(world, "cancel", 2.0)
    assert removed(world) == []


def test_the_base_cost_of_a_removed_server_is_released() -> None:
    world = a_world()
    base = replace(a_model("base", gpu_mb=2 * GIB, held=True), holder=Model("main", ""))
    submit(world, replace(base, expires_at=None))
    index(world, {"any": ModelState.ABSENT}, 1.0)
    assert leases(world) == [(HolderKind.SERVER, LeaseState.HELD)]
    removed(world)
    assert (leases(world), "base" in world.tasks) == ([], False)


def index_at(
    world: World, address: str, process: str, stage: ModelState, seconds: float, name: str = "main"
) -> list[Decision]:
    models = {"llm": IndexedModel("llm", stage)}
    read = ServerIndex(name, at(seconds), models, frozenset(), address, process)
    decisions = seen(world, read, at(seconds), POLICY)
    commit(world, decisions, at(seconds))
    check_ledger(world)
    return decisions


def loaded_at(address: str = "host:8001", process: str = "boot/ns/7@1") -> World:
    world = loaded(a_model(terms={"address": address}))
    [decision] = index_at(world, address, process, ModelState.READY, 2.0)
    assert decision.tasks[0].changed == ("holder",)
    assert index_at(world, address, process, ModelState.READY, 3.0) == [], "that is known"
    return world


@pytest.mark.parametrize("state", [TaskState.RUNNING, TaskState.STOPPING])
def test_a_renamed_server_keeps_its_models(state: TaskState) -> None:
    world = loaded_at()
    if state is TaskState.STOPPING:
        ask(world, "cancel", 4.0)
    [decision] = removed(world, servers={"other": "other:8001", "renamed": "host:8001"})
    assert decision.leases == ()
    assert (the(world).state, model_of(the(world)).home) == (state, ("renamed", "llm"))
    assert world.models.of(ModelKey("renamed", "llm")) == the(world)
    assert world.models.of(ModelKey("main", "llm")) is None
    assert removed(world, 11.0, servers={"renamed": "host:8001"}) == []
    assert world.unconfirmed.quarantined == {}


def test_holder_under_the_servers_new_name_takes_over_the_old_ones_memory() -> None:
    world = loaded_at()
    again = a_model("again", terms={"address": "host:8001"}, server="renamed", gpu_mb=50 * GIB)
    submit(world, replace(again, holder=replace(model_of(again), model="llm")))
    removed(world, servers={"renamed": "host:8001"})
    assert world.models.of(ModelKey("renamed", "llm")) == the(world, "again")
    index_at(world, "host:8001", "boot/ns/7@1", ModelState.READY, 11.0, name="renamed")
    assert the(world, "again").state is TaskState.RUNNING
    assert leases(world) == [(HolderKind.MODEL, LeaseState.HELD)]


def test_another_server_of_the_same_name_releases_nothing() -> None:
    world = loaded_at()
    index_at(world, "elsewhere:8001", "boot/ns/8@2", ModelState.ABSENT, 9.0)
    assert leases(world) == [(HolderKind.MODEL, LeaseState.HELD)]
    removed(world, servers={"main": "elsewhere:8001"})
    index_at(world, "elsewhere:8001", "boot/ns/8@2", ModelState.ABSENT, 11.0)
    assert leases(world) == [(HolderKind.MODEL, LeaseState.QUARANTINED)]
    index_at(world, "again:8001", "boot/ns/7@1", ModelState.ABSENT, 12.0, name="moved")
    assert leases(world) == [], "the process answers at another address"


def test_quarantine_at_a_removed_server_ends_with_its_process() -> None:
    world = loaded_at()
    assert left_processes(world) == frozenset()
    removed(world)
    [found] = quarantined(world)
    assert Proof.PROCESS_ABSENT in found.awaits
    assert "the process of its server is gone" in found.message
    assert left_processes(world) == {"boot/ns/7@1"}
    assert server_gone(world, "boot/ns/8@2") == []
    [decision] = server_gone(world, "boot/ns/7@1")
    assert [lease.proof for lease in decision.leases] == [Proof.PROCESS_ABSENT]
    commit(world, decision, at(12.0))
    check_ledger(world)
    submit(world, a_task("run", gpu_mb=60 * GIB))
    world.measure([a_sample(device, at(12.0)) for device in world.ledgers])
    plan(world, 13.0)
    assert the(world, "run").state is TaskState.ADMITTED


def test_of_two_holders_of_a_model_the_end_of_one_does_not_hide_the_other() -> None:
    """Both came at once, under the old and the new name of their server."""
    models = ModelIndex()
    first = a_model("first")
    second = replace(a_model("second"), holder=first.holder)
    for task in (first, second, replace(first, priority=60), second, replace(first, state=TaskState.FAILED)):
        models.note(task)
    assert models.of(ModelKey("main", "first")) == second
