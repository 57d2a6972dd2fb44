"""A running elastic gang gets ranks when there is room that no waiting task can use."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, QueuePause, Request
from gpubroker_server.core.domain.holders import Gang, Member, MemberState
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.orders import Ending, GoOrder, StartOrder, StopOrder, WorldOrder
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.ranks import MAX_FAILED_JOINS, MAX_RANKS, vacant_bundles, world_number
from gpubroker_server.core.domain.task import TaskState, members_of
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.world.events import events_of
from gpubroker_server.core.world.payload import released_members
from msgspec import convert
from msgspec.structs import replace

from tests.builders import (
    GIB,
    a_device,
    a_node,
    a_task,
    a_world,
    check_ledger,
    commit,
    orders_of_kind,
    submit,
)
from tests.core.elastic import (
    BIG,
    LATER,
    comes,
    elastic,
    on_one_node,
    orders_of,
    plan,
    seen,
    state_of,
    wait,
)
from tests.core.gangs import Agents, a_gang, admit_all, bundles, leases, states, stopped

READY, PLACED, LEAVING, LEFT, SUCCEEDED = "ready", "placed", "leaving", "left", "succeeded"


def arrives(gang: Agents, node: str = "n2", gpus: int = 2) -> list[Decision]:
    """A node joins the cluster and is planned with."""
    gang.world.add_node(a_node(node))
    for index in range(gpus):
        gang.world.add_device(a_device(f"gpu{index}", node))
    return plan(gang)


def growing(*parts: Any) -> Agents:
    """Ranks 2 and 3 are on their way on n2."""
    gang = on_one_node(*parts)
    arrives(gang)
    return gang


def grown() -> Agents:
    gang = growing()
    gang.tell(gang.started(2), gang.started(3), gang.ready(2), gang.ready(3))
    return gang


def told(orders: Any) -> list[tuple[int, tuple[int, ...], int | None]]:
    return [(order.rank, order.ranks, order.number) for order in orders if isinstance(order, WorldOrder)]


# Who joins


def test_ranks_are_added_under_the_same_claim_when_a_node_arrives() -> None:
    gang = on_one_node()
    [decision] = arrives(gang)
    assert decision.why == "grow"
    starts = [
        (o.rank, o.fence, o.node, o.barrier, o.world_size) for o in orders_of_kind(decision, StartOrder)
    ]
    assert starts == [(2, 1, "n2", True, 4), (3, 1, "n2", True, 4)]
    assert (gang.task.state, states(gang.task)) == (TaskState.RUNNING, [READY, READY, PLACED, PLACED])
    assert leases(gang) == dict.fromkeys((0, 1), LeaseState.HELD) | dict.fromkeys((2, 3), LeaseState.RESERVED)
    check_ledger(gang.world)
    assert plan(gang) == []


def test_ranks_are_added_when_memory_comes_back() -> None:
    other = a_task("other", gpu_mb=BIG, priority=50)
    gang = on_one_node(elastic(2, 1), other)
    assert [member.node for member in members_of(gang.task)] == ["n1"]
    cancel = Request("r", TaskId("other"), "default", "cancel", {}, gang.now)
    commit(gang.world, carry_out(gang.world, cancel, gang.now, Policy()))
    assert plan(gang) == []
    commit(gang.world, carry_out(gang.world, replace(cancel, id="r2"), gang.now, Policy()))
    other_run = Agents(gang.world, "other")
    other_run.tell(other_run.gone(0))
    assert [decision.why for decision in plan(gang)] == ["grow"]


def test_waiting_tasks_come_first_whatever_their_priority() -> None:
    gang = on_one_node()
    submit(gang.world, a_task("low", gpu_mb=BIG, priority=1))
    decisions = arrives(gang)
    assert [decision.why for decision in decisions] == ["admit", "grow"]
    assert states(gang.task) == [READY, READY, PLACED]


def test_missing_ranks_join_in_order() -> None:
    wide = bundles(1, gpus=2, gpu_mb=BIG, cpu=1.0)
    gang = on_one_node(a_gang("gang", *bundles(2, gpu_mb=BIG), *wide, *bundles(1, gpu_mb=BIG), min_ranks=2))
    assert arrives(gang, gpus=1) == []


def test_a_gang_gets_no_room_that_is_pledged() -> None:
    gang = on_one_node()
    submit(gang.world, a_task("wide", gpus=3, gpu_mb=BIG, priority=0))
    assert [decision.why for decision in arrives(gang)] == ["grow"]
    back = growing()
    back.tell(back.ready(2), back.ready(3))
    comes(back, "urgent", gpus=2)
    assert states(back.task)[2:] == [LEAVING, LEAVING]
    back.tell(back.ended(2, Ending.STOPPED), back.gone(2))
    plan(back)
    assert states(back.task) == [READY, READY, LEFT, LEAVING]


def test_an_inelastic_gang_and_one_that_has_all_ranks_get_none() -> None:
    whole = on_one_node(elastic(2, 1))
    assert arrives(whole) == []
    rigid = on_one_node(a_gang("gang", *bundles(2, gpu_mb=BIG), priority=10))
    assert arrives(rigid) == []


def test_no_rank_is_added_while_its_tenant_is_paused_or_beyond_its_quota() -> None:
    gang = on_one_node()
    commit(gang.world, Decision("queue", "pause", paused=(QueuePause("tenant:default", gang.now, "ops"),)))
    assert arrives(gang) == []
    poor = on_one_node()
    poor.policy = Policy(tenants=(TenantPolicy("default", guaranteed_mb=Mib(3 * BIG)),))
    arrives(poor)
    assert states(poor.task) == [READY, READY, PLACED]
    poor.policy = Policy(tenants=(TenantPolicy("default", guaranteed_mb=Mib(2 * BIG)),))
    poor.tell(poor.ready(2))
    assert arrives(poor, "n3") == []


@pytest.mark.parametrize(("strategy", "size"), [("strict_pack", 2), ("strict_spread", 3), ("spread", 4)])
def test_ranks_join_where_the_strategy_allows(strategy: str, size: int) -> None:
    devices = [a_device(f"gpu{index}", "n1") for index in (0, 1)] + [a_device("gpu0", "n0", mb=10 * GIB)]
    parts = {"gpu_mb": BIG, "cpu": 1.0}
    gang = a_gang("gang", *bundles(4, **parts), strategy=strategy, min_ranks=1)
    world = a_world(*devices, gang)
    admit_all(world)
    agents = Agents(world)
    agents.run()
    if strategy == "strict_spread":
        assert [member.node for member in members_of(agents.task)] == ["n1"]
        arrives(agents, "n2")
        agents.tell(agents.ready(1))
        arrives(agents, "n3")
        size = 3
    else:
        arrives(agents, "n2")
    assert len(members_of(agents.task)) == size


def test_each_rank_that_joins_has_a_bundle_that_no_other_has() -> None:
    demands = [Mib(10 * GIB), BIG, Mib(30 * GIB), Mib(70 * GIB)]
    parts = [bundle for mb in demands for bundle in bundles(1, gpu_mb=mb)]
    gang = on_one_node(a_gang("gang", *parts, min_ranks=2, priority=10))
    found = gang.world.leases_of(gang.task)
    assert sorted(lease.mb for lease in found if lease.rank > 1) == [30 * GIB]
    arrives(gang)
    gang.tell(gang.ready(3))
    sizes = {lease.rank: lease.mb for lease in gang.world.leases_of(gang.task)}
    assert sizes == dict(enumerate(demands))


# How they join


def test_all_that_join_are_let_in_together_when_the_last_is_ready() -> None:
    gang = growing()
    assert gang.tell(gang.started(2), gang.ready(2)) == []
    assert states(gang.task) == [READY, READY, PLACED, PLACED]
    orders = gang.tell(gang.started(3), gang.ready(3))
    everyone = (0, 1, 2, 3)
    assert told(orders) == [(rank, everyone, 2) for rank in everyone]
    begins = [order for order in orders if isinstance(order, GoOrder)]
    assert [(order.rank, order.rank_zero_address) for order in begins] == [
        (2, "10.0.0.0:4000"), (3, "10.0.0.0:4000"),
    ]  # fmt: skip
    assert list(orders).index(begins[0]) > max(i for i, o in enumerate(orders) if isinstance(o, WorldOrder))
    assert states(gang.task) == [READY] * 4
    assert set(leases(gang).values()) == {LeaseState.HELD}


def test_the_newest_leave_first_and_numbers_of_worlds_rise() -> None:
    gang = grown()
    orders = orders_of(comes(gang), WorldOrder)
    assert told(orders) == [(rank, (0, 1, 2), 3) for rank in (0, 1, 2)]
    assert states(gang.task) == [READY, READY, READY, LEAVING]
    assert gang.tell(gang.ended(3, Ending.STOPPED), gang.gone(3)) != []
    plan(gang)
    assert state_of(gang) is TaskState.ADMITTED
    assert [decision.why for decision in arrives(gang, "n3", 1)] == ["grow"]
    assert [member.bundle for member in members_of(gang.task)] == [None, None, 2, 3, 3]
    assert told(gang.tell(gang.ready(4))) == [(rank, (0, 1, 2, 4), 4) for rank in (0, 1, 2, 4)]
    check_ledger(gang.world)


def test_an_old_report_of_a_rank_that_joined_changes_nothing_twice() -> None:
    gang = grown()
    before = gang.task
    orders = gang.tell(gang.ready(2))
    assert [type(order) for order in orders] == [WorldOrder, GoOrder]
    assert gang.task == before


def test_a_gang_that_grew_succeeds_when_all_ranks_have() -> None:
    gang = grown()
    gang.tell(*map(gang.ended, (2, 0, 1)))
    assert gang.task.state is TaskState.RUNNING
    gang.tell(gang.ended(3))
    assert gang.world.finished["default", TaskState.SUCCEEDED] == 1


def test_ranks_that_are_joining_are_sent_away_when_the_first_is_done() -> None:
    gang = growing()
    orders = gang.tell(gang.ended(0))
    assert stopped(orders) == [2, 3]
    assert states(gang.task) == [SUCCEEDED, READY, LEAVING, LEAVING]
    gang.tell(gang.ended(1), gang.gone(2), gang.gone(3))
    assert gang.world.finished["default", TaskState.SUCCEEDED] == 1


def test_a_gang_of_which_a_rank_is_done_grows_no_more() -> None:
    gang = on_one_node()
    gang.tell(gang.ended(1))
    assert arrives(gang) == []


# What costs only the rank


@pytest.mark.parametrize("ending", [Ending.FAILED, Ending.LOST, Ending.NEVER_STARTED])
def test_a_rank_that_fails_before_it_begins_costs_only_itself(ending: Ending) -> None:
    gang = growing()
    gang.tell(gang.ready(2))
    orders = gang.tell(gang.ended(3, ending))
    assert states(gang.task) == [READY, READY, READY, LEFT]
    assert told(orders) == [(rank, (0, 1, 2), 1) for rank in (0, 1, 2)]
    gang.tell(gang.gone(3))
    assert 3 not in leases(gang)


def test_a_rank_that_joined_and_fails_leaves() -> None:
    gang = grown()
    orders = gang.tell(gang.ended(2, Ending.FAILED))
    assert (gang.task.state, states(gang.task)) == (TaskState.RUNNING, [READY, READY, LEFT, READY])
    assert told(orders) == [(rank, (0, 1, 3), 3) for rank in (0, 1, 3)]
    gang.tell(gang.gone(2))
    assert gang.task.state is TaskState.RUNNING


def test_a_rank_that_joined_and_dies_without_a_word_leaves() -> None:
    gang = grown()
    assert told(gang.tell(gang.gone(3))) == [(rank, (0, 1, 2), 3) for rank in (0, 1, 2)]
    assert (gang.task.state, states(gang.task)[3]) == (TaskState.RUNNING, LEFT)


def test_a_rank_of_the_start_that_fails_still_ends_the_attempt() -> None:
    gang = grown()
    orders = gang.tell(gang.ended(1, Ending.FAILED))
    assert (gang.task.state, stopped(orders)) == (TaskState.STOPPING, [0, 2, 3])
    gang.tell(*(gang.gone(rank) for rank in range(4)))
    assert gang.world.finished["default", TaskState.FAILED] == 1


def test_after_so_many_failures_no_rank_is_added() -> None:
    gang = on_one_node()
    arrives(gang, gpus=1)
    for rank in range(2, 2 + MAX_FAILED_JOINS):
        assert states(gang.task)[rank] == PLACED
        gang.tell(gang.ended(rank, Ending.FAILED), gang.gone(rank))
        plan(gang)
    assert len(members_of(gang.task)) == 2 + MAX_FAILED_JOINS
    assert vacant_bundles(gang.task) == ()
    told = explain(gang.world, gang.id, gang.policy, gang.now).message
    assert "2 of its 4 ranks are missing until its next start: 3 that joined failed (at most 3)" in told


def test_a_lost_node_is_no_failure_of_a_rank_that_joined() -> None:
    gang = on_one_node()
    for count in range(MAX_FAILED_JOINS + 1):
        node = f"n{count + 2}"
        assert [decision.why for decision in arrives(gang, node, 1)] == ["grow"]
        rank = count + 2
        gang.tell(gang.ready(rank))
        if count % 2:
            gang.tell(gang.gone(rank, Proof.BOOT_CHANGED))
            gang.world.add_node(replace(gang.world.nodes[NodeName(node)], ready=False))
        else:
            assert told(gang.tell(gang.node_lost(node))) != []
        assert states(gang.task)[rank] == LEFT
    assert vacant_bundles(gang.task) == (2, 3)
    check_ledger(gang.world)


def test_a_rank_that_is_not_ready_in_time_is_sent_away_and_the_others_join() -> None:
    gang = growing()
    gang.tell(gang.ready(2))
    assert not wait(gang, 299.0)
    decisions = wait(gang, 2.0)
    assert [decision.why for decision in decisions] == ["not_ready"]
    assert [(o.rank, o.grace_seconds) for o in orders_of(decisions, StopOrder)] == [(3, 0.0)]
    assert told(orders_of(decisions, WorldOrder)) == [(rank, (0, 1, 2), 1) for rank in (0, 1, 2)]
    assert states(gang.task) == [READY, READY, READY, LEAVING]
    assert stopped(orders_of(wait(gang, 3.0), StopOrder)) == [3]
    gang.tell(gang.gone(3))
    assert [decision.why for decision in plan(gang)] == ["grow"]


def test_a_claim_has_only_so_many_rank_numbers() -> None:
    gang = grown()
    gone = Member(0, NodeName("n2"), MemberState.LEFT, True, "", None, LATER, bundle=3)
    many = (*members_of(gang.task)[:3], *(replace(gone, rank=rank) for rank in range(3, MAX_RANKS - 1)))
    assert vacant_bundles(replace(gang.task, holder=Gang(many))) == (3,)
    full = (*many, replace(gone, rank=MAX_RANKS - 1))
    assert vacant_bundles(replace(gang.task, holder=Gang(full))) == ()


# What comes between


def test_a_preemptor_takes_the_room_of_ranks_that_are_joining() -> None:
    gang = growing()
    orders = orders_of(comes(gang), StopOrder)
    assert stopped(orders) == [3]
    assert told(gang.tell(gang.ready(2))) == [(rank, (0, 1, 2), 1) for rank in (0, 1, 2)]
    assert world_number(members_of(gang.task)) == 1


def test_a_cancel_stops_ranks_that_are_joining_too() -> None:
    gang = growing()
    cancel = Request("r", gang.id, "default", "cancel", {}, gang.now)
    decision = carry_out(gang.world, cancel, gang.now, Policy())
    commit(gang.world, decision)
    assert stopped(decision.orders) == [0, 1, 2, 3]
    gang.tell(*(gang.gone(rank) for rank in range(4)))
    assert gang.world.finished["default", TaskState.CANCELLED] == 1
    check_ledger(gang.world)


def test_a_new_leader_learns_that_a_start_never_arrived() -> None:
    gang = growing()
    assert seen(gang, "n2") == []  # its agent answered this term before: the start may be on its way
    gang.world.add_node(replace(gang.world.nodes[NodeName("n2")], ready=False))
    seen(gang, "n2", 2)
    assert states(gang.task) == [READY, READY, PLACED, LEFT]
    assert told(gang.tell(gang.ready(2))) != []


def test_new_leader_repeats_its_orders_only_to_ranks_that_have_joined() -> None:
    gang = growing()
    assert seen(gang, "n2", 2, 3) == []
    gang.tell(gang.ready(2), gang.ready(3))
    again = seen(gang, "n2", 2, 3)
    assert [(type(order), order.rank) for order in again] == [
        (WorldOrder, 2), (GoOrder, 2), (WorldOrder, 3), (GoOrder, 3),
    ]  # fmt: skip


def test_rank_that_does_not_leave_is_given_up_and_joining_ranks_begin() -> None:
    gang = growing()
    gang.tell(gang.started(3))
    comes(gang)
    wait(gang, 40.0)
    assert states(gang.task) == [READY, READY, PLACED, LEFT]
    assert leases(gang)[3] is LeaseState.QUARANTINED
    assert told(gang.tell(gang.ready(2))) == [(rank, (0, 1, 2), 1) for rank in (0, 1, 2)]


def test_the_gang_comes_back_with_plain_ranks_under_a_new_fence() -> None:
    gang = grown()
    gang.tell(gang.node_lost("n1"))
    gang.tell(gang.ended(2, Ending.STOPPED), gang.ended(3, Ending.STOPPED), gang.gone(2), gang.gone(3))
    assert (gang.task.state, members_of(gang.task)) == (TaskState.PENDING, ())
    gang.now = Instant(gang.now + 60.0)
    plan(gang)
    assert [(member.node, member.bundle) for member in members_of(gang.task)] == [("n2", None)] * 2


def test_members_that_came_late_survive_their_rows() -> None:
    members = (*members_of(growing().task), *members_of(grown().task))
    assert convert(released_members(members), tuple[Member, ...]) == members


def test_a_release_that_does_not_know_late_ranks_does_not_read_on() -> None:
    gang = on_one_node()
    [decision] = arrives(gang)
    assert [event.reader for event in events_of(decision) if event.kind == "task.changed"] == [4]


def test_an_explanation_counts_the_ranks_that_are_joining() -> None:
    gang = growing()
    told = explain(gang.world, gang.id, gang.policy, gang.now).message
    assert told == "running on n1, n2, 2 ranks, 2 more joining for 10 s"
