"""Limits, kills, unconfirmed runs, and pledges that waited too long."""

from typing import Any

import pytest
from gpubroker_server.core.domain.lease import LeaseState, PledgeEnd, Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Gone, StopOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.deadlines import (
    GAP_SECONDS,
    KILL_AGAIN_SECONDS,
    ObservationWindow,
    due,
    extend_window,
)
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
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    key,
    orders_of_kind,
    submit,
)

POLICY = Policy()


def watched(now: float, looked_seconds_ago: float = 0.5) -> ObservationWindow:
    """The watch of a leader that never slept."""
    return ObservationWindow(since=Instant(0.0), last=Instant(now - looked_seconds_ago))


def stopping(id: str = "run", reason: StopReason = StopReason.PREEMPT, **fields: Any) -> Holding:
    """A run with a grace period that ends at NOW."""
    facts = {"stop_reason": reason, "stop_deadline_at": NOW, **fields}
    return holding(a_task(id, gpu_mb=8 * GIB), "gpu0", state=TaskState.STOPPING, **facts)


def test_run_past_its_limit_gets_notice_and_its_verdict_in_one_commit() -> None:
    world = a_world(holding(a_task(timeout_seconds=100.0, grace_seconds=7.0), node="n1"), a_device())
    (decision,) = due(world, NOW, POLICY, watched(NOW))
    task = decision.tasks[0].task
    assert (task.state, task.stop_reason) == (TaskState.STOPPING, StopReason.TIMEOUT)
    assert task.stop_deadline_at == NOW + 7.0
    assert decision.orders == (
        StopOrder(task.id, task.fence, NodeName("n1"), "n1-1", StopReason.TIMEOUT, Seconds(7.0)),
    )
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert (decision.outcome.failure.kind, decision.outcome.fence) == ("timeout", task.fence)


@pytest.mark.parametrize("state", [TaskState.ADMITTED, TaskState.RUNNING])
def test_a_run_past_its_tasks_deadline_gets_notice_and_ends_expired(state: TaskState) -> None:
    world = a_world(holding(a_task(deadline_at=NOW, grace_seconds=7.0), node="n1", state=state), a_device())
    assert due(world, Instant(NOW - 0.1), POLICY, watched(NOW)) == []
    (decision,) = due(world, NOW, POLICY, watched(NOW))
    assert [order.reason for order in decision.orders if isinstance(order, StopOrder)] == [
        StopReason.DEADLINE
    ]
    commit(world, decision)
    task = world.tasks[TaskId("task")]
    assert (task.state, task.stop_deadline_at) == (TaskState.STOPPING, NOW + 7.0)
    (ended,) = apply_reports(world, [Gone(task.id, task.fence, NOW, Proof.PROCESS_ABSENT)], NOW, POLICY)
    assert ended.tasks[0].task.state is TaskState.EXPIRED
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert decision.outcome.failure.kind == "deadline"
    assert decision.outcome.failure.message == "its deadline passed after the run had run for 100 s"


def test_result_after_the_deadline_but_before_confirmation_is_accepted() -> None:
    """The run counts as having succeeded."""
    world = a_world(stopping(reason=StopReason.DEADLINE))
    done = Ended(TaskId("run"), Fence(1), NOW, Ending.SUCCEEDED, result=b"1")
    (decision,) = apply_reports(
        world, [done, Gone(TaskId("run"), Fence(1), NOW, Proof.PROCESS_ABSENT)], NOW, POLICY
    )
    assert decision.tasks[0].task.state is TaskState.SUCCEEDED


def test_a_run_that_fails_after_its_deadline_is_not_tried_again() -> None:
    world = a_world(stopping(reason=StopReason.DEADLINE, max_retries=5, deadline_at=NOW))
    failed = Ended(TaskId("run"), Fence(1), NOW, Ending.FAILED)
    (decision,) = apply_reports(
        world, [failed, Gone(TaskId("run"), Fence(1), NOW, Proof.PROCESS_ABSENT)], NOW, POLICY
    )
    assert decision.tasks[0].task.state is TaskState.EXPIRED
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert decision.outcome.failure.kind == "deadline"


