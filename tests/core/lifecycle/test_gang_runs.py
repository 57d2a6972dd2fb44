"""The ranks of a gang begin together, stop together, and the gang moves on when none of them is left."""

import pytest
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.holders import MemberState
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    Failure,
    GoOrder,
    Ready,
    Started,
    StartOrder,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, TaskState, members_of
from gpubroker_server.core.domain.units import Fence, Instant, NodeName
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.runs import apply_reports
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_task, a_world, commit
from tests.core.gangs import (
    Agents,
    a_cluster,
    a_gang,
    admit_all,
    admitted,
    bundles,
    leases,
    outcome_of,
    running,
    stopped,
)

R, E = MemberState.READY, MemberState.ENDED


def test_one_decision_starts_every_rank_under_one_fence() -> None:
    world = a_cluster(a_gang("gang", *bundles(3, gpu_mb=50 * GIB)))
    [decision] = admit_all(world)
    starts = [order for order in decision.orders if isinstance(order, StartOrder)]
    assert [(s.rank, s.node, s.fence, s.world_size, s.barrier) for s in starts] == [
        (0, "n1", 1, 3, True), (1, "n1", 1, 3, True), (2, "n2", 1, 3, True),
    ]  # fmt: skip
    assert [lease.rank for lease in decision.leases] == [0, 1, 2]


def test_each_node_counts_the_ranks_that_it_has() -> None:
    use = admitted().world.use
    assert {name: (one.runs, one.cpu) for name, one in use.items()} == {"n1": (2, 4.0), "n2": (1, 2.0)}


def test_no_rank_begins_before_the_last_one_is_ready() -> None:
    gang = admitted()
    assert not gang.tell(*(gang.started(rank) for rank in range(3)), gang.ready(0), gang.ready(2))
    assert gang.task.state is TaskState.ADMITTED
    assert gang.task.started_at is None
    orders = gang.tell(gang.ready(1))
    assert [(o.rank, o.rank_zero_address) for o in orders if isinstance(o, GoOrder)] == [
        (0, "10.0.0.0:4000"), (1, "10.0.0.0:4000"), (2, "10.0.0.0:4000"),
    ]  # fmt: skip
    assert gang.task.state is TaskState.RUNNING
    assert gang.task.started_at == NOW


def test_a_repeated_ready_gets_the_go_order_again() -> None:
    gang = running()
    [order] = gang.tell(gang.ready(2))
    assert isinstance(order, GoOrder)
    assert order.rank == 2


def test_the_result_of_a_gang_is_that_of_rank_zero() -> None:
    gang = running()
    outcome = outcome_of(gang, gang.ended(0), gang.ended(2))
    assert outcome.result == b"0"
    assert gang.task.state is TaskState.RUNNING
    gang.tell(gang.ended(1))
    assert gang.task.state is TaskState.SUCCEEDED
    assert leases(gang) == dict.fromkeys(range(3), LeaseState.RELEASING)


def test_the_devices_of_a_rank_that_is_done_are_free_for_others() -> None:
    gang = running()
    gang.tell(gang.ended(2), gang.gone(2))
    assert leases(gang) == {0: LeaseState.HELD, 1: LeaseState.HELD}
    assert gang.world.use[NodeName("n2")].runs == 0
    assert gang.task.state is TaskState.RUNNING


def test_the_first_rank_that_fails_is_the_outcome_and_stops_the_others() -> None:
    gang = running()
    orders = gang.tell(gang.ended(1, Ending.FAILED))
    assert stopped(orders) == [0, 2]
    assert (gang.task.state, gang.task.stop_reason) == (TaskState.STOPPING, StopReason.RANK_FAILED)
    assert gang.task.stop_cause == "the failure of rank 1 on n1"
    again = outcome_of(gang, gang.gone(1), gang.ended(0, Ending.FAILED), gang.gone(0))
    assert again is None
    assert gang.task.state is TaskState.STOPPING
    gang.tell(gang.ended(2, Ending.STOPPED), gang.gone(2))
    assert gang.id not in gang.world.tasks  # failed, and nothing of it is left
    assert gang.world.finished["default", TaskState.FAILED] == 1


def test_the_outcome_names_the_rank() -> None:
    gang = running()
    assert outcome_of(gang, gang.ended(1, Ending.FAILED)).failure.message == "rank 1: boom"


