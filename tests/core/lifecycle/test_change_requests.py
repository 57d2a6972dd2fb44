"""Cancel and change requests, carried out by the leader."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.lease import PledgeEnd
from gpubroker_server.core.domain.orders import StackOrder, StopOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Dependency, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.change_requests import STACK_SECONDS, carry_out
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, a_lease, a_pledge, a_task, a_world, commit, holding, orders_of_kind

LATER = Instant(NOW + 5.0)


def ask(world: World, what: str, task: str = "task", **fields: Any) -> Decision:
    """Carry out one request LATER and make it true."""
    request = Request("r1", TaskId(task), "default", what, fields, NOW)
    world.add_request(request)
    decision = carry_out(world, request, LATER, Policy())
    commit(world, decision)
    assert world.requests == {}
    return decision


def stopping(reason: StopReason, **fields: Any) -> World:
    victim = holding(
        a_task(gpu_mb=8 * GIB, priority=10),
        "gpu0",
        state=TaskState.STOPPING,
        stop_reason=reason,
        stop_deadline_at=Instant(NOW + 30.0),
        **fields,
    )
    return a_world(victim)


def the(world: World, task: str = "task") -> Task:
    return world.tasks[TaskId(task)]


def test_a_waiting_task_is_cancelled_at_once() -> None:
    world = a_world(a_task())
    decision = ask(world, "cancel")
    assert decision.tasks[0].task.state is TaskState.CANCELLED
    assert decision.tasks[0].task.finished_at == LATER
    assert decision.orders == ()


def test_cancelling_a_preemptor_gives_back_what_was_being_freed_for_it() -> None:
    preemptor = a_task(gpu_mb=8 * GIB)
    world = a_world(preemptor, a_pledge(preemptor, "gpu0", 8 * GIB))
    decision = ask(world, "cancel")
    assert [written.end for written in decision.pledges] == [PledgeEnd.WITHDRAWN]
    assert world.pledges == {}


@pytest.mark.parametrize("state", [TaskState.ADMITTED, TaskState.RUNNING])
def test_a_claimed_task_gets_notice_and_its_own_grace(state: TaskState) -> None:
    world = a_world(holding(a_task(gpu_mb=8 * GIB, grace_seconds=12.0), "gpu0", state=state))
    decision = ask(world, "cancel")
    task = the(world)
    assert (task.state, task.stop_reason) == (TaskState.STOPPING, StopReason.CANCEL)
    assert task.stop_deadline_at == LATER + 12.0
    assert decision.orders == (
        StopOrder(task.id, task.fence, NodeName("n1"), "n1-1", StopReason.CANCEL, Seconds(12.0)),
    )
    assert decision.leases == ()


def test_the_grace_of_a_cancel_wins_over_the_tasks_own() -> None:
    world = a_world(holding(a_task(), node="n1"), a_task("other"))
    decision = ask(world, "cancel", grace_seconds=0)
    assert the(world).stop_deadline_at == LATER
    assert [order.grace_seconds for order in orders_of_kind(decision, StopOrder)] == [0]


def test_preempted_run_that_is_cancelled_still_frees_for_its_preemptor() -> None:
    """It does not come back to the queue."""
    world = stopping(StopReason.PREEMPT, freeing_for=TaskId("high"))
    decision = ask(world, "cancel")
    task = the(world)
    assert (task.stop_reason, task.freeing_for) == (StopReason.CANCEL, "high")
    assert task.stop_deadline_at == NOW + 30.0
    assert decision.orders == ()


def test_a_second_cancel_may_shorten_the_grace() -> None:
    world = stopping(StopReason.CANCEL)
    decision = ask(world, "cancel", grace_seconds=1)
    assert the(world).stop_deadline_at == LATER + 1
    assert [order.grace_seconds for order in orders_of_kind(decision, StopOrder)] == [1]


def test_a_second_cancel_may_not_lengthen_the_grace() -> None:
    world = stopping(StopReason.CANCEL)
    decision = ask(world, "cancel", grace_seconds=600)
    assert (decision.tasks, decision.orders) == ((), ())
    assert the(world).stop_deadline_at == NOW + 30.0


def test_a_run_past_its_limit_stays_timed_out_when_it_is_cancelled() -> None:
    world = stopping(StopReason.TIMEOUT)
    assert ask(world, "cancel").tasks == ()
    assert the(world).stop_reason is StopReason.TIMEOUT


def test_a_request_about_an_unknown_task_is_settled_without_a_change() -> None:
    decision = ask(a_world(), "cancel", task="nobody")
    assert (decision.requests_done, decision.tasks, decision.orders) == (("r1",), (), ())


@pytest.mark.parametrize("what", ["cancel", "change"])
def test_a_request_that_comes_after_the_end_changes_nothing(what: str) -> None:
    done = a_task(state=TaskState.SUCCEEDED, fence=1)
    world = a_world(done, a_lease(done, "gpu0", 8 * GIB))
    assert ask(world, what, priority=99).tasks == ()
    assert the(world) == done


def test_a_request_of_an_unknown_kind_is_settled_without_a_change() -> None:
    world = a_world(a_task())
    assert ask(world, "promote").tasks == ()


def test_a_new_priority_moves_a_waiting_task_to_its_new_group() -> None:
    world = a_world(a_task(priority=20))
    ask(world, "change", priority=80)
    assert the(world).priority == 80
    assert [key[1] for key in world.queue.groups] == [80]


def test_a_running_task_takes_a_new_priority_but_no_hold() -> None:
    world = a_world(holding(a_task(priority=20, gpu_mb=8 * GIB), "gpu0"))
    ask(world, "change", priority=30, held=True)
    assert (the(world).priority, the(world).held, the(world).state) == (30, False, TaskState.RUNNING)


def test_a_new_time_limit_to_wait_counts_from_now_and_can_be_removed() -> None:
    world = a_world(a_task())
    ask(world, "change", queue_ttl_seconds=60.0)
    assert (the(world).queue_ttl_seconds, world.expiring) == (60.0, {"task": LATER + 60.0})
    ask(world, "change", not_before=LATER + 100.0, deadline_at=LATER + 120.0)
    assert (the(world).expires_at, world.expiring) == (LATER + 160.0, {"task": LATER + 120.0})
    assert world.queue.delayed == {"task": LATER + 100.0}
    ask(world, "change", queue_ttl_seconds=None, deadline_at=None, not_before=None)
    assert (the(world).expires_at, world.expiring, TaskId("task") in world.queue) == (None, {}, True)


def test_a_past_start_time_is_removed_and_an_unchanged_one_writes_nothing() -> None:
    world = a_world(a_task(not_before=Instant(LATER + 50.0)))
    ask(world, "change", not_before=NOW - 1.0)
    assert the(world).not_before is None
    assert ask(world, "change", not_before=None, deadline_at=None).tasks == ()


def test_wait_limit_of_a_dependent_begins_when_its_dependencies_end() -> None:
    world = a_world(a_task(awaits=True, after=(Dependency(TaskId("other")),)))
    ask(world, "change", queue_ttl_seconds=60.0)
    assert (the(world).queue_ttl_seconds, the(world).expires_at, world.expiring) == (60.0, None, {})


def test_a_delayed_task_gives_back_its_pledges() -> None:
    world = a_world(a_task("low", priority=10), a_task(priority=80, gpu_mb=8 * GIB))
    world.add_pledge(a_pledge(the(world), "gpu0", 8 * GIB))
    assert ask(world, "change", deadline_at=LATER + 60.0).pledges == ()
    assert [w.end for w in ask(world, "change", not_before=LATER + 50.0).pledges] == [PledgeEnd.WITHDRAWN]


def test_the_times_of_a_run_are_not_changed() -> None:
    world = a_world(holding(a_task(gpu_mb=8 * GIB), "gpu0"))
    assert ask(world, "change", deadline_at=LATER + 60.0, queue_ttl_seconds=5.0).tasks == ()


def test_a_held_task_stays_out_of_the_queue_until_it_is_released() -> None:
    world = a_world(a_task())
    ask(world, "change", held=True)
    assert world.queue.held == {"task"}
    ask(world, "change", held=False)
    assert world.queue.held == set()
    assert len(world.queue) == 1


@pytest.mark.parametrize("fields", [{"held": True}, {"priority": 10}])
def test_a_preemptor_that_is_held_or_lowered_gives_up_its_pledges(fields: dict[str, Any]) -> None:
    preemptor = a_task(gpu_mb=8 * GIB)
    world = a_world(preemptor, a_pledge(preemptor, "gpu0", 8 * GIB))
    decision = ask(world, "change", **fields)
    assert [written.end for written in decision.pledges] == [PledgeEnd.WITHDRAWN]


def test_a_preemptor_that_is_raised_keeps_its_pledges() -> None:
    preemptor = a_task(gpu_mb=8 * GIB)
    world = a_world(preemptor, a_pledge(preemptor, "gpu0", 8 * GIB))
    assert ask(world, "change", priority=90).pledges == ()


def test_a_change_to_the_current_value_writes_no_row() -> None:
    world = a_world(a_task(priority=50))
    assert ask(world, "change", priority=50, held=False).tasks == ()


def asked_for_stack(world: World, rank: int = 0, after_seconds: float = 0.0) -> Decision:
    request = Request("r1", TaskId("task"), "default", "stack", {"rank": rank}, NOW)
    return carry_out(world, request, Instant(NOW + after_seconds), Policy())


def test_a_stack_is_asked_of_the_agent_and_settled_by_its_answer() -> None:
    world = a_world(holding(a_task(gpu_mb=GIB), "gpu0"))
    decision = asked_for_stack(world)
    [order] = decision.orders
    assert isinstance(order, StackOrder)
    assert (order.node, order.incarnation, order.request, order.rank) == ("n1", "n1-1", "r1", 0)
    assert (decision.requests_done, decision.tasks) == ((), ())


def test_a_stack_that_nobody_can_read_is_settled_without_an_answer() -> None:
    waits, runs = a_world(a_task()), a_world(holding(a_task(gpu_mb=GIB), "gpu0"))
    for decision in (
        asked_for_stack(waits),
        asked_for_stack(runs, rank=1),
        asked_for_stack(runs, after_seconds=STACK_SECONDS + 1.0),
    ):
        assert (decision.requests_done, decision.orders) == (("r1",), ())
