"""Which ends of a run use a retry."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import ON_FAILURE, RetryOn, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Seconds, TaskId
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.lifecycle.stopping import give_notice, will_requeue
from gpubroker_server.core.world.payload import encode, fields_of, read_task
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, a_task, a_world, commit, holding
from tests.core.gangs import running

RUN = TaskId("run")
FAILURE, TIMEOUT = ON_FAILURE, (RetryOn.TIMEOUT,)
BOTH = (RetryOn.FAILURE, RetryOn.TIMEOUT)
GONE = Gone(RUN, Fence(1), NOW, Proof.PROCESS_ABSENT)


def a_run(state: TaskState = TaskState.RUNNING, claim: dict[str, Any] | None = None, **fields: Any) -> World:
    facts = {"gpu_mb": 8 * GIB, "timeout_seconds": 60.0, "max_retries": 2, **fields}
    return a_world(holding(a_task("run", **facts), "gpu0", state=state, **(claim or {})))


def after(world: World, *reports: Any) -> Task:
    """The task as the reports leave it, with the proof that its run is gone."""
    decisions: list[Decision] = apply_reports(world, [*reports, GONE], NOW, Policy())
    commit(world, decisions)
    return decisions[0].tasks[0].task


def timed_out(**fields: Any) -> World:
    """Under the notice that its time limit gave it."""
    world = a_run(**fields)
    [decision] = due(world, NOW, Policy(), None)
    assert decision.tasks[0].task.stop_reason is StopReason.TIMEOUT
    commit(world, decision)
    return world


STOPPED = Ended(RUN, Fence(1), NOW, Ending.STOPPED)
FAILED = Ended(RUN, Fence(1), NOW, Ending.FAILED, failure=Failure("exception", "boom"))


@pytest.mark.parametrize(
    ("retry_on", "comes_back"), [(FAILURE, False), (TIMEOUT, True), (BOTH, True)], ids=str
)
def test_a_time_limit_uses_a_retry_only_if_it_is_named(
    retry_on: tuple[RetryOn, ...], comes_back: bool
) -> None:
    world = timed_out(retry_on=retry_on)
    assert will_requeue(world.tasks[RUN]) is comes_back
    task = after(world, STOPPED)
    assert task.state is (TaskState.PENDING if comes_back else TaskState.FAILED)
    assert (task.failures, task.not_before is not None) == (int(comes_back), comes_back)


@pytest.mark.parametrize(
    ("retry_on", "comes_back"), [(FAILURE, True), (TIMEOUT, False), (BOTH, True)], ids=str
)
def test_a_failure_uses_a_retry_only_if_it_is_named(retry_on: tuple[RetryOn, ...], comes_back: bool) -> None:
    task = after(a_run(retry_on=retry_on), FAILED)
    assert task.state is (TaskState.PENDING if comes_back else TaskState.FAILED)
    assert task.failures == 1


def test_both_use_the_same_retries_and_the_last_time_limit_is_the_end() -> None:
    world = timed_out(retry_on=BOTH, claim={"failures": 2})
    assert not will_requeue(world.tasks[RUN])
    assert after(world, STOPPED).state is TaskState.FAILED


def test_outcome_of_a_timed_out_run_that_is_retried_says_so() -> None:
    world = timed_out(retry_on=TIMEOUT)
    [decision] = apply_reports(world, [STOPPED, GONE], NOW, Policy())
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert decision.outcome.failure.kind == "timeout"


def test_a_run_that_is_given_up_past_its_time_limit_is_tried_again_too() -> None:
    world = timed_out(retry_on=TIMEOUT, grace_seconds=Seconds(1.0))
    since, later = Instant(NOW - 1000.0), Instant(NOW + 500.0)
    world.as_of = later
    [decision] = due(world, later, Policy(), ObservationWindow(since, Instant(later - 1.0)))
    assert decision.why == "unconfirmed"
    assert decision.tasks[0].task.state is TaskState.PENDING


@pytest.mark.parametrize("retry_on", [FAILURE, TIMEOUT])
def test_a_worker_of_an_array_comes_back_whatever_ended_it(retry_on: tuple[RetryOn, ...]) -> None:
    """Rows of earlier software say `failure` alone; its items have retries of their own."""
    array: dict[str, Any] = {"holder": WorkerSeat(TaskId("run")), "retry_on": retry_on}
    assert after(timed_out(**array), STOPPED).state is TaskState.PENDING
    assert after(a_run(**array), FAILED).state is TaskState.PENDING


@pytest.mark.parametrize(("retry_on", "state"), [(FAILURE, TaskState.FAILED), (BOTH, TaskState.PENDING)])
def test_the_time_limit_of_a_gang_uses_a_retry_only_if_it_is_named(
    retry_on: tuple[RetryOn, ...], state: TaskState
) -> None:
    gang = running(timeout_seconds=60.0, max_retries=1, retry_on=retry_on)
    write, orders = give_notice(gang.world, gang.task, StopReason.TIMEOUT, Seconds(9.0), gang.now)
    commit(gang.world, Decision(gang.id, "timeout", tasks=(write,), orders=tuple(orders)))
    ranks = range(3)
    ends = [gang.ended(rank, Ending.STOPPED) for rank in ranks]
    [decision] = apply_reports(gang.world, [*ends, *map(gang.gone, ranks)], gang.now, gang.policy)
    assert decision.tasks[0].task.state is state


def test_a_gang_that_was_not_ready_in_time_has_its_own_tries() -> None:
    gang = running(max_retries=0, retry_on=TIMEOUT)
    write, orders = give_notice(gang.world, gang.task, StopReason.START_TIMEOUT, Seconds(9.0), gang.now)
    commit(gang.world, Decision(gang.id, "late", tasks=(write,), orders=tuple(orders)))
    gang.tell(*(gang.gone(rank) for rank in range(3)))
    assert gang.task.state is TaskState.PENDING


@pytest.mark.parametrize("retry_on", [FAILURE, TIMEOUT, BOTH])
def test_the_first_event_of_a_task_says_it_where_it_differs(retry_on: tuple[RetryOn, ...]) -> None:
    task = a_task("run", retry_on=retry_on)
    said = fields_of(task).get("retry_on")
    assert said == (None if retry_on is FAILURE else [str(one) for one in retry_on])
    assert read_task(encode(task)) == task
