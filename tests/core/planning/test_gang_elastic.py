"""Ranks that a gang can do without are the first to give memory back, and the gang goes on."""

from gpubroker_server.core.domain.holders import MemberState
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.orders import (
    Ending,
    StopOrder,
    WorldOrder,
)
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.task import StopReason, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import (
    GIB,
    a_task,
    check_ledger,
    submit,
)
from tests.core.elastic import BIG, LATER, at_work, comes, elastic, orders_of, plan, shrunk, state_of
from tests.core.gangs import (
    Agents,
    a_cluster,
    a_gang,
    admit_all,
    bundles,
    leases,
    outcome_of,
    states,
    stopped,
)

# Who is asked


def test_a_rank_beyond_the_least_leaves_and_the_gang_goes_on() -> None:
    gang = at_work()
    decisions = comes(gang)
    assert [(order.task, order.rank, order.grace_seconds) for order in orders_of(decisions, StopOrder)] == [
        ("gang", 2, 30.0)
    ]
    assert gang.task.state is TaskState.RUNNING
    assert states(gang.task) == ["ready", "ready", "leaving", "ready"]
    assert members_of(gang.task)[2].stop_deadline_at == LATER + 30.0


def test_the_others_hear_who_is_left() -> None:
    gang = at_work()
    told = orders_of(comes(gang), WorldOrder)
    assert [(order.rank, order.ranks) for order in told] == [(rank, (0, 1, 3)) for rank in (0, 1, 3)]


def test_two_of_them_leave_before_one_run_that_loses_nothing() -> None:
    whole = a_task("fresh", priority=5, gpus=2, gpu_mb=10 * GIB)
    gang = at_work(elastic(4, 1))
    submit(gang.world, whole)
    plan(gang)
    gang.now = Instant(LATER + 1.0)
    assert state_of(gang, "fresh") is TaskState.ADMITTED
    comes(gang, gpus=2)
    assert (states(gang.task)[2:], state_of(gang, "fresh")) == (["leaving"] * 2, TaskState.ADMITTED)


def test_as_many_leave_as_are_needed_and_then_the_gang_as_a_whole() -> None:
    gang = at_work()
    comes(gang, gpus=2)
    assert states(gang.task) == ["ready", "ready", "leaving", "leaving"]
    decisions = comes(gang, "second")
    assert gang.task.state is TaskState.STOPPING
    assert stopped(orders_of(decisions, StopOrder)) == [0, 1, 2, 3]


def test_it_yields_to_strictly_higher_priority_only() -> None:
    gang = at_work()
    assert comes(gang, priority=10) == []
    assert states(gang.task) == ["ready"] * 4


def test_no_shield_keeps_a_rank_whose_going_costs_nothing() -> None:
    gang = at_work()
    gang.policy = Policy(min_run_seconds=Seconds(600.0))
    comes(gang)
    assert states(gang.task)[2] == "leaving"
    assert comes(gang, "wide", gpus=2) == []  # for two devices of one node ranks 0 and 1 would have to go


def test_a_gang_that_is_not_elastic_or_has_not_begun_gives_way_as_a_whole() -> None:
    rigid = at_work(a_gang("gang", *bundles(4, gpu_mb=BIG), priority=10))
    comes(rigid)
    assert rigid.task.state is TaskState.STOPPING
    world = a_cluster(elastic())
    admit_all(world)
    waiting = Agents(world)
    waiting.now = LATER
    comes(waiting)
    assert waiting.task.state is TaskState.STOPPING


def test_a_rank_that_is_done_already_is_not_asked() -> None:
    gang = at_work()
    gang.tell(gang.ended(3))
    comes(gang)  # what rank 3 gives back will do
    assert states(gang.task) == ["ready", "ready", "ready", "succeeded"]


def test_a_gang_makes_room_for_a_gang_with_ranks_on_several_nodes() -> None:
    gang = at_work(elastic(4, 1))
    submit(gang.world, a_gang("other", *bundles(3, gpu_mb=BIG), priority=80))
    plan(gang)
    assert states(gang.task) == ["ready", "leaving", "leaving", "leaving"]
    for rank in (1, 2, 3):
        gang.tell(gang.ended(rank, Ending.STOPPED), gang.gone(rank))
    plan(gang)
    assert state_of(gang, "other") is TaskState.ADMITTED
    check_ledger(gang.world)


def test_a_tenant_takes_back_what_was_borrowed_rank_by_rank() -> None:
    policy = Policy(
        tenants=(
            TenantPolicy("lender", cohort="all", guaranteed_mb=Mib(2 * BIG)),
            TenantPolicy("default", cohort="all", guaranteed_mb=Mib(2 * BIG)),
        )
    )
    gang = at_work(replace(elastic(), priority=50))
    gang.policy = policy
    submit(gang.world, a_task("mine", tenant="lender", priority=50, gpu_mb=BIG))
    plan(gang)
    assert states(gang.task) == ["ready", "ready", "ready", "leaving"]