@pytest.mark.parametrize(
    ("timeout_seconds", "reason"), [(90.0, StopReason.TIMEOUT), (110.0, StopReason.DEADLINE)]
)
def test_the_limit_that_was_reached_first_is_the_reason(timeout_seconds: float, reason: StopReason) -> None:
    task = a_task(timeout_seconds=timeout_seconds, deadline_at=NOW)
    world = a_world(holding(task, node="n1"), a_device())
    (decision,) = due(world, Instant(NOW + 60.0), POLICY, watched(NOW + 60.0))
    assert decision.tasks[0].task.stop_reason is reason


def expired(world: World, now: float = NOW) -> list[str]:
    decisions = due(world, Instant(now), POLICY, watched(now))
    commit(world, decisions)
    assert all(decision.tasks[0].task.state is TaskState.EXPIRED for decision in decisions)
    return [
        decision.outcome.failure.message
        for decision in decisions
        if decision.outcome is not None and decision.outcome.failure is not None
    ]


@pytest.mark.parametrize("aside", [{}, {"held": True}, {"not_before": Instant(NOW + 50.0)}])
def test_task_that_waits_past_its_time_expires_even_where_it_stands_aside(aside: dict[str, Any]) -> None:
    world = a_world(a_task(expires_at=Instant(NOW + 60.0), queue_ttl_seconds=30.0, **aside))
    assert expired(world, NOW + 59.0) == []
    assert expired(world, NOW + 60.0) == ["it did not get its devices within its time limit to wait of 30 s"]
    assert (world.tasks, len(world.queue)) == ({}, 0)
    assert due(world, Instant(NOW + 99.0), POLICY, watched(NOW + 99.0)) == []


def test_task_that_has_run_expires_by_its_deadline_not_by_its_wait_limit() -> None:
    fields: dict[str, Any] = {"fence": Fence(2), "preemptions": 1, "failures": 1}
    world = a_world(a_task(expires_at=NOW, deadline_at=Instant(NOW + 9.0), **fields))
    assert expired(world, NOW + 8.0) == []
    assert expired(world, NOW + 9.0) == [
        "its deadline passed while it waited (attempts before: 1 failed, 1 preempted)"
    ]


def test_a_preemptor_that_expires_gives_back_what_was_being_freed_for_it() -> None:
    preemptor = a_task(gpu_mb=8 * GIB, deadline_at=NOW)
    world = a_world(preemptor, a_pledge(preemptor, "gpu0", 8 * GIB))
    (decision,) = due(world, NOW, POLICY, watched(NOW))
    assert [written.end for written in decision.pledges] == [PledgeEnd.WITHDRAWN]
    commit(world, decision)
    assert world.pledges == {}


def test_preemptor_that_expires_with_its_pledge_overdue_ends_it_once() -> None:
    now = Instant(NOW + POLICY.pledge_patience_seconds)
    preemptor = a_task(gpu_mb=8 * GIB, deadline_at=now)
    world = a_world(preemptor, a_pledge(preemptor, "gpu0", 8 * GIB, deadline_at=NOW))
    assert [d.why for d in due(world, now, POLICY, watched(now))] == ["expire"]


def test_nothing_is_due_before_a_limit_or_without_one() -> None:
    limited = holding(a_task("limited", timeout_seconds=100.5), node="n1")
    world = a_world(a_node(), limited, holding(a_task("free"), node="n1"), a_task("waiting"))
    assert due(world, NOW, POLICY, watched(NOW)) == []


def test_a_run_that_has_not_started_uses_up_none_of_its_limit() -> None:
    world = a_world(a_node(), holding(a_task(timeout_seconds=1.0), node="n1", state=TaskState.ADMITTED))
    assert due(world, NOW, POLICY, watched(NOW)) == []


