"""Servers of models that were taken out of the settings, and what they had in memory."""

from dataclasses import replace

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import HolderKind, LeaseState
from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.models import ModelTerms
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.lifecycle.model_adoption import give_up_removed_servers
from gpubroker_server.core.world.world import World

from tests.builders import GIB, a_task, a_world, check_ledger, commit, holding, submit
from tests.core.served import a_model, ask, at, index, leases, loaded, plan, the


def removed(world: World, seconds: float = 10.0, servers: tuple[str, ...] = ("other",)) -> list[Decision]:
    decisions = give_up_removed_servers(world, servers, at(seconds))
    commit(world, decisions, at(seconds))
    check_ledger(world)
    return decisions


def test_models_of_a_removed_server_count_as_used_until_its_index_is_read_again() -> None:
    world = loaded()
    assert removed(world, servers=("main",)) == []
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
    removed(world)
    assert world.finished["default", TaskState.FAILED] == 1
    assert world.pledges == {}
    states = {state for kind, state in leases(world) if kind is HolderKind.MODEL}
    assert states == ({LeaseState.QUARANTINED} if begun else set())


def test_a_stopping_model_of_a_removed_server_keeps_its_deadline() -> None:
    world = loaded()
    ask(world, "cancel", 2.0)
    assert removed(world) == []


def test_the_base_cost_of_a_removed_server_is_released() -> None:
    world = a_world()
    base = replace(a_model("base", gpu_mb=2 * GIB, held=True), model=ModelTerms("main", ""))
    submit(world, replace(base, expires_at=None))
    index(world, {"any": ModelState.ABSENT}, 1.0)
    assert leases(world) == [(HolderKind.SERVER, LeaseState.HELD)]
    removed(world)
    assert (leases(world), "base" in world.tasks) == ([], False)