# How it leaves


def test_memory_of_a_gone_rank_goes_to_the_task_it_was_pledged_to() -> None:
    gang = shrunk()
    assert leases(gang)[2] is LeaseState.HELD
    gang.tell(gang.ended(2, Ending.STOPPED))
    assert leases(gang)[2] is LeaseState.RELEASING
    assert (states(gang.task)[2], gang.task.state) == ("left", TaskState.RUNNING)
    rival = comes(gang, "rival", priority=10)
    assert state_of(gang, "rival") is TaskState.PENDING
    assert rival == []
    gang.tell(gang.gone(2))
    assert 2 not in leases(gang)
    plan(gang)
    assert (state_of(gang), state_of(gang, "rival")) == (TaskState.ADMITTED, TaskState.PENDING)
    assert gang.world.use[NodeName("n2")].cpu == 1.0
    check_ledger(gang.world)


def test_however_the_rank_ends_it_is_not_the_end_of_the_gang() -> None:
    for ending in Ending:
        gang = shrunk()
        outcome = outcome_of(gang, gang.ended(2, ending), gang.gone(2))
        assert outcome is None
        assert (gang.task.state, members_of(gang.task)[2].state) == (TaskState.RUNNING, MemberState.LEFT)
    gang = shrunk()
    gang.tell(gang.gone(2))  # killed, without a word
    assert (gang.task.state, states(gang.task)[2]) == (TaskState.RUNNING, "left")
    gang.tell(gang.gone(2))
    assert gang.task.state is TaskState.RUNNING


def test_the_gang_succeeds_with_those_that_are_left() -> None:
    gang = shrunk()
    gang.tell(gang.ended(2, Ending.STOPPED), gang.gone(2))
    outcome = outcome_of(gang, *(gang.ended(rank) for rank in (0, 1, 3)))
    assert (outcome.result, gang.world.finished["default", TaskState.SUCCEEDED]) == (b"0", 1)


def test_a_gang_whose_work_is_done_waits_for_the_rank_that_is_leaving() -> None:
    gang = shrunk()
    gang.tell(*(gang.ended(rank) for rank in (0, 1, 3)))
    assert gang.task.state is TaskState.RUNNING
    gang.tell(gang.ended(2, Ending.STOPPED))
    assert gang.task.state is TaskState.SUCCEEDED
    gang.tell(*(gang.gone(rank) for rank in range(4)))
    assert gang.id not in gang.world.tasks


def test_a_failure_among_those_that_are_left_still_stops_all() -> None:
    gang = shrunk()
    orders = gang.tell(gang.ended(1, Ending.FAILED))
    assert (gang.task.state, gang.task.stop_reason) == (TaskState.STOPPING, StopReason.RANK_FAILED)
    assert stopped(orders) == [0, 2, 3]
    gang.tell(gang.ended(2, Ending.STOPPED), gang.gone(2))
    assert gang.task.state is TaskState.STOPPING
    gang.tell(*(gang.gone(rank) for rank in (0, 1, 3)))
    assert not leases(gang)


# In any course


@given(
    least=st.integers(1, 4),
    comers=st.lists(st.tuples(st.sampled_from((5, 10, 50, 90)), st.integers(1, 2)), max_size=4),
    ends=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4),
)
def test_a_gang_at_work_has_its_least_ranks_and_no_byte_is_promised_twice(
    least: int, comers: list[tuple[int, int]], ends: list[tuple[int, bool]]
) -> None:
    gang = at_work(elastic(4, least))
    for number, (priority, gpus) in enumerate(comers):
        gang.now = Instant(gang.now + 1.0)
        comes(gang, f"comer{number}", priority, gpus=gpus)
        check(gang, least)
        for rank, with_word in ends[number : number + 1]:
            if members_of(gang.task) and not members_of(gang.task)[rank].takes_part:
                words = [gang.ended(rank, Ending.STOPPED)] if with_word else []
                gang.tell(*words, gang.gone(rank))
            check(gang, least)
        plan(gang)
        check(gang, least)


def check(gang: Agents, least: int) -> None:
    check_ledger(gang.world)
    if gang.task.state is TaskState.RUNNING:
        assert all(member.takes_part and not member.gone for member in members_of(gang.task)[:least])
        held = {lease.rank for lease in gang.world.leases_of(gang.task)}
        assert held == {member.rank for member in members_of(gang.task) if not member.gone}