def test_run_with_no_reported_start_ends_its_limit_after_the_latest_start() -> None:
    hung = holding(a_task(timeout_seconds=1.0), node="n1", state=TaskState.ADMITTED)
    assert hung.task.admitted_at is not None
    latest_start_at = hung.task.admitted_at + POLICY.gang_start_seconds
    world = a_world(a_node(), hung)
    assert due(world, Instant(latest_start_at + 0.9), POLICY, watched(latest_start_at + 0.9)) == []
    (decision,) = due(world, Instant(latest_start_at + 1.0), POLICY, watched(latest_start_at + 1.0))
    assert decision.why == StopReason.TIMEOUT
    assert [type(order) for order in decision.orders] == [StopOrder]


def test_a_run_that_overstays_its_grace_is_killed_without_touching_a_row() -> None:
    (decision,) = due(a_world(stopping()), NOW, POLICY, watched(NOW))
    assert decision.is_empty()
    assert [order.grace_seconds for order in orders_of_kind(decision, StopOrder)] == [0.0]


def test_kill_is_repeated_every_few_seconds_however_often_the_leader_looks() -> None:
    world = a_world(stopping())
    kills = 0
    watch = None
    for step in range(38):
        now = Instant(NOW - 1.0 + step * 0.25)
        kills += len(due(world, now, POLICY, watch))
        watch = extend_window(watch, now)
    assert now < NOW + 3 * KILL_AGAIN_SECONDS
    assert kills == 3


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (StopReason.PREEMPT, TaskState.PENDING),
        (StopReason.CANCEL, TaskState.CANCELLED),
        (StopReason.TIMEOUT, TaskState.FAILED),
    ],
)
def test_the_task_of_an_unconfirmed_run_moves_on_and_its_memory_does_not(
    reason: StopReason, state: TaskState
) -> None:
    world = a_world(stopping(reason=reason))
    now = Instant(NOW + POLICY.kill_patience_seconds)
    (decision,) = due(world, now, POLICY, watched(now))
    assert decision.tasks[0].task.state is state
    assert [lease.state for lease in decision.leases] == [LeaseState.QUARANTINED]
    commit(world, decision)
    assert not world.active
    assert sum(ledger.held_mb() for ledger in world.ledgers.values()) == 8 * GIB


def test_an_unconfirmed_preempted_run_is_requeued_as_preempted() -> None:
    world = a_world(stopping(preemptions=2, failures=1))
    now = Instant(NOW + POLICY.kill_patience_seconds)
    (decision,) = due(world, now, POLICY, watched(now))
    task = decision.tasks[0].task
    assert (task.preemptions, task.failures, task.node, task.not_before) == (3, 1, None, None)


def test_a_leader_that_slept_gives_every_run_the_whole_patience_again() -> None:
    world = a_world(stopping())
    woken = Instant(NOW + 3600.0)
    assert [d.why for d in due(world, woken, POLICY, ObservationWindow(Instant(0.0), NOW))] == ["kill"]
    watch = extend_window(ObservationWindow(Instant(0.0), NOW), woken)
    almost = Instant(woken + POLICY.kill_patience_seconds - 0.1)
    assert "unconfirmed" not in {
        d.why for d in due(world, almost, POLICY, ObservationWindow(watch.since, almost))
    }
    after = Instant(woken + POLICY.kill_patience_seconds)
    assert [d.why for d in due(world, after, POLICY, ObservationWindow(watch.since, almost))] == [
        "unconfirmed"
    ]


def test_a_new_leader_gives_up_no_run_at_its_first_look() -> None:
    late = Instant(NOW + 3600.0)
    preemptor = a_task("high", gpu_mb=8 * GIB)
    world = a_world(stopping(freeing_for="high"), preemptor, a_pledge(preemptor, "gpu0", 8 * GIB))
    assert [d.why for d in due(world, late, POLICY, None)] == ["kill"]


def test_a_watch_goes_on_while_the_leader_keeps_looking() -> None:
    watch = extend_window(extend_window(None, NOW), Instant(NOW + GAP_SECONDS))
    assert watch == ObservationWindow(since=NOW, last=Instant(NOW + GAP_SECONDS))


