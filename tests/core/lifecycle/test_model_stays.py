"""Which models are preempted for which tasks: pinned, used, idle and new ones."""

import pytest
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import HolderKind, LeaseState
from gpubroker_server.core.domain.model_orders import CheckOrder, ModelState
from gpubroker_server.core.domain.models import ModelUsage
from gpubroker_server.core.domain.orders import NodeLost
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Mib, NodeName, Seconds
from gpubroker_server.core.lifecycle.model_lifecycle import due as standings_due
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.lifecycle.stopping import overuse_decisions
from gpubroker_server.core.planning.nodes.victims import lost_gpu_seconds
from msgspec.structs import replace

from tests.builders import (
    GIB,
    a_device,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    key,
    let_go,
    submit,
)
from tests.core.served import (
    LLM,
    POLICY,
    WANTED,
    a_model,
    ask,
    at,
    index,
    leases,
    loaded,
    pass_time,
    plan,
    the,
)


def test_a_pinned_model_is_not_preempted_until_it_is_unpinned() -> None:
    world = loaded()
    decision = ask(world, "pin", 2.0, pinned=True, by="ann")
    assert [(note.action, note.subject, note.actor) for note in decision.audit] == [
        ("model.pin", "main/llm", "ann")
    ]
    commit(world, standings_due(world, at(10 * WANTED)))
    submit(world, a_task("run", priority=99, gpu_mb=60 * GIB))
    assert plan(world, 10 * WANTED) == []
    ask(world, "want", 10 * WANTED, priority=10)
    assert the(world).expires_at is None
    ask(world, "pin", 10 * WANTED, pinned=False, by="ann")
    plan(world, 10 * WANTED)
    assert the(world).state is TaskState.STOPPING


def test_a_pending_pinned_model_waits_without_limit() -> None:
    world = a_world(holding(a_task("run", priority=90, gpu_mb=60 * GIB), "gpu0"))
    submit(world, a_model())
    ask(world, "pin", 2.0, pinned=True)
    assert pass_time(world, 10 * WANTED) == []
    assert (the(world).state, the(world).priority) == (TaskState.PENDING, 50)


def test_only_models_are_wanted_or_pinned() -> None:
    world = a_world()
    submit(world, a_task("run"))
    assert ask(world, "want", task="run", priority=90).tasks == ()
    assert ask(world, "pin", task="run", pinned=True).tasks == ()


def test_a_freshly_loaded_model_is_shielded_except_from_critical_tasks() -> None:
    """Twice as long as it took to load."""
    world = loaded(seconds=30.0)
    submit(world, a_task("run", priority=80, gpu_mb=60 * GIB))
    assert plan(world, 89.0) == []
    submit(world, a_task("now", priority=95, gpu_mb=60 * GIB))
    plan(world, 89.5)
    assert the(world).freeing_for == "now"


def test_after_its_minimum_residency_a_model_can_be_preempted() -> None:
    world = loaded(seconds=30.0)
    submit(world, a_task("run", priority=80, gpu_mb=60 * GIB))
    plan(world, 90.5)
    assert the(world).freeing_for == "run"


def test_of_two_models_the_one_with_lower_expected_load_cost_is_evicted() -> None:
    often = ModelUsage(at(0.0), (9.0, 20.0, 50.0, 50.0))
    used = a_model("used", gpu_mb=30 * GIB, terms={"usage": often})
    idle = a_model("idle", gpu_mb=30 * GIB, terms={"usage": ModelUsage(at(0.0), (0.0, 0.1, 0.1, 0.1))})
    world = loaded(used, idle, seconds=5.0)
    submit(world, a_task("run", priority=95, gpu_mb=40 * GIB))
    plan(world, 100.0)
    assert (the(world, "used").state, the(world, "idle").state) == (TaskState.RUNNING, TaskState.STOPPING)
    assert lost_gpu_seconds(the(world, "used"), at(100.0)) == pytest.approx(4.9, abs=0.1)


def test_a_critical_model_stops_a_task_of_low_priority() -> None:
    run = holding(a_task("run", priority=20, gpu_mb=60 * GIB), "gpu0")
    world = a_world(run)
    submit(world, a_model(priority=95, terms={"asked_priority": 95}))
    plan(world)
    assert the(world, "run").freeing_for == LLM
    let_go(world, "run")
    plan(world, 1.0)
    assert the(world).state is TaskState.ADMITTED


def test_model_preempts_though_it_is_ready_only_after_its_want_would_end() -> None:
    """A request that waits keeps it wanted."""
    run = holding(a_task("run", priority=20, gpu_mb=60 * GIB, grace_seconds=Seconds(30.0)), "gpu0")
    world = a_world(run)
    submit(world, a_model(priority=95, terms={"load_seconds": Seconds(271.0)}))
    plan(world)
    assert the(world, "run").freeing_for == LLM


def test_a_model_survives_the_loss_of_its_node() -> None:
    """Its server may be there all the same, and says so itself."""
    world = loaded()
    commit(world, apply_reports(world, [NodeLost(NodeName("n1"), "n1-1", at(2), "silent")], at(2), POLICY))
    assert the(world).state is TaskState.RUNNING
    assert leases(world) == [(HolderKind.MODEL, LeaseState.HELD)]


def test_a_servers_base_cost_is_held_as_long_as_it_answers() -> None:
    base = replace(a_model("base", gpu_mb=2 * GIB), holder=Model("main", ""))
    world = a_world()
    submit(world, base)
    plan(world)
    index(world, {}, 1.0)
    assert leases(world) == [(HolderKind.SERVER, LeaseState.HELD)]
    assert the(world, "base").priority == 100


def test_a_model_is_not_stopped_for_overuse() -> None:
    world = loaded()
    [lease] = [lease for claim in world.leases.values() for lease in claim.values()]
    used = Mib(60 * GIB)
    world.measure([a_sample("gpu0", at(2), used_mb=used, by_holder={lease.mark: used})])
    assert overuse_decisions(world, at(2), replace(POLICY, overuse="stop")) == []


def test_an_index_changes_models_of_its_own_server_only() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    submit(world, a_model(), a_model("other", server="second"))
    plan(world)
    index(world, {"llm": ModelState.READY, "other": ModelState.READY}, 1.0)
    assert [task.id for task in world.models.live()] == ["llm", "other"]
    assert the(world, "other").state is TaskState.ADMITTED


def test_a_doubted_model_gets_a_check_order() -> None:
    world = loaded()
    before = the(world).holder
    decision = ask(world, "want", 2.0, priority=50, uses=0, doubted=True)
    assert decision.orders == (CheckOrder(LLM, Fence(1), "main", "llm", ((key("gpu0"), Mib(50 * GIB)),)),)
    assert the(world).holder == before, "to doubt it is not to use it"


def test_a_model_that_has_left_gets_no_check_order() -> None:
    world = loaded()
    ask(world, "cancel", 2.0)
    assert ask(world, "want", 3.0, priority=50, uses=0, doubted=True).orders == ()
