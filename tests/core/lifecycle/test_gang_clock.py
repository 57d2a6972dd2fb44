"""A gang when time passes, the leader changes or an agent answers again."""

from typing import Any

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.orders import (
    Ending,
    ForgetOrder,
    GoOrder,
    NodeReport,
    Order,
    ReportedDevice,
    StopOrder,
)
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, Seconds
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, reconcile

from tests.builders import GIB, NOW, a_node, a_sample, a_world, commit
from tests.core.gangs import (
    Agents,
    a_gang,
    admit_all,
    admitted,
    bundles,
    leases,
    outcome_of,
    running,
    states,
    stopped,
)


def time_passes(gang: Agents, seconds: float) -> list[Decision]:
    """Whatever time alone makes due; the leader has looked all the while."""
    gang.now = Instant(gang.now + seconds)
    watch = ObservationWindow(since=Instant(NOW - 100.0), last=Instant(gang.now - 0.5))
    decisions = due(gang.world, gang.now, gang.policy, watch)
    commit(gang.world, decisions, gang.now)
    return decisions


def test_gang_not_ready_in_time_is_requeued_and_names_the_missing_ranks() -> None:
    gang = admitted()
    gang.tell(gang.started(0), gang.ready(0), gang.ready(2))
    assert not time_passes(gang, 299.0)
    [decision] = time_passes(gang, 1.0)
    assert gang.task.stop_reason is StopReason.START_TIMEOUT
    assert stopped(decision.orders) == [0, 1, 2]
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert "within 300 s" in decision.outcome.failure.message
    assert "missing: 1 on n1;" in decision.outcome.failure.message
    gang.tell(*(gang.gone(rank) for rank in range(3)))
    assert (gang.task.state, gang.task.failures) == (TaskState.PENDING, 1)
    assert gang.task.not_before == gang.now + 1.0


def test_a_rank_killed_at_the_start_limit_does_not_replace_the_failure() -> None:
    gang = admitted()
    gang.tell(gang.started(0))
    time_passes(gang, 300.0)
    assert outcome_of(gang, gang.ended(0, Ending.FAILED)) is None
    assert gang.task.stop_reason is StopReason.START_TIMEOUT


def test_gang_that_is_never_ready_waits_longer_each_time_and_fails_at_last() -> None:
    gang = admitted(max_retries=1)
    pauses = []
    for _ in range(3):
        time_passes(gang, 300.0)
        gang.tell(*(gang.gone(rank) for rank in range(3)))
        assert gang.task.not_before is not None
        pauses.append(gang.task.not_before - gang.now)
        gang.now = gang.task.not_before
        gang.world.measure([a_sample(device, gang.now) for device in gang.world.ledgers])
        admit_all(gang.world, now=gang.now)
        gang.fence = gang.task.fence
    assert pauses == [1.0, 2.0, 4.0]
    [decision] = time_passes(gang, 300.0)
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert "it was tried 4 times" in decision.outcome.failure.message
    gang.tell(*(gang.gone(rank) for rank in range(3)))
    assert gang.world.finished["default", TaskState.FAILED] == 1


def test_of_many_missing_ranks_a_few_are_named() -> None:
    world = a_world(a_gang("gang", *bundles(6, cpu=1.0)))
    admit_all(world)
    gang = Agents(world)
    [decision] = time_passes(gang, 300.0)
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert "missing: 0 on n1, 1 on n1, 2 on n1 and 3 more;" in decision.outcome.failure.message


def test_gang_past_its_limit_fails_though_rank_zero_succeeds_afterwards() -> None:
    gang = running(timeout_seconds=Seconds(60.0))
    [decision] = time_passes(gang, 60.0)
    assert (decision.why, stopped(decision.orders)) == ("timeout", [0, 1, 2])
    outcome = outcome_of(gang, gang.ended(0))
    assert (outcome.ending, outcome.result, outcome.failure.kind) == (Ending.STOPPED, None, "timeout")
    gang.tell(*(gang.ended(rank) for rank in (1, 2)), *(gang.gone(rank) for rank in range(3)))
    assert gang.world.finished["default", TaskState.FAILED] == 1