def test_pledge_with_late_victims_is_dissolved_and_frees_them_for_all() -> None:
    preemptor = a_task("high", gpu_mb=8 * GIB)
    victim = stopping(freeing_for="high", stop_deadline_at=Instant(NOW + 1000.0))
    pledge = a_pledge(preemptor, "gpu0", 8 * GIB, deadline_at=NOW)
    other = stopping("other", freeing_for="someone", stop_deadline_at=Instant(NOW + 1000.0))
    world = a_world(preemptor, victim, pledge, other)
    now = Instant(NOW + POLICY.pledge_patience_seconds)
    assert due(world, Instant(now - 0.1), POLICY, watched(now)) == []
    (decision,) = due(world, now, POLICY, watched(now))
    assert [written.end for written in decision.pledges] == [PledgeEnd.DISSOLVED]
    assert [(w.task.id, w.task.state, w.task.freeing_for) for w in decision.tasks] == [
        ("run", TaskState.STOPPING, None)
    ]
    commit(world, decision)
    assert world.pledges == {}
    assert world.tasks[TaskId("other")].freeing_for == "someone"


def test_what_one_victim_has_freed_stays_pledged_when_another_is_given_up() -> None:
    preemptor = a_task("high", gpu_mb=16 * GIB)
    first = stopping("first", freeing_for="high")
    second = stopping("second", freeing_for="high", stop_deadline_at=Instant(NOW + 100.0))
    pledge = a_pledge(preemptor, "gpu0", 16 * GIB, deadline_at=Instant(NOW + 100.0))
    world = a_world(preemptor, first, second, pledge)
    now = Instant(NOW + POLICY.kill_patience_seconds)
    decisions = due(world, now, POLICY, watched(now))
    assert [(d.subject, d.why) for d in decisions] == [("first", "unconfirmed")]
    commit(world, decisions)
    assert [*world.pledges] == ["high"]
    assert world.tasks[TaskId("first")].state is TaskState.PENDING
    assert world.tasks[TaskId("second")].freeing_for == "high"


def after_its_end(ending: Ending = Ending.SUCCEEDED, **task: Any) -> World:
    """`run` held all of gpu0 and ended at NOW; its process is not confirmed gone."""
    run = holding(a_task("run", gpu_mb=80 * GIB, **task), "gpu0")
    world = a_world(a_device(), a_device("gpu1"), run)
    commit(world, apply_reports(world, [Ended(TaskId("run"), Fence(1), NOW, ending)], NOW, POLICY), NOW)
    return world


def lease_states(world: World) -> list[LeaseState]:
    return [lease.state for claim in world.leases.values() for lease in claim.values()]


def look(world: World, now: float) -> list[str]:
    """What a leader that never slept does at its next look, carried out."""
    decisions = due(world, Instant(now), POLICY, watched(now))
    commit(world, decisions, now)
    return [decision.why for decision in decisions]


@pytest.mark.parametrize(
    ("ending", "max_retries"), [(Ending.SUCCEEDED, 0), (Ending.FAILED, 0), (Ending.FAILED, 1)]
)
def test_memory_of_an_ended_run_not_confirmed_gone_is_quarantined(ending: Ending, max_retries: int) -> None:
    world = after_its_end(ending, max_retries=max_retries)
    assert look(world, NOW + POLICY.kill_patience_seconds - 0.1) == []
    assert look(world, NOW + POLICY.kill_patience_seconds) == ["unconfirmed"]
    assert lease_states(world) == [LeaseState.QUARANTINED]
    assert look(world, NOW + 3600.0) == []


def test_quarantined_memory_comes_back_with_proof_that_its_process_is_gone() -> None:
    world = after_its_end()
    look(world, NOW + POLICY.kill_patience_seconds)
    gone = Gone(TaskId("run"), Fence(1), Instant(NOW + 60.0), Proof.PROCESS_ABSENT)
    commit(world, apply_reports(world, [gone], gone.at, POLICY))
    assert (lease_states(world), world.tasks) == ([], {})