def test_failed_gang_with_retries_is_pending_once_all_ranks_are_gone() -> None:
    gang = running(max_retries=1)
    gang.tell(gang.ended(1, Ending.FAILED), gang.gone(1), gang.gone(0))
    assert gang.task.state is TaskState.STOPPING
    gang.tell(gang.gone(2))
    task = gang.task
    assert (task.state, task.failures, members_of(task), task.node) == (TaskState.PENDING, 1, (), None)
    assert task.not_before == NOW + 1.0


def test_gang_whose_entrypoint_was_withdrawn_fails_despite_retries() -> None:
    gang = admitted(max_retries=3)
    refused = replace(gang.ended(0, Ending.FAILED), failure=Failure("entrypoint_not_allowed", "ask"))
    ranks = [replace(refused, rank=rank) for rank in range(3)]
    outcome = outcome_of(gang, *(r for n in ranks for r in (n, gang.gone(n.rank, Proof.NEVER_STARTED))))
    assert outcome.failure == Failure("entrypoint_not_allowed", "rank 0: ask")
    assert gang.id not in gang.world.tasks
    assert gang.world.finished["default", TaskState.FAILED] == 1


def test_a_rank_that_ends_without_a_report_fails_the_gang() -> None:
    gang = running()
    outcome = outcome_of(gang, gang.gone(2))
    assert outcome.ending is Ending.LOST
    assert gang.task.stop_reason is StopReason.RANK_FAILED


def test_a_rank_that_never_started_uses_up_no_retry() -> None:
    gang = admitted()
    gang.tell(
        gang.started(0),
        gang.started(1),
        gang.ended(2, Ending.NEVER_STARTED),
        gang.gone(2, Proof.NEVER_STARTED),
    )
    assert (gang.task.stop_reason, gang.task.stop_cause) == (
        StopReason.RANK_LOST,
        "the loss of rank 2 on n2",
    )
    gang.tell(gang.gone(0), gang.gone(1))
    assert (gang.task.state, gang.task.failures) == (TaskState.PENDING, 0)
    assert (gang.task.not_before is not None, gang.task.stop_cause) == (True, None)


def test_when_no_rank_ever_started_the_gang_is_pending_at_once() -> None:
    gang = admitted()
    gang.tell(*(gang.gone(rank, Proof.NEVER_STARTED) for rank in range(3)))
    assert gang.task.state is TaskState.PENDING
    assert not leases(gang)


def test_a_cancel_stops_every_rank() -> None:
    gang = running()
    request = Request("r", gang.id, "default", "cancel", {}, NOW)
    decision = carry_out(gang.world, request, NOW, Policy())
    commit(gang.world, decision)
    assert stopped(decision.orders) == [0, 1, 2]
    gang.tell(gang.ended(0, Ending.STOPPED), gang.gone(0), gang.gone(1))
    assert gang.task.state is TaskState.STOPPING
    gang.tell(gang.gone(2))
    assert gang.world.finished["default", TaskState.CANCELLED] == 1


def test_a_cancelled_gang_that_was_to_come_back_does_not() -> None:
    gang = running(max_retries=3)
    gang.tell(gang.ended(1, Ending.FAILED), gang.gone(1))
    commit(
        gang.world, carry_out(gang.world, Request("r", gang.id, "default", "cancel", {}, NOW), NOW, Policy())
    )
    gang.tell(gang.gone(0), gang.gone(2))
    assert gang.world.finished["default", TaskState.CANCELLED] == 1


def test_a_gang_whose_ranks_all_succeed_under_notice_has_succeeded() -> None:
    gang = running()
    commit(
        gang.world, carry_out(gang.world, Request("r", gang.id, "default", "cancel", {}, NOW), NOW, Policy())
    )
    gang.tell(*(gang.ended(rank) for rank in range(3)))
    assert gang.task.state is TaskState.SUCCEEDED


def test_a_lost_node_quarantines_its_ranks_and_stops_the_others() -> None:
    gang = running()
    orders = gang.tell(gang.node_lost("n2"))
    assert stopped(orders) == [0, 1]
    assert leases(gang) == {0: LeaseState.HELD, 1: LeaseState.HELD, 2: LeaseState.QUARANTINED}
    assert (gang.task.stop_reason, gang.task.stop_cause) == (
        StopReason.RANK_LOST,
        "the loss of node n2",
    )
    gang.tell(gang.gone(0), gang.gone(1))
    assert (gang.task.state, gang.task.failures) == (TaskState.PENDING, 0)


