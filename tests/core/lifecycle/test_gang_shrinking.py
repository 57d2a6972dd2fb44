"""What may come between while ranks leave a gang that goes on: stops, leaders, nodes and time."""

import pytest
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.device import DeviceSample
from gpubroker_server.core.domain.holders import Member, MemberState
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.orders import (
    Ending,
    GoOrder,
    StopOrder,
    WorldOrder,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.deadlines import due
from gpubroker_server.core.lifecycle.stopping import overuse_decisions
from gpubroker_server.core.planning.forecasts.future_capacity import ExpectedEnds
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.payload import released_members
from msgspec import convert

from tests.builders import (
    GIB,
    a_device,
    a_node,
    a_task,
    check_ledger,
    commit,
    submit,
)
from tests.core.elastic import (
    BIG,
    LATER,
    at_work,
    comes,
    elastic,
    on_one_node,
    orders_of,
    plan,
    seen,
    shrunk,
    state_of,
    wait,
)
from tests.core.gangs import (
    leases,
    states,
    stopped,
)

# What comes between


def test_a_cancel_while_a_rank_leaves_stops_all_ranks() -> None:
    gang = shrunk()
    cancel = Request("r", gang.id, "default", "cancel", {}, gang.now)
    decision = carry_out(gang.world, cancel, gang.now, Policy())
    commit(gang.world, decision)
    assert stopped(decision.orders) == [0, 1, 2, 3]
    gang.tell(*(gang.gone(rank) for rank in (2, 0, 1, 3)))
    assert gang.world.finished["default", TaskState.CANCELLED] == 1
    plan(gang)
    assert state_of(gang) is TaskState.ADMITTED


def test_a_preempted_gang_comes_back_with_all_ranks_under_a_new_fence() -> None:
    gang = shrunk()
    comes(gang, "wide", gpus=2)
    assert gang.task.stop_reason is StopReason.PREEMPT
    late = gang.ended(2, Ending.FAILED)
    gang.tell(*(gang.gone(rank) for rank in range(4)))
    assert (gang.task.state, members_of(gang.task), gang.task.preemptions) == (TaskState.PENDING, (), 1)
    assert not gang.tell(late)
    check_ledger(gang.world)
    plan(gang)
    assert {state_of(gang), state_of(gang, "wide")} == {TaskState.ADMITTED}


def test_a_new_leader_repeats_the_stop_order_and_the_world_orders() -> None:
    gang = shrunk()
    gang.now = Instant(LATER + 12.0)
    [notice] = (order for order in seen(gang, "n2", 2, 3) if isinstance(order, StopOrder))
    assert (notice.rank, notice.grace_seconds) == (2, 18.0)
    assert [(type(order), order.rank) for order in seen(gang, "n1", 0, 1)] == [
        (WorldOrder, 0), (GoOrder, 0), (WorldOrder, 1), (GoOrder, 1),
    ]  # fmt: skip
    assert gang.task.state is TaskState.RUNNING


def test_a_leaving_rank_that_its_agent_does_not_know_has_left() -> None:
    gang = shrunk()
    seen(gang, "n2", 3)
    assert (gang.task.state, members_of(gang.task)[2].gone) == (TaskState.RUNNING, True)
    plan(gang)
    assert state_of(gang) is TaskState.ADMITTED


def test_a_repeated_ready_of_a_leaving_rank_changes_nothing() -> None:
    gang = shrunk()
    assert not gang.tell(gang.ready(2))
    assert states(gang.task)[2] == "leaving"


def test_gang_goes_on_when_a_lost_node_had_nothing_but_leaving_ranks() -> None:
    gang = at_work(elastic(3, 2))
    comes(gang, gpus=2)
    assert [member.node for member in members_of(gang.task)] == ["n1", "n1", "n2"]
    gang.tell(gang.node_lost("n2"))
    assert (gang.task.state, states(gang.task)) == (TaskState.RUNNING, ["ready", "ready", "left"])
    assert leases(gang)[2] is LeaseState.QUARANTINED


def test_gang_goes_on_without_a_rank_that_it_can_lose_with_its_node() -> None:
    gang = shrunk()
    orders = gang.tell(gang.node_lost("n2"))
    assert (gang.task.state, states(gang.task)) == (TaskState.RUNNING, ["ready", "ready", "left", "left"])
    told = [order for order in orders if isinstance(order, WorldOrder)]
    assert [(order.rank, order.ranks) for order in told] == [(0, (0, 1)), (1, (0, 1))]
    assert [leases(gang)[rank] for rank in (2, 3)] == [LeaseState.QUARANTINED] * 2
    check_ledger(gang.world)
    gang.tell(gang.ended(0), gang.ended(1))
    assert gang.world.finished["default", TaskState.SUCCEEDED] == 1


def test_gang_that_cannot_lose_a_rank_stops_when_the_ranks_node_goes_down() -> None:
    gang = at_work(elastic(4, 3))
    gang.tell(gang.node_lost("n2"))
    assert (gang.task.state, gang.task.stop_reason) == (TaskState.STOPPING, StopReason.RANK_LOST)
    assert states(gang.task) == ["ready", "ready", "ended", "ended"]


# Time


def test_a_rank_that_does_not_leave_is_killed_and_killed_again() -> None:
    gang = shrunk()
    assert not wait(gang, 4.0)
    assert [(o.rank, o.grace_seconds) for o in orders_of(wait(gang, 26.0), StopOrder)] == [(2, 0.0)]
    assert not wait(gang, 1.0)
    assert stopped(orders_of(wait(gang, 2.0), StopOrder)) == [2]
    again = due(gang.world, gang.now, gang.policy, None)
    assert stopped(orders_of(again, StopOrder)) == [2]


def test_an_unconfirmed_leaving_rank_is_given_up_and_the_gang_goes_on() -> None:
    gang = shrunk()
    decisions = wait(gang, 40.0)
    assert [decision.why for decision in decisions] == ["unconfirmed"]
    assert (gang.task.state, states(gang.task)[2]) == (TaskState.RUNNING, "left")
    assert leases(gang)[2] is LeaseState.QUARANTINED
    again = plan(gang)
    assert stopped(orders_of(again, StopOrder)) == [3]  # the next one that it can do without
    gang.tell(gang.gone(2))
    assert 2 not in leases(gang)
    check_ledger(gang.world)


def test_a_gang_that_only_waited_for_an_unconfirmed_rank_has_succeeded() -> None:
    gang = shrunk()
    gang.tell(*(gang.ended(rank) for rank in (0, 1, 3)), *(gang.gone(rank) for rank in (0, 1, 3)))
    wait(gang, 40.0)
    assert gang.task.state is TaskState.SUCCEEDED
    assert gang.task.finished_at == LATER + 40.0


def test_rank_that_ended_with_a_lasting_process_is_given_up_after_notice() -> None:
    gang = shrunk()
    gang.tell(gang.ended(2, Ending.STOPPED))
    assert not wait(gang, 26.0)
    wait(gang, 14.0)
    assert leases(gang)[2] is LeaseState.QUARANTINED


def test_a_gang_past_its_limit_is_stopped_even_if_a_rank_should_have_left() -> None:
    gang = at_work(elastic(timeout_seconds=Seconds(45.0)))
    comes(gang)
    assert [decision.why for decision in wait(gang, 36.0)] == ["timeout"]
    assert gang.task.state is TaskState.STOPPING


def test_when_another_victim_is_given_up_the_ranks_memory_stays_pledged() -> None:
    gang = at_work(elastic(3, 2))
    submit(gang.world, a_task("low", priority=5, gpu_mb=BIG, grace_seconds=Seconds(5.0)))
    plan(gang)
    gang.now = Instant(LATER + 1.0)
    comes(gang, gpus=2)
    assert members_of(gang.task)[2].freeing_for == "urgent"
    wait(gang, 16.0)
    assert members_of(gang.task)[2].freeing_for == "urgent"
    assert [*gang.world.pledges] == ["urgent"]


def test_gang_that_frees_for_two_overdue_pledges_is_written_once() -> None:
    gang = at_work(elastic(4, 1))
    gang.policy = Policy(kill_patience_seconds=Seconds(60.0), pledge_patience_seconds=Seconds(10.0))
    comes(gang, "first")
    comes(gang, "second")
    assert {member.freeing_for for member in members_of(gang.task)} == {None, "first", "second"}
    assert [decision.why for decision in wait(gang, 40.0)] == ["dissolved", "dissolved"]
    assert gang.world.pledges == {}


# Explanations


def test_explanations_name_the_gang_and_count_the_ranks() -> None:
    gang = shrunk()
    assert "gang" in explain(gang.world, TaskId("urgent"), gang.policy, gang.now).message
    told = explain(gang.world, gang.id, gang.policy, gang.now).message
    assert "3 ranks, 1 more stopped early" in told


def test_notices_of_ranks_survive_their_rows() -> None:
    members = (
        Member(0, NodeName("n1"), MemberState.READY, address="10.0.0.1:4000"),
        Member(1, NodeName("n1"), MemberState.LEAVING, False, "", TaskId("urgent"), Instant(5.0)),
        Member(2, NodeName("n2"), MemberState.LEFT, True, "", None, Instant(4.0)),
    )
    assert convert(released_members(members), tuple[Member, ...]) == members


def test_memory_that_leaving_ranks_hold_counts_as_free_soon() -> None:
    gang = shrunk()
    draft = Draft(gang.world)
    node = NodeName("n2")
    assert draft.headroom_soon(node, priority=90).cpu == draft.headroom(node, priority=90).cpu + 1.0


def test_what_a_leaving_rank_holds_is_expected_back_by_its_deadline() -> None:
    gang = shrunk()
    expected_ends = ExpectedEnds(Draft(gang.world), gang.policy, gang.now)
    holdings = [held for ledger in gang.world.ledgers.values() for held in ledger.holdings.values()]
    assert {held.lease.rank: expected_ends.of_holding(held).p50_at for held in holdings}[2] == LATER + 30.0


def test_memory_freed_for_an_ended_preemptor_counts_for_the_next() -> None:
    gang = shrunk()
    cancel = Request("r", TaskId("urgent"), "default", "cancel", {}, gang.now)
    commit(gang.world, carry_out(gang.world, cancel, gang.now, Policy()))
    gang.now = Instant(LATER + 5.0)
    [decision] = comes(gang, "wide", gpus=2)
    assert stopped(decision.orders) == [3]
    assert {written.pledge.deadline_at for written in decision.pledges} == {LATER + 35.0}


def test_a_rank_that_has_ended_gets_no_repeated_orders() -> None:
    gang = shrunk()
    gang.tell(gang.ended(1))
    assert {order.rank for order in seen(gang, "n1", 0, 1)} == {0}


def test_overuse_by_a_leaving_rank_is_ignored() -> None:
    g = shrunk()
    world, gang = g.world, g.world.tasks[TaskId("gang")]
    [leaving, *_] = [member for member in members_of(gang) if not member.takes_part]
    [lease] = [lease for lease in world.leases_of(gang) if lease.rank == leaving.rank]
    used = Mib(70 * GIB)
    world.measure([DeviceSample(lease.device, Instant(g.now + 1.0), used, by_holder={lease.mark: used})])
    assert overuse_decisions(world, Instant(g.now + 1.0), Policy(overuse="stop")) == []


@pytest.mark.parametrize("node", ["n0", "n2"])
def test_the_newest_leaves_first_whichever_node_it_is_on(node: str) -> None:
    gang = on_one_node(elastic(4, 1))
    gang.world.add_node(a_node(node))
    for index in (0, 1):
        gang.world.add_device(a_device(f"gpu{index}", node))
    plan(gang)
    gang.tell(gang.started(2), gang.started(3), gang.ready(2), gang.ready(3))
    comes(gang)
    assert [member.takes_part for member in members_of(gang.task)] == [True, True, True, False]