def test_a_run_confirmed_gone_in_time_is_not_quarantined() -> None:
    world = after_its_end(Ending.FAILED, max_retries=1)
    gone = Gone(TaskId("run"), Fence(1), Instant(NOW + 1.0), Proof.PROCESS_ABSENT)
    commit(world, apply_reports(world, [gone], gone.at, POLICY))
    assert look(world, NOW + 3600.0) == []


def test_a_run_under_notice_that_has_ended_is_given_up_at_its_own_deadline() -> None:
    world = a_world(stopping(stop_deadline_at=Instant(NOW + 100.0)))
    ended = Ended(TaskId("run"), Fence(1), NOW, Ending.STOPPED)
    commit(world, apply_reports(world, [ended], NOW, POLICY), NOW)
    assert look(world, NOW + POLICY.kill_patience_seconds) == []
    assert look(world, NOW + 100.0 + POLICY.kill_patience_seconds) == ["unconfirmed"]


def test_a_new_leader_gives_a_run_that_ended_the_whole_patience_again() -> None:
    over = a_task("over", gpu_mb=8 * GIB, fence=1, state=TaskState.SUCCEEDED)
    world = a_world(a_device(), over, a_lease(over, "gpu0", 8 * GIB, state=LeaseState.RELEASING))
    later = Instant(NOW + 3600.0)
    assert due(world, later, POLICY, None) == []
    almost = Instant(later + POLICY.kill_patience_seconds - 0.1)
    assert due(world, almost, POLICY, ObservationWindow(since=later, last=almost)) == []
    after = Instant(later + POLICY.kill_patience_seconds)
    assert [d.why for d in due(world, after, POLICY, ObservationWindow(since=later, last=almost))] == [
        "unconfirmed"
    ]


def test_memory_of_an_earlier_attempt_is_quarantined_beside_the_next_one() -> None:
    world = a_world(
        a_device(),
        holding(a_task("run", gpu_mb=8 * GIB), "gpu0", fence=2),
        a_lease(a_task("run", fence=1), "gpu0", 8 * GIB, state=LeaseState.RELEASING),
    )
    assert look(world, NOW + POLICY.kill_patience_seconds) == ["unconfirmed"]
    assert sorted(lease_states(world)) == [LeaseState.HELD, LeaseState.QUARANTINED]


def test_victim_that_ended_and_stays_is_given_up_and_its_preemptor_waits() -> None:
    world = a_world(holding(a_task("low", priority=10, gpu_mb=80 * GIB, grace_seconds=900.0), "gpu0"))
    submit(world, a_task("high", priority=80, gpu_mb=80 * GIB))
    commit(world, plan_cycle(world, POLICY, NOW).decisions, NOW)
    done = Ended(TaskId("low"), Fence(1), NOW, Ending.SUCCEEDED)
    commit(world, apply_reports(world, [done], NOW, POLICY), NOW)
    assert look(world, NOW + POLICY.kill_patience_seconds) == ["unconfirmed"]
    assert [*world.pledges] == ["high"]


def test_a_process_that_stays_after_its_runs_end_blocks_no_task_for_ever() -> None:
    world = after_its_end()
    low = holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu1")
    world.add_task(low.task)
    world.add_lease(low.leases[0])
    submit(world, a_task("high", priority=95, gpu_mb=60 * GIB))
    assert plan_cycle(world, POLICY, NOW).decisions == ()
    later = Instant(NOW + POLICY.kill_patience_seconds)
    look(world, later)
    world.measure([a_sample("gpu0", later), a_sample("gpu1", later)])
    (decision,) = plan_cycle(world, POLICY, later).decisions
    assert (decision.why, [write.task.id for write in decision.tasks]) == ("preempt", ["low"])
    assert [written.pledge.device for written in decision.pledges] == [key("gpu1")]
