"""What the loss of a node does to the runs, the memory and the pledges on it."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    ForgetOrder,
    Gone,
    NodeLost,
    NodeReport,
    Report,
    Started,
    StopOrder,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, reconcile
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World

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
    check_ledger,
    commit,
    holding,
)

RUN = TaskId("run")


def tell(world: World, *reports: Report) -> list[Decision]:
    """React to one batch and make the decisions true."""
    decisions = apply_reports(world, reports, NOW, Policy())
    commit(world, decisions)
    return decisions


def on_node(id: str, state: TaskState, device: str = "gpu0", **fields: Any) -> Holding:
    return holding(a_task(id, gpu_mb=8 * GIB), device, state=state, **fields)


def stopping(reason: StopReason, **fields: Any) -> Holding:
    facts = {"stop_reason": reason, "stop_deadline_at": Instant(NOW + 9.0), **fields}
    return on_node("run", TaskState.STOPPING, **facts)


def lease_states(world: World) -> list[LeaseState]:
    return [lease.state for claim in world.leases.values() for lease in claim.values()]


def lost(node: str = "n1", incarnation: str = "n1-1") -> NodeLost:
    return NodeLost(NodeName(node), incarnation, NOW, "no heartbeat")


def test_a_lost_node_gives_back_its_tasks_and_none_of_its_memory() -> None:
    world = a_world(
        a_device("gpu0"),
        a_device("gpu0", "n2"),
        on_node("admitted", TaskState.ADMITTED, lease_state=LeaseState.RESERVED),
        on_node("running", TaskState.RUNNING),
        on_node("elsewhere", TaskState.RUNNING, "n2/gpu0"),
        holding(a_task("cpu"), node="n1"),
    )
    tell(world, lost())
    assert {t: world.tasks[TaskId(t)].state for t in ("admitted", "running", "cpu", "elsewhere")} == {
        "admitted": TaskState.PENDING,
        "running": TaskState.PENDING,
        "cpu": TaskState.PENDING,
        "elsewhere": TaskState.RUNNING,
    }
    assert {(t.failures, t.preemptions, t.not_before) for t in world.tasks.values()} == {(0, 0, None)}
    states = {lease.holder: lease.state for claim in world.leases.values() for lease in claim.values()}
    quarantined = LeaseState.QUARANTINED
    assert states == {"admitted": quarantined, "running": quarantined, "elsewhere": LeaseState.HELD}
    assert (world.nodes[NodeName("n1")].ready, world.nodes[NodeName("n2")].ready) == (False, True)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (StopReason.PREEMPT, TaskState.PENDING),
        (StopReason.CANCEL, TaskState.CANCELLED),
        (StopReason.TIMEOUT, TaskState.FAILED),
    ],
)
def test_a_run_that_was_stopping_on_a_lost_node_ends_as_its_stop_said(
    reason: StopReason, state: TaskState
) -> None:
    decisions = tell(a_world(stopping(reason)), lost())
    assert decisions[0].tasks[0].task.state is state
    assert [lease.state for lease in decisions[0].leases] == [LeaseState.QUARANTINED]


def test_memory_of_ended_runs_on_a_lost_node_is_quarantined_as_well() -> None:
    done = a_task("run", state=TaskState.SUCCEEDED, fence=Fence(1))
    world = a_world(done, a_lease(done, "gpu0", 8 * GIB, state=LeaseState.RELEASING, version=3))
    tell(world, lost())
    assert lease_states(world) == [LeaseState.QUARANTINED]


def test_pledges_on_a_lost_node_are_dissolved() -> None:
    high = a_task("high", gpu_mb=8 * GIB)
    pledge = a_pledge(high, "gpu0", 8 * GIB)
    world = a_world(stopping(StopReason.PREEMPT, freeing_for=high.id), high, pledge)
    tell(world, lost())
    assert world.pledges == {}
    assert world.tasks[RUN].freeing_for is None


def test_the_loss_of_an_older_incarnation_is_no_news() -> None:
    assert tell(a_world(on_node("run", TaskState.RUNNING)), lost(incarnation="n1-0")) == []


def test_the_loss_of_an_unknown_node_is_no_news() -> None:
    assert tell(a_world(on_node("run", TaskState.RUNNING)), lost(node="n9")) == []


def test_a_node_that_is_lost_twice_is_written_once() -> None:
    world = a_world(on_node("run", TaskState.RUNNING))
    assert [decision.subject for decision in tell(world, lost(), lost())] == ["run", "n1"]
    assert tell(world, lost()) == []


def test_run_given_up_with_its_node_frees_memory_when_proven_gone() -> None:
    world = a_world(on_node("run", TaskState.RUNNING))
    tell(world, lost(), Ended(RUN, Fence(1), NOW, Ending.SUCCEEDED, result=b"late"))
    assert world.tasks[RUN].state is TaskState.PENDING
    assert lease_states(world) == [LeaseState.QUARANTINED]
    tell(world, Gone(RUN, Fence(1), NOW, Proof.PROCESS_ABSENT))
    assert lease_states(world) == []
    assert world.tasks[RUN].state is TaskState.PENDING


def test_a_run_that_ended_before_its_node_was_lost_keeps_its_result() -> None:
    world = a_world(on_node("run", TaskState.ADMITTED, lease_state=LeaseState.RESERVED))
    result = Ended(RUN, Fence(1), NOW, Ending.SUCCEEDED, result=b"1")
    decisions = tell(world, Started(RUN, Fence(1), NOW, 7), result, lost())
    assert decisions[0].tasks[0].task.state is TaskState.SUCCEEDED
    assert lease_states(world) == [LeaseState.QUARANTINED]


def test_run_frozen_with_its_node_does_not_end_the_run_that_replaced_it() -> None:
    """It goes on when its task has long been at work elsewhere, and says all that it has to say."""
    world = a_world(a_device("gpu0"), a_device("gpu0", "n2"), on_node("run", TaskState.RUNNING))
    tell(world, lost())
    commit(world, plan_cycle(world, Policy(), NOW).decisions)
    tell(world, Started(RUN, Fence(2), NOW, 8))
    second = world.tasks[RUN]
    assert (second.state, second.fence, second.node) == (TaskState.RUNNING, 2, "n2")

    frozen = (RUN, Fence(1), NOW)
    saved = Checkpointed(*frozen, 5, "digest", b"state", None)
    assert tell(world, Started(*frozen, 7), saved, Ended(*frozen, Ending.SUCCEEDED, result=b"late")) == []
    back = NodeReport(a_node("n1", incarnation="n1-2"), (), ((RUN, Fence(1), 0),), NOW)
    decisions = reconcile(world, back, NOW, Policy(), InventoryRules("test"))
    orders: list[Any] = [order for decision in decisions for order in decision.orders]
    assert {(type(order), order.fence) for order in orders} == {(StopOrder, 1), (ForgetOrder, 1)}
    commit(world, decisions)
    check_ledger(world)
    assert sorted(lease_states(world)) == [LeaseState.HELD, LeaseState.QUARANTINED]

    tell(world, Gone(*frozen, Proof.PROCESS_ABSENT))
    assert lease_states(world) == [LeaseState.HELD]
    assert world.tasks[RUN] == second
