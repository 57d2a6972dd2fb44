"""What becomes of a task whose run ends after a stop notice, for every reason to stop it."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.holders import MemberState
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, TaskId
from gpubroker_server.core.lifecycle.gang_runs import stop_ranks
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.lifecycle.stopping import give_notice
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_task, a_world, commit, holding
from tests.core.elastic import at_work, elastic
from tests.core.gangs import Agents, running, states

RUN = TaskId("run")
AFTER = {
    StopReason.PREEMPT: TaskState.PENDING,
    StopReason.MOVE: TaskState.PENDING,
    StopReason.RANK_LOST: TaskState.PENDING,
    StopReason.CANCEL: TaskState.CANCELLED,
    StopReason.TIMEOUT: TaskState.FAILED,
    StopReason.OVERUSE: TaskState.FAILED,
    StopReason.RANK_FAILED: TaskState.FAILED,
    StopReason.START_TIMEOUT: TaskState.FAILED,
    StopReason.DEADLINE: TaskState.EXPIRED,
}
"""The end of a task with no retry left. A drain, and a smaller worker set, stop with the reason `preempt`."""
OF_ONE_RUN = [reason for reason in AFTER if reason not in (StopReason.RANK_LOST, StopReason.RANK_FAILED)]
EXIT_0 = {"ending": Ending.SUCCEEDED, "result": b'{"exit_code":0}'}
ENDS: dict[str, dict[str, Any]] = {
    "stopped": {"ending": Ending.STOPPED},
    "exit code 0, as an earlier release reports it": {**EXIT_0, "is_unproven": True},
    "failed": {"ending": Ending.FAILED, "failure": Failure("exit_code", "7")},
}
each_end = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)


def test_every_reason_is_here() -> None:
    assert set(AFTER) == set(StopReason)


def under_notice(reason: StopReason, **fields: Any) -> World:
    facts = {"stop_reason": reason, "stop_deadline_at": Instant(NOW + 9.0), "failures": 3, **fields}
    task = a_task("run", gpu_mb=8 * GIB, timeout_seconds=60.0, deadline_at=Instant(NOW - 1.0))
    return a_world(holding(task, "gpu0", state=TaskState.STOPPING, **facts))


def told(world: World, *reports: Any) -> list[Decision]:
    decisions = apply_reports(world, reports, NOW, Policy())
    commit(world, decisions)
    return decisions


def ended(**fields: Any) -> Ended:
    return Ended(RUN, Fence(1), NOW, **fields)


GONE = Gone(RUN, Fence(1), NOW, Proof.PROCESS_ABSENT)


@each_end
@pytest.mark.parametrize("reason", OF_ONE_RUN)
def test_a_run_that_ends_after_the_notice_has_not_succeeded(reason: StopReason, end: dict[str, Any]) -> None:
    world = under_notice(reason)
    [decision] = told(world, ended(**end))
    assert world.tasks[RUN].state is TaskState.STOPPING, "until it is proven gone"
    assert decision.outcome is not None
    assert (decision.outcome.result, decision.outcome.ending == Ending.SUCCEEDED) == (None, False)
    [moved] = told(world, GONE)
    assert moved.tasks[0].task.state is AFTER[reason]


@pytest.mark.parametrize("reason", OF_ONE_RUN)
def test_a_proven_result_that_arrives_before_the_end_is_confirmed_counts(reason: StopReason) -> None:
    """Of a function, or of a command that has reported completion, or that had ended before the notice."""
    [decision] = told(under_notice(reason), ended(**EXIT_0))
    assert decision.tasks[0].task.state is TaskState.SUCCEEDED
    assert decision.outcome is not None
    assert decision.outcome.result == b'{"exit_code":0}'


def test_without_a_notice_exit_code_0_is_success_in_every_release() -> None:
    world = a_world(holding(a_task("run", gpu_mb=8 * GIB), "gpu0"))
    [decision] = told(world, ended(**EXIT_0, is_unproven=True))
    assert decision.tasks[0].task.state is TaskState.SUCCEEDED


def stopping_gang(reason: StopReason) -> Agents:
    gang = running(timeout_seconds=60.0)
    write, orders = give_notice(gang.world, gang.task, reason, gang.task.grace_seconds, gang.now)
    commit(gang.world, Decision(gang.id, reason, tasks=(write,), orders=tuple(orders)))
    return gang


@each_end
@pytest.mark.parametrize("reason", AFTER)
def test_a_gang_whose_ranks_end_after_the_notice_has_not_succeeded(
    reason: StopReason, end: dict[str, Any]
) -> None:
    gang = stopping_gang(reason)
    facts = {"failure": None, "is_unproven": False, **end}
    gang.tell(*(replace(gang.ended(rank), **{"result": None, **facts}) for rank in range(3)))
    assert gang.task.state is TaskState.STOPPING
    assert states(gang.task) == [MemberState.ENDED] * 3
    decisions = apply_reports(gang.world, [gang.gone(rank) for rank in range(3)], gang.now, gang.policy)
    [after] = [write.task.state for decision in decisions for write in decision.tasks]
    # A gang that was not ready in time is started again even without a retry.
    expected = TaskState.PENDING if reason is StopReason.START_TIMEOUT else AFTER[reason]
    assert after is expected


@each_end
def test_how_a_rank_that_leaves_an_elastic_gang_ends_does_not_count(end: dict[str, Any]) -> None:
    gang = at_work(elastic(3, 2))
    write, orders = stop_ranks(gang.world, gang.task, {2}, None, gang.now)
    commit(gang.world, Decision(gang.id, "shrink", tasks=(write,), orders=tuple(orders)))
    gang.tell(replace(gang.ended(2), **{"result": None, **end}), gang.gone(2))
    assert gang.task.state is TaskState.RUNNING
    assert states(gang.task)[2] is MemberState.LEFT
