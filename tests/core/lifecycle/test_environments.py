"""Which nodes prepare the environments of waiting tasks, and what becomes of the tasks meanwhile."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import Labels, PlacementConstraints
from gpubroker_server.core.domain.environment import EnvironmentState, NodeEnvironment
from gpubroker_server.core.domain.orders import EnvironmentReported, PrepareOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.explain.survey import Verdict
from gpubroker_server.core.lifecycle import environments
from gpubroker_server.core.lifecycle.environments import NODES_AT_ONCE, due, seen
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World

from tests.builders import (
    GIB,
    NOW,
    a_demand,
    a_device,
    a_node,
    a_task,
    a_world,
    commit,
    let_go,
    orders_of_kind,
    submit,
)

PREPARING, READY, FAILED = EnvironmentState
POLICY = Policy()
LATER = Instant(NOW + 10)


def planned(world: World) -> list[Decision]:
    return list(plan_cycle(world, POLICY, NOW).decisions)


def needing(key: str, id: str = "task", nodes: Labels = (), **fields: Any) -> Task:
    where = PlacementConstraints(environment=key, nodes=nodes)
    return a_task(id, cpu=1.0, where=where, **fields)


def report(node: str, key: str, state: EnvironmentState | None, **fields: Any) -> EnvironmentReported:
    return EnvironmentReported(NodeName(node), NOW, key, state, **fields)


def ordered(world: World, now: float = NOW) -> list[PrepareOrder]:
    decisions = [decision for decision in due(world, Instant(now)) if decision.nodes]
    commit(world, decisions, now)
    return [order for decision in decisions for order in orders_of_kind(decision, PrepareOrder)]


def tell(world: World, *reports: EnvironmentReported, now: float = NOW) -> None:
    commit(world, seen(world, reports, Instant(now)), now)


def starts(world: World) -> list[str]:
    return [write.task.id for d in planned(world) for write in d.tasks if write.task.is_active]


def test_each_node_that_may_run_the_task_prepares_its_environment_once() -> None:
    zone_a = (("zone", ("a",)),)
    world = a_world(
        a_node("n1", labels=(("zone", "a"),)), a_node("n2", labels=(("zone", "b"),)),
        needing("e1", nodes=zone_a), needing("e1", "other", nodes=zone_a),
    )  # fmt: skip
    assert [(order.node, order.key, order.task) for order in ordered(world)] == [("n1", "e1", "other")]
    assert world.nodes[NodeName("n1")].environment("e1") == NodeEnvironment(
        "e1", PREPARING, NOW, "about to begin"
    )
    assert ordered(world) == []


def test_a_task_starts_only_where_its_environment_is_ready() -> None:
    world = a_world(a_node("n1"), a_node("n2"), needing("e1"))
    ordered(world)
    assert starts(world) == []
    tell(world, report("n1", "e1", PREPARING, step="downloading packages"), report("n2", "e1", READY))
    [decision] = planned(world)
    [write] = decision.tasks
    assert write.task.node == "n2"


def test_a_preparing_environment_preempts_nothing() -> None:
    world = a_world(needing("e1", gpu_mb=80 * GIB, gpus=1, priority=90))
    commit(world, planned(world))
    assert not world.pledges


def test_explain_names_node_step_and_seconds_of_the_preparation() -> None:
    world = a_world(a_node("n1"), a_node("n2"), a_node("n3"), needing("e1"))
    ordered(world)
    tell(
        world,
        report("n1", "e1", PREPARING, step="downloading packages"),
        report("n2", "e1", FAILED, message="no such package\nmore"),
        report("n3", "e1", None),
    )
    found = explain(world, TaskId("task"), POLICY, Instant(NOW + 12))
    assert found.reason is Reason.ENVIRONMENT_PREPARING
    assert "n1 is downloading packages (12 s so far)" in found.message
    assert "it failed on n2: no such package" in found.message
    assert "n3 has not begun" in found.message


def test_explain_says_of_a_gpu_that_its_node_lacks_the_environment() -> None:
    world = a_world(a_node("n1"), a_device("gpu0", node="n1"), needing("e1", gpu_mb=GIB, gpus=1))
    [device] = explain(world, TaskId("task"), POLICY, NOW).devices
    assert device.finding.verdict is Verdict.ENVIRONMENT_PREPARING
    assert device.message == "its node does not have the environment of the task ready"


def test_a_gang_is_placed_where_its_environment_is_ready_on_equal_nodes() -> None:
    rank = a_demand(cpu=1.0, where=PlacementConstraints(environment="e1"))
    gang = a_task("gang", demand=a_demand(bundles=(rank, rank)))
    world = a_world(*(a_node(name) for name in ("n1", "n2", "n3")), gang)
    ordered(world)
    tell(world, report("n1", "e1", FAILED), report("n2", "e1", READY), report("n3", "e1", READY))
    [decision] = planned(world)
    [write] = decision.tasks
    assert {member.node for member in members_of(write.task)} <= {"n2", "n3"}


def test_a_task_fails_once_no_node_could_prepare_its_environment() -> None:
    world = a_world(a_node("n1"), a_node("n2"), needing("e1"), needing("e1", "other"))
    ordered(world)
    tell(world, report("n1", "e1", FAILED, message="no such package"))
    assert due(world, LATER) == []
    tell(world, report("n2", "e1", FAILED, message="no such package"), now=LATER)
    decisions = due(world, LATER)
    assert [decision.subject for decision in decisions] == ["other", "task"]
    for decision in decisions:
        assert decision.outcome is not None
        assert decision.outcome.failure is not None
        assert decision.outcome.failure.kind == "environment"
        assert "on node n1, n2: no such package" in decision.outcome.failure.message
    commit(world, decisions)
    assert not world.unprepared
    assert ordered(world) == []


def test_a_task_that_is_submitted_later_has_the_nodes_try_again() -> None:
    world = a_world(a_node("n1"), needing("e1"))
    ordered(world)
    tell(world, report("n1", "e1", FAILED, message="no index"))
    commit(world, due(world, NOW))
    submit(world, needing("e1", "again", submitted_at=LATER))
    assert [order.task for order in ordered(world, LATER)] == ["again"]
    assert due(world, LATER) == []


def test_a_task_without_a_node_to_run_on_waits_as_any_other() -> None:
    world = a_world(a_node("n1", cordoned=True), needing("e1"))
    assert due(world, NOW) == []


def test_nothing_is_prepared_for_a_held_task() -> None:
    world = a_world(a_node("n1"), needing("e1", held=True))
    assert due(world, NOW) == []


def test_only_some_nodes_prepare_an_environment_at_once() -> None:
    world = a_world(*(a_node(f"n{n:02}") for n in range(NODES_AT_ONCE + 1)), needing("e1"))
    assert len(ordered(world)) == NODES_AT_ONCE
    tell(world, report("n00", "e1", READY))
    assert [order.node for order in ordered(world)] == [f"n{NODES_AT_ONCE:02}"]


def test_one_decision_has_all_that_a_node_is_to_prepare() -> None:
    world = a_world(a_node("n1"), needing("e1"), needing("e2", "other"))
    [decision] = due(world, NOW)
    assert [order.key for order in orders_of_kind(decision, PrepareOrder)] == ["e1", "e2"]
    assert [known.key for known in decision.nodes[0].environments] == ["e1", "e2"]


def test_a_gang_waits_for_the_environment_of_its_ranks() -> None:
    rank = a_demand(cpu=1.0, where=PlacementConstraints(environment="e1"))
    world = a_world(a_node("n1"), a_node("n2"), a_task("gang", demand=a_demand(bundles=(rank, rank))))
    assert len(ordered(world)) == 2
    tell(world, report("n1", "e1", READY))
    [decision] = planned(world)
    assert {member.node for member in decision.tasks[0].task.holder.members} == {"n1"}  # type: ignore[union-attr]


@pytest.mark.parametrize("state", [FAILED, PREPARING])
def test_the_time_of_a_state_stays_while_the_state_does(state: EnvironmentState) -> None:
    world = a_world(a_node("n1"))
    tell(world, report("n1", "e1", state))
    tell(world, report("n1", "e1", state, step="more"), now=LATER)
    known = world.nodes[NodeName("n1")].environment("e1")
    assert known is not None
    assert (known.since, known.step) == (NOW, "more")


def test_reports_that_change_nothing_or_of_unknown_nodes_lead_to_nothing() -> None:
    world = a_world(a_node("n1"))
    tell(world, report("n1", "e1", READY, python="3.12"))
    again = [report("n1", "e1", READY, python="3.12"), report("n9", "e1", READY)]
    assert seen(world, again, LATER) == []


def test_an_agents_answer_replaces_what_its_node_had() -> None:
    kept, new = NodeEnvironment("e1", READY, LATER), NodeEnvironment("e2", PREPARING, LATER)
    changed = NodeEnvironment("e3", FAILED, LATER)
    known = a_node(
        "n1",
        environments=(
            NodeEnvironment("e0", READY, NOW),
            NodeEnvironment("e1", READY, NOW),
            NodeEnvironment("e3", PREPARING, NOW),
        ),
    )
    answer = a_node("n1", environments=(kept, new, changed))
    assert environments.reported(known, answer) == (NodeEnvironment("e1", READY, NOW), new, changed)
    assert environments.reported(None, answer) == answer.environments


def test_the_world_forgets_an_environment_when_no_task_waits_for_it() -> None:
    world = a_world(a_node("n1"), needing("e1"), needing("e1", "other"))
    tell(world, report("n1", "e1", READY))
    assert world.unprepared == {"e1": {"task", "other"}}
    commit(world, planned(world))
    assert world.unprepared == {}
    assert {task.state for task in world.tasks.values()} == {TaskState.ADMITTED}
    let_go(world, "task")
    assert world.unprepared == {"e1": {"task"}}
