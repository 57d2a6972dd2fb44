"""Cordon and drain: what may start, what is asked to leave and when, and when nothing is left."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.holders import MemberState, Model
from gpubroker_server.core.domain.lease import HolderKind, LeaseState
from gpubroker_server.core.domain.orders import StopOrder, WorldOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import StopReason, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds, TaskId, node_key
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.draining import ask_to_leave
from gpubroker_server.core.world.node_holders import still_on
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_device,
    a_lease,
    a_node,
    a_pledge,
    a_task,
    a_world,
    commit,
    holding,
)
from tests.core.elastic import at_work, elastic
from tests.core.gangs import Agents

N1 = NodeName("n1")


def ask(world: World, what: str, now: float = NOW, node: str = "n1", **fields: Any) -> Decision:
    """An operator's request, carried out."""
    said = {"by": "olga", "reason": "a fan", **fields}
    decision = carry_out(
        world, Request("r", TaskId(node), "ops", what, said, Instant(now)), Instant(now), Policy()
    )
    commit(world, decision, now)
    return decision


def leave(world: World, now: float = NOW, **policy: Any) -> list[Decision]:
    decisions = ask_to_leave(world, Policy(**policy), Instant(now))
    commit(world, decisions, now)
    return decisions


def stops(decisions: list[Decision]) -> dict[tuple[str, int], float]:
    """(task, rank) -> grace period of each stop order."""
    orders = [order for decision in decisions for order in decision.orders]
    return {(o.task, o.rank): o.grace_seconds for o in orders if isinstance(o, StopOrder)}


def state(world: World, task: str) -> TaskState:
    return world.tasks[TaskId(task)].state


def a_run(id: str = "run", device: str = "gpu0", **fields: Any) -> Holding:
    return holding(a_task(id, gpu_mb=8 * GIB, **fields), device)


def a_model(id: str, device: str, name: str = "llm", priority: int = 50) -> Holding:
    """In memory for a hundred seconds."""
    model = replace(a_task(id, gpu_mb=GIB, priority=priority), holder=Model("main", name))
    held = holding(model, device)
    kind = HolderKind.MODEL if name else HolderKind.SERVER
    return Holding(held.task, tuple(replace(lease, holder_kind=kind) for lease in held.leases))


def test_a_cordoned_node_starts_nothing_and_what_runs_there_goes_on() -> None:
    world = a_world(a_run(), a_task("new", gpu_mb=GIB), a_task("cpu"))
    decision = ask(world, "cordon")
    node = world.nodes[N1]
    assert (node.cordoned, node.cordon_reason, node.draining_since) == (True, "a fan", None)
    [note] = decision.audit
    assert (note.actor, note.action, note.subject, note.reason) == ("olga", "node.cordon", "n1", "a fan")
    assert plan_cycle(world, Policy(), NOW).decisions == ()
    assert leave(world) == []
    for waiting in ("new", "cpu"):
        told = explain(world, TaskId(waiting), Policy(), NOW)
        assert (told.reason, told.message) == (
            Reason.NODE_CORDONED,
            "the nodes that are large enough are cordoned (n1)",
        )
    ask(world, "uncordon")
    assert world.nodes[N1] == replace(
        node,
        cordoned=False,
        cordon_reason="",
        cordoned_by="",
        cordoned_at=None,
        version=node.version + 1,
    )
    assert {d.subject for d in plan_cycle(world, Policy(), NOW).decisions} == {"new", "cpu"}


def test_where_some_nodes_are_cordoned_and_others_silent_both_are_said() -> None:
    world = a_world(
        a_node("n1", cordoned=True), a_node("n2", ready=False), a_device(), a_device("gpu0", "n2")
    )
    world.add_task(a_task("new", gpu_mb=GIB))
    told = explain(world, TaskId("new"), Policy(), NOW)
    assert (told.reason, told.message) == (
        Reason.NODE_CORDONED,
        "the nodes that are large enough are cordoned or do not answer (n1, n2)",
    )


def test_pledges_on_a_cordoned_node_are_dissolved_and_uncordon_keeps_them() -> None:
    def pledged() -> World:
        waiting = a_task("waiting", priority=80, gpu_mb=80 * GIB)
        return a_world(
            a_run(), waiting, a_pledge(waiting, "gpu0", 80 * GIB), a_device("gpu0", "n2"), a_device()
        )

    world = pledged()
    ask(world, "cordon")
    assert world.pledges == {}
    assert [d.tasks[0].task.node for d in plan_cycle(world, Policy(), NOW).decisions] == ["n2"]
    world = pledged()
    ask(world, "uncordon")
    assert list(world.pledges) == ["waiting"]


@pytest.mark.parametrize("what", ["cordon", "drain"])
def test_what_is_kept_of_a_closed_node_itself_is_given_back(what: str) -> None:
    waiting = a_task("waiting", priority=95, cpu=8.0)
    world = a_world(a_node("n1", cpu=8.0), waiting, a_pledge(waiting, node_key(N1), 0))
    ask(world, what)
    assert world.pledges == {}