def test_unconfirmed_ranks_are_given_up_together() -> None:
    gang = running()
    gang.tell(gang.ended(1, Ending.FAILED), gang.gone(1))
    kill = time_passes(gang, 30.0)
    assert stopped(kill[0].orders) == [0, 2]
    time_passes(gang, 10.0)
    assert gang.task.state is TaskState.FAILED
    assert leases(gang) == {0: LeaseState.QUARANTINED, 2: LeaseState.QUARANTINED}
    gang.tell(gang.gone(0), gang.gone(2))
    assert not leases(gang)


def test_ended_rank_with_a_lasting_process_is_given_up_while_others_go_on() -> None:
    gang = running()
    gang.tell(gang.ended(2))
    time_passes(gang, 10.0)
    assert leases(gang)[2] is LeaseState.QUARANTINED
    assert gang.task.state is TaskState.RUNNING


def seen(gang: Agents, node: str, *ranks: int, **facts: Any) -> list[Order]:
    """The agent of a node answers that it knows these ranks."""
    devices = tuple(ReportedDevice(f"gpu{index}", "H100", index, Mib(80 * GIB), True) for index in (0, 1))
    known = tuple((gang.id, gang.fence, rank) for rank in ranks)
    answer = NodeReport(a_node(node, **facts), devices, known, gang.now)
    decisions = reconcile(gang.world, answer, gang.now, gang.policy, InventoryRules("test"))
    commit(gang.world, decisions)
    orders: list[Any] = [order for decision in decisions for order in decision.orders]
    return orders


def test_a_new_leader_repeats_the_go_orders_of_a_running_gang() -> None:
    gang = running()
    orders = seen(gang, "n1", 0, 1)
    assert [(type(order), order.rank) for order in orders] == [(GoOrder, 0), (GoOrder, 1)]
    assert gang.task.state is TaskState.RUNNING


def test_a_gang_half_started_when_its_leader_changes_goes_on_getting_ready() -> None:
    gang = admitted()
    gang.tell(gang.started(0), gang.ready(0))
    assert not seen(gang, "n1", 0, 1)
    assert gang.task.state is TaskState.ADMITTED
    orders = gang.tell(gang.ready(1), gang.ready(2))
    assert sum(isinstance(order, GoOrder) for order in orders) == 3


def test_a_rank_that_its_agent_does_not_know_is_gone() -> None:
    gang = running()
    seen(gang, "n1", 0)
    assert states(gang.task) == ["ready", "ended", "ready"]
    assert gang.task.stop_reason is StopReason.RANK_FAILED


def test_a_rank_that_waited_at_the_barrier_and_is_not_there_is_gone() -> None:
    gang = admitted()
    gang.tell(gang.ready(0), gang.ready(1))
    seen(gang, "n1", 0)
    assert gang.task.stop_reason is StopReason.RANK_FAILED


def test_an_agent_that_restarted_without_a_rank_costs_no_retry() -> None:
    gang = running()
    seen(gang, "n2", incarnation="n2-2")
    assert gang.task.stop_reason is StopReason.RANK_LOST


def test_a_restarted_agent_without_a_rank_stops_the_ranks_on_other_nodes() -> None:
    gang = running()
    orders = seen(gang, "n2", incarnation="n2-2")
    assert stopped(orders) == [0, 1]


def test_an_agent_without_one_rank_is_told_to_stop_the_rank_that_it_has() -> None:
    gang = running()
    orders = seen(gang, "n1", 0, incarnation="n1-2")
    assert stopped(orders) == [0, 2]
    assert not [order for order in orders if isinstance(order, GoOrder)]
    assert {order.incarnation for order in orders if order.node == "n1"} == {"n1-2"}


def test_a_notice_is_repeated_to_the_ranks_that_are_still_there() -> None:
    gang = running()
    gang.tell(gang.ended(2, Ending.FAILED), gang.gone(2))
    orders = seen(gang, "n1", 0, 1)
    assert stopped(orders) == [0, 1]


def test_ranks_of_an_old_fence_are_killed_where_they_are_found() -> None:
    gang = running(max_retries=1)
    gang.tell(gang.ended(1, Ending.FAILED), *(gang.gone(rank) for rank in range(3)))
    orders = seen(gang, "n1", 1)
    assert [(type(order), order.rank) for order in orders] == [(StopOrder, 1), (ForgetOrder, 1)]