def test_a_lost_node_with_finished_ranks_only_does_not_stop_the_gang() -> None:
    gang = running()
    gang.tell(gang.ended(2))
    assert not stopped(gang.tell(gang.node_lost("n2")))
    assert gang.task.state is TaskState.RUNNING
    gang.tell(gang.ended(0), gang.ended(1))
    assert gang.task.state is TaskState.SUCCEEDED


def test_a_gang_that_loses_all_its_nodes_is_pending_at_once() -> None:
    gang = running()
    gang.tell(gang.node_lost("n1"), gang.node_lost("n2"))
    assert gang.task.state is TaskState.PENDING


def test_a_gang_under_notice_that_loses_its_last_node_moves_on() -> None:
    gang = running()
    gang.tell(gang.ended(0, Ending.FAILED), gang.gone(0), gang.gone(1), gang.node_lost("n2"))
    assert gang.task.state is TaskState.FAILED


def test_reports_of_an_old_fence_change_nothing_but_its_leases() -> None:
    gang = running(max_retries=1)
    gang.tell(gang.ended(1, Ending.FAILED), *(gang.gone(rank) for rank in range(3)))
    admit_all(gang.world, now=NOW + 5.0)
    before = gang.task
    assert before.fence == 2
    gang.tell(gang.started(0), gang.ready(1), gang.ended(2), gang.gone(2))
    assert gang.task == before


def test_a_report_of_an_unknown_rank_is_ignored() -> None:
    gang = running()
    before = gang.task
    gang.tell(gang.started(7), gang.ready(7), gang.ended(7, Ending.FAILED), gang.gone(7))
    assert gang.task == before


def test_a_repeated_report_counts_once() -> None:
    gang = running()
    gang.tell(gang.ended(1, Ending.FAILED), gang.gone(1))
    before = gang.task
    gang.tell(gang.ended(1, Ending.FAILED), gang.gone(1), gang.ready(1))
    assert gang.task == before


def test_checkpoints_are_those_of_rank_zero() -> None:
    gang = running()
    saved = Checkpointed(gang.id, gang.fence, NOW, 1, "digest", b"state", None)
    gang.tell(replace(saved, rank=1))
    assert gang.task.checkpoint_at is None
    gang.tell(saved)
    assert gang.task.checkpoint_at == NOW


def test_a_plain_task_has_no_ranks_to_be_ready() -> None:
    world = a_world(a_task("plain", gpu_mb=GIB))
    admit_all(world)
    commit(world, apply_reports(world, [Started(a_task("plain").id, Fence(1), NOW, 1)], NOW, Policy()))
    assert apply_reports(world, [Ready(a_task("plain").id, Fence(1), NOW, "a:1")], NOW, Policy()) == []


@pytest.mark.parametrize("proof", [Proof.BOOT_CHANGED, Proof.AGENT_RESTARTED])
def test_a_rank_that_went_down_with_its_agent_costs_no_retry(proof: Proof) -> None:
    gang = running()
    gang.tell(gang.gone(1, proof))
    assert gang.task.stop_reason is StopReason.RANK_LOST


def test_an_end_without_a_failure_is_reported_as_killed() -> None:
    gang = running()
    lost = Ended(gang.id, gang.fence, NOW, Ending.LOST, rank=2)
    assert outcome_of(gang, lost).failure.message.startswith("rank 2: the process ended without a report")


def test_gang_moves_on_at_once_when_its_last_rank_ends_without_a_report() -> None:
    gang = running(max_retries=1)
    gang.tell(gang.ended(0), gang.gone(0), gang.ended(1), gang.gone(1))
    gang.tell(gang.gone(2))
    assert (gang.task.state, gang.task.failures) == (TaskState.PENDING, 1)


def test_a_cancelled_rank_that_never_started_leaves_nothing_behind() -> None:
    gang = admitted()
    commit(
        gang.world, carry_out(gang.world, Request("r", gang.id, "default", "cancel", {}, NOW), NOW, Policy())
    )
    assert outcome_of(gang, gang.ended(0, Ending.NEVER_STARTED)) is None
    assert gang.task.state is TaskState.STOPPING


def test_a_gang_had_its_orders_when_the_last_agent_had_them() -> None:
    world = a_world(a_device(), a_gang("gang", *bundles(2, gpu_mb=GIB)))
    admit_all(world)
    agents = Agents(world)
    for rank, seconds in ((0, 2.0), (1, 1.0)):
        agents.now = Instant(NOW + 3.0)
        agents.tell(replace(agents.started(rank), ordered_at=Instant(NOW + seconds)))
        assert agents.task.ordered_at == NOW + 2.0
    assert agents.task.state is TaskState.ADMITTED