def test_a_request_about_an_unknown_node_changes_nothing() -> None:
    decision = ask(a_world(), "drain", node="n9")
    assert (decision.nodes, decision.audit, decision.requests_done) == ((), (), ("r",))


def test_a_drained_node_asks_its_runs_to_leave_with_their_grace_period() -> None:
    world = a_world(
        a_run(grace_seconds=Seconds(20.0)), a_run("else", "n2/gpu0"), a_device(), a_device("gpu0", "n2")
    )
    ask(world, "drain", NOW)
    node = world.nodes[N1]
    assert (node.cordoned, node.draining_since, node.drain_deadline_at) == (True, NOW, None)
    assert still_on(world, N1) == {"run"}
    decisions = leave(world)
    assert stops(decisions) == {("run", 0): 20.0}
    run = world.tasks[TaskId("run")]
    assert (run.state, run.stop_reason, run.stop_deadline_at, run.freeing_for) == (
        TaskState.STOPPING,
        StopReason.PREEMPT,
        NOW + 20.0,
        None,
    )
    assert state(world, "else") is TaskState.RUNNING
    assert leave(world, NOW + 1) == [], "it is told once"


def test_runs_and_ranks_that_a_drain_asks_to_leave_name_it() -> None:
    world = a_world(a_run(), a_model("model", "gpu0"))
    ask(world, "drain")
    leave(world)
    cause = "the drain of n1 by olga"
    assert [world.tasks[TaskId(it)].stop_cause for it in ("run", "model")] == [cause, cause]
    told = explain(world, TaskId("run"), Policy(), NOW)
    assert told.message == f"asked to leave for {cause}; 30 s of grace are left"

    gang = at_work()
    ask(gang.world, "drain", gang.now, "n2")
    leave(gang.world, gang.now)
    assert (gang.task.state, gang.task.stop_cause) == (TaskState.RUNNING, "the drain of n2 by olga")


def test_a_drain_of_an_earlier_release_is_named_without_its_operator() -> None:
    world = a_world(a_node("n1", cordoned=True, draining_since=NOW), a_device(), a_run())
    leave(world)
    assert world.tasks[TaskId("run")].stop_cause == "the drain of n1"


def test_a_later_stop_replaces_the_cause_of_the_one_before() -> None:
    world = a_world(a_run())
    ask(world, "drain")
    leave(world)
    request = Request("r2", TaskId("run"), "default", "cancel", {"by": "carl", "reason": "done"}, NOW)
    commit(world, carry_out(world, request, NOW, Policy()), NOW)
    run = world.tasks[TaskId("run")]
    assert (run.stop_reason, run.stop_cause) == (StopReason.CANCEL, "its cancellation by carl: done")


def test_drain_lets_critical_and_protected_runs_stay_until_the_deadline() -> None:
    """They get notice at most a grace period before the deadline of the drain."""
    world = a_world(
        a_run("critical", priority=95, grace_seconds=Seconds(30.0)),
        a_run("often", grace_seconds=Seconds(30.0), preemptions=3),
        a_run("plain"),
    )
    ask(world, "drain", deadline_seconds=100.0)
    assert stops(leave(world)) == {("plain", 0): 30.0}
    assert leave(world, NOW + 69.0) == []
    assert stops(leave(world, NOW + 80.0)) == {("critical", 0): 20.0, ("often", 0): 20.0}
    assert {world.tasks[TaskId(t)].stop_deadline_at for t in ("critical", "often")} == {NOW + 100.0}


def test_without_a_deadline_critical_work_stays() -> None:
    world = a_world(a_run("critical", priority=95))
    ask(world, "drain")
    assert leave(world, NOW + 1_000_000) == []
    assert still_on(world, N1) == {"critical"}


def test_later_drain_with_an_earlier_deadline_shortens_notices() -> None:
    """The time at which draining began stays."""
    world = a_world(a_run(grace_seconds=Seconds(300.0)))
    ask(world, "drain")
    leave(world)
    ask(world, "drain", NOW + 10.0, deadline_seconds=50.0)
    assert (world.nodes[N1].draining_since, world.nodes[N1].drain_deadline_at) == (NOW, NOW + 60.0)
    assert stops(leave(world, NOW + 20.0)) == {("run", 0): 40.0}
    assert world.tasks[TaskId("run")].stop_deadline_at == NOW + 60.0
    assert leave(world, NOW + 21.0) == []


def test_past_the_deadline_what_is_left_is_ended_at_once_and_told_once() -> None:
    world = a_world(a_run(grace_seconds=Seconds(300.0)))
    ask(world, "drain", deadline_seconds=0.0)
    assert stops(leave(world, NOW + 5.0)) == {("run", 0): 0.0}
    assert leave(world, NOW + 6.0) == []


def test_a_cordon_ends_a_drain_and_the_node_stays_closed() -> None:
    world = a_world(a_run())
    ask(world, "drain", deadline_seconds=60.0)
    ask(world, "cordon")
    node = world.nodes[N1]
    assert (node.cordoned, node.draining_since, node.drain_deadline_at) == (True, None, None)
    assert leave(world, NOW + 100.0) == []


def test_models_leave_and_their_server_stays() -> None:
    world = a_world(
        a_model("wanted", "gpu0"), a_model("idle", "gpu0", priority=-1), a_model("base", "gpu0", "")
    )
    ask(world, "drain")
    assert sorted(decision.subject for decision in leave(world)) == ["idle", "wanted"]
    assert state(world, "base") is TaskState.RUNNING
    assert still_on(world, N1) == {"wanted", "idle"}


def test_a_model_loaded_just_now_has_its_minimum_residency() -> None:
    fresh = a_model("fresh", "gpu0")
    world = a_world(Holding(replace(fresh.task, started_at=NOW), fresh.leases))
    ask(world, "drain")
    assert leave(world, NOW + 1.0) == []
    assert [decision.subject for decision in leave(world, NOW + 6.0)] == ["fresh"]


def test_memory_that_is_not_proven_free_is_left() -> None:
    stuck = a_lease(a_task("stuck", fence=1), "gpu0", GIB, state=LeaseState.QUARANTINED)
    world = a_world(stuck, a_model("base", "gpu0", ""))
    ask(world, "drain")
    assert still_on(world, N1) == {"stuck"}
    assert still_on(a_world(a_node("n7")), NodeName("n7")) == set()


# Gangs: ranks 0 and 1 are on n1, ranks 2 and 3 on n2.


def drained(gang: Agents, node: str, **fields: Any) -> list[Decision]:
    ask(gang.world, "drain", gang.now, node=node, **fields)
    return leave(gang.world, gang.now)


def test_an_elastic_gang_goes_on_without_the_ranks_of_a_drained_node() -> None:
    gang = at_work()
    decisions = drained(gang, "n2", deadline_seconds=10.0)
    assert stops(decisions) == {("gang", 2): 10.0, ("gang", 3): 10.0}
    told = [order for decision in decisions for order in decision.orders if isinstance(order, WorldOrder)]
    assert [(order.rank, order.ranks) for order in told] == [(0, (0, 1)), (1, (0, 1))]
    assert [member.state for member in members_of(gang.task)[2:]] == [MemberState.LEAVING] * 2
    assert gang.task.state is TaskState.RUNNING
    assert leave(gang.world, gang.now + 1.0) == []


def test_gang_that_cannot_lose_the_ranks_of_a_drained_node_leaves_entirely() -> None:
    gang = at_work()
    assert stops(drained(gang, "n1")) == {("gang", rank): gang.task.grace_seconds for rank in range(4)}
    assert gang.task.state is TaskState.STOPPING


def test_a_gang_on_two_drained_nodes_is_told_once_at_a_time() -> None:
    gang = at_work()
    ask(gang.world, "drain", gang.now, node="n1")
    ask(gang.world, "drain", gang.now, node="n2")
    assert len(leave(gang.world, gang.now)) == 1
    assert gang.task.state is TaskState.STOPPING
    assert leave(gang.world, gang.now + 1.0) == []


def test_ranks_that_leave_anyway_leave_by_the_deadline() -> None:
    gang = at_work(elastic(grace_seconds=Seconds(300.0)))
    drained(gang, "n2")
    assert stops(drained(gang, "n2", deadline_seconds=60.0)) == {("gang", 2): 60.0, ("gang", 3): 60.0}
    assert {member.stop_deadline_at for member in members_of(gang.task)[2:]} == {gang.now + 60.0}


def test_critical_gang_under_drain_stays_until_grace_before_the_deadline() -> None:
    gang = at_work(replace(elastic(grace_seconds=Seconds(30.0)), priority=95))
    assert drained(gang, "n2", deadline_seconds=100.0) == []
    assert stops(leave(gang.world, gang.now + 75.0)) == {("gang", 2): 25.0, ("gang", 3): 25.0}


def test_a_gang_whose_ranks_there_have_ended_is_left_alone() -> None:
    gang = at_work()
    gang.tell(gang.ended(2), gang.ended(3))
    assert drained(gang, "n2") == []


@pytest.mark.parametrize("what", ["cordon", "drain"])
def test_a_start_that_was_ordered_before_is_not_taken_back_by_a_cordon(what: str) -> None:
    world = a_world(a_device(), a_task("new", gpu_mb=GIB))
    commit(world, plan_cycle(world, Policy(), NOW).decisions)
    ask(world, what)
    leave(world)
    assert state(world, "new") is (TaskState.ADMITTED if what == "cordon" else TaskState.STOPPING)
