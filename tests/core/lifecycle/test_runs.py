"""What the reports of agents do to tasks and leases."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    Failure,
    ForgetOrder,
    Gone,
    Progressed,
    Report,
    Sampled,
    Started,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_lease,
    a_pledge,
    a_task,
    a_world,
    commit,
    holding,
)

POLICY = Policy()
RUN = TaskId("run")


def started(fence: int = 1, at: float = NOW - 3.0) -> Started:
    return Started(RUN, Fence(fence), Instant(at), pid=7)


def checkpointed(sequence: int, fence: int = 1, at: float = NOW - 2.0) -> Checkpointed:
    return Checkpointed(RUN, Fence(fence), Instant(at), sequence, "digest", b"state", None)


def ended(ending: Ending, fence: int = 1, at: float = NOW - 1.0, **fields: Any) -> Ended:
    return Ended(RUN, Fence(fence), Instant(at), ending, **fields)


def gone(fence: int = 1, proof: Proof = Proof.PROCESS_ABSENT) -> Gone:
    return Gone(RUN, Fence(fence), NOW, proof)


def a_run(state: TaskState = TaskState.RUNNING, **fields: Any) -> Holding:
    """Task `run` on gpu0 of n1; a run that is only admitted has its memory reserved."""
    task_fields = {k: fields.pop(k) for k in ("max_retries", "timeout_seconds") if k in fields}
    reserved = LeaseState.RESERVED if state is TaskState.ADMITTED else LeaseState.HELD
    task = a_task("run", gpu_mb=8 * GIB, **task_fields)
    return holding(task, "gpu0", state=state, **{"lease_state": reserved, **fields})


def a_stopping_run(reason: StopReason, **fields: Any) -> Holding:
    facts = {"stop_reason": reason, "stop_deadline_at": Instant(NOW + 9.0), "timeout_seconds": 60.0, **fields}
    return a_run(TaskState.STOPPING, **facts)


def tell(world: World, *reports: Report) -> list[Decision]:
    """React to one batch and make the decisions true."""
    decisions = apply_reports(world, reports, NOW, POLICY)
    commit(world, decisions)
    return decisions


def task_of(decisions: list[Decision]) -> Task:
    (write,) = [write for decision in decisions for write in decision.tasks]
    return write.task


def lease_states(world: World) -> list[LeaseState]:
    return [lease.state for claim in world.leases.values() for lease in claim.values()]


def test_a_start_makes_the_task_run_and_its_memory_held() -> None:
    world = a_world(a_run(TaskState.ADMITTED))
    decisions = tell(world, started())
    assert task_of(decisions).state is TaskState.RUNNING
    assert task_of(decisions).started_at == NOW - 3.0
    assert lease_states(world) == [LeaseState.HELD]


def test_a_start_says_when_the_agent_had_the_order() -> None:
    world = a_world(a_run(TaskState.ADMITTED))
    first = replace(started(), ordered_at=Instant(NOW - 3.5))
    assert task_of(tell(world, first)).ordered_at == NOW - 3.5


def test_task_whose_entrypoint_was_withdrawn_fails_despite_retries() -> None:
    world = a_world(a_run(TaskState.ADMITTED, max_retries=3))
    withdrawn = ended(Ending.FAILED, failure=Failure("entrypoint_not_allowed", "ask"))
    (decision,) = tell(world, withdrawn, gone(proof=Proof.NEVER_STARTED))
    assert decision.tasks[0].task.state is TaskState.FAILED
    assert decision.tasks[0].task.max_retries == 3
    assert lease_states(world) == []


def test_a_repeated_start_writes_nothing() -> None:
    assert tell(a_world(a_run()), started()) == []


def test_start_overtaken_by_a_stop_only_says_that_the_memory_is_held() -> None:
    stopping = a_stopping_run(StopReason.CANCEL, started_at=None, lease_state=LeaseState.RESERVED)
    world = a_world(stopping)
    decisions = tell(world, started())
    assert [decision.tasks for decision in decisions] == [()]
    assert lease_states(world) == [LeaseState.HELD]


@pytest.mark.parametrize(("said", "written"), [(NOW - 5000.0, NOW - 100.0), (NOW + 5000.0, NOW)])
def test_wrong_agent_clock_moves_no_time_before_admission_or_after_now(said: float, written: float) -> None:
    decisions = tell(a_world(a_run(TaskState.ADMITTED)), started(at=said))
    assert task_of(decisions).started_at == written


def test_a_result_ends_the_task_at_once_and_its_memory_waits_for_the_proof() -> None:
    world = a_world(a_run())
    (decision,) = tell(world, ended(Ending.SUCCEEDED, result=b"42", log_tail=b"bye"))
    assert decision.tasks[0].task.state is TaskState.SUCCEEDED
    assert decision.tasks[0].task.finished_at == NOW - 1.0
    assert decision.outcome is not None
    assert (decision.outcome.result, decision.outcome.log_tail) == (b"42", b"bye")
    assert decision.orders == (ForgetOrder(RUN, Fence(1), NodeName("n1"), "n1-1"),)
    assert lease_states(world) == [LeaseState.RELEASING]
    tell(world, gone())
    assert lease_states(world) == []
    assert RUN not in world.tasks


def test_a_failure_with_a_retry_left_waits_for_its_next_try() -> None:
    world = a_world(a_run(max_retries=1, checkpoint_at=Instant(NOW - 50.0)))
    failure = Failure("exception", "boom")
    (decision,) = tell(world, ended(Ending.FAILED, failure=failure))
    task = decision.tasks[0].task
    assert (task.state, task.failures, task.not_before) == (TaskState.PENDING, 1, NOW + 1.0)
    assert (task.node, task.started_at, task.admitted_at) == (None, None, None)
    assert (task.fence, task.checkpoint_at) == (1, NOW - 50.0)
    assert decision.outcome is not None
    assert decision.outcome.failure == failure
    assert [type(order) for order in decision.orders] == [ForgetOrder]
    assert lease_states(world) == [LeaseState.RELEASING]


def test_a_failure_without_a_retry_left_is_the_end() -> None:
    decisions = tell(a_world(a_run(max_retries=1, failures=1)), ended(Ending.FAILED))
    assert (task_of(decisions).state, task_of(decisions).failures) == (TaskState.FAILED, 2)


@pytest.mark.parametrize(
    ("ending", "kind"),
    [(Ending.LOST, "killed"), (Ending.STOPPED, "stopped_unasked"), (Ending.FAILED, "killed")],
)
def test_an_unexplained_end_is_a_failure(ending: Ending, kind: str) -> None:
    (decision,) = tell(a_world(a_run()), ended(ending))
    assert decision.tasks[0].task.state is TaskState.FAILED
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert decision.outcome.failure.kind == kind


def test_an_order_that_was_refused_uses_up_no_retry_and_does_not_spin() -> None:
    world = a_world(a_run(TaskState.ADMITTED))
    decisions = tell(world, ended(Ending.NEVER_STARTED), gone(proof=Proof.NEVER_STARTED))
    task = task_of(decisions)
    assert (task.state, task.failures, task.not_before) == (TaskState.PENDING, 0, NOW + 1.0)
    assert lease_states(world) == []


def test_proof_alone_that_a_start_never_happened_is_enough() -> None:
    world = a_world(a_run(TaskState.ADMITTED))
    task = task_of(tell(world, gone(proof=Proof.NEVER_STARTED)))
    assert (task.state, task.failures) == (TaskState.PENDING, 0)


@pytest.mark.parametrize("proof", [Proof.BOOT_CHANGED, Proof.AGENT_RESTARTED])
def test_a_run_that_went_down_with_its_node_uses_up_no_retry(proof: Proof) -> None:
    task = task_of(tell(a_world(a_run()), gone(proof=proof)))
    assert (task.state, task.failures, task.not_before) == (TaskState.PENDING, 0, None)


def test_a_process_that_ends_without_a_report_counts_as_a_failure() -> None:
    world = a_world(a_run(max_retries=1))
    (decision,) = tell(world, gone())
    assert (decision.tasks[0].task.state, decision.tasks[0].task.failures) == (TaskState.PENDING, 1)
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert decision.outcome.failure.kind == "killed"
    assert lease_states(world) == []


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (StopReason.PREEMPT, TaskState.PENDING),
        (StopReason.CANCEL, TaskState.CANCELLED),
        (StopReason.TIMEOUT, TaskState.FAILED),
    ],
)
@pytest.mark.parametrize("ending", [Ending.STOPPED, Ending.FAILED, Ending.LOST])
def test_a_stopping_run_moves_on_when_it_is_proven_gone_and_not_before(
    reason: StopReason, state: TaskState, ending: Ending
) -> None:
    world = a_world(a_stopping_run(reason, max_retries=5))
    tell(world, ended(ending, log_tail=b"bye"))
    assert world.tasks[RUN].state is TaskState.STOPPING
    assert lease_states(world) == [LeaseState.RELEASING]
    task = task_of(tell(world, gone()))
    assert (task.state, task.failures) == (state, 0)
    assert lease_states(world) == []


def test_what_a_stopped_run_leaves_behind_is_kept() -> None:
    (decision,) = tell(a_world(a_stopping_run(StopReason.CANCEL)), ended(Ending.STOPPED, log_tail=b"bye"))
    assert decision.outcome is not None
    assert (decision.outcome.ending, decision.outcome.log_tail) == ("stopped", b"bye")
    assert [type(order) for order in decision.orders] == [ForgetOrder]


def test_a_run_past_its_limit_is_timed_out_whatever_it_reports() -> None:
    run = a_stopping_run(StopReason.TIMEOUT)
    (decision,) = tell(a_world(run), ended(Ending.FAILED, failure=Failure("exception", "interrupted")))
    assert decision.outcome is not None
    assert decision.outcome.failure == Failure("timeout", "the run passed its limit of 60 s")


def test_preempted_run_comes_back_with_its_checkpoint_and_all_its_retries() -> None:
    saved_at = Instant(NOW - 20.0)
    run = a_stopping_run(
        StopReason.PREEMPT, freeing_for=TaskId("high"), checkpoint_at=saved_at, preemptions=1
    )
    world = a_world(run)
    task = task_of(tell(world, gone()))
    assert (task.state, task.preemptions, task.failures) == (TaskState.PENDING, 2, 0)
    assert (task.checkpoint_at, task.freeing_for, task.stop_reason) == (saved_at, None, None)
    assert (task.stop_deadline_at, task.node, task.started_at) == (None, None, None)


def test_a_victims_proof_leaves_the_pledge_and_gives_it_the_bytes() -> None:
    high = a_task("high", gpu_mb=8 * GIB)
    pledge = a_pledge(high, "gpu0", 8 * GIB)
    world = a_world(a_stopping_run(StopReason.PREEMPT, freeing_for=high.id), high, pledge)
    (ledger,) = world.ledgers.values()
    assert ledger.reserved_free_mb(pledge) == 0
    tell(world, gone())
    assert ledger.reserved_free_mb(pledge) == 8 * GIB


def test_a_result_that_beats_the_stop_is_accepted() -> None:
    world = a_world(a_stopping_run(StopReason.PREEMPT, freeing_for=TaskId("high")))
    task = task_of(tell(world, ended(Ending.SUCCEEDED, result=b"1")))
    assert (task.state, task.freeing_for) == (TaskState.SUCCEEDED, "high")
    assert lease_states(world) == [LeaseState.RELEASING]


def test_after_a_result_and_its_proof_in_one_batch_freeing_for_is_cleared() -> None:
    world = a_world(a_stopping_run(StopReason.PREEMPT, freeing_for=TaskId("high")))
    (decision,) = tell(world, ended(Ending.SUCCEEDED), gone())
    assert decision.tasks[0].task.freeing_for is None
    assert "freeing_for" in decision.tasks[0].changed


def test_a_whole_life_in_one_batch_is_one_step_of_every_row() -> None:
    world = a_world(a_run(TaskState.ADMITTED))
    before = world.tasks[RUN]
    decisions = tell(world, started(), checkpointed(1), checkpointed(2), ended(Ending.SUCCEEDED), gone())
    (decision,) = decisions
    task = task_of(decisions)
    assert task.version == before.version + 1
    assert (task.state, task.started_at, task.checkpoint_at) == (TaskState.SUCCEEDED, NOW - 3.0, NOW - 2.0)
    assert [lease.state for lease in decision.leases] == [LeaseState.RELEASED]
    assert decision.checkpoint == checkpointed(2)


def test_only_the_newest_checkpoint_of_a_batch_is_kept() -> None:
    (decision,) = tell(a_world(a_run()), checkpointed(4), checkpointed(5), checkpointed(3))
    assert decision.checkpoint == checkpointed(5)
    assert decision.tasks[0].task.checkpoint_at == NOW - 2.0
    assert decision.tasks[0].task.state is TaskState.RUNNING


def test_a_checkpoint_of_a_stopping_run_is_kept() -> None:
    (decision,) = tell(a_world(a_stopping_run(StopReason.PREEMPT)), checkpointed(1), gone())
    assert decision.checkpoint == checkpointed(1)
    assert (decision.tasks[0].task.state, decision.tasks[0].task.checkpoint_at) == (
        TaskState.PENDING,
        NOW - 2.0,
    )


@pytest.mark.parametrize(
    "report", [started(fence=1), checkpointed(1), *(ended(ending) for ending in Ending), gone()]
)
def test_a_report_of_an_older_claim_changes_nothing_about_the_task(report: Report) -> None:
    world = a_world(a_run(fence=Fence(2)))
    assert tell(world, report) == []


def test_the_proof_of_an_older_claim_releases_that_claim_alone() -> None:
    run = a_run(fence=Fence(2))
    older = a_lease(a_task("run", fence=Fence(1)), "gpu0", 4 * GIB, state=LeaseState.RELEASING, version=3)
    world = a_world(run, older)
    (decision,) = tell(world, gone(fence=1))
    assert decision.tasks == ()
    assert [lease.key for lease in decision.leases] == [older.key]
    assert lease_states(world) == [LeaseState.HELD]


@pytest.mark.parametrize("report", [started(), checkpointed(1), *(ended(e) for e in Ending), gone()])
def test_a_report_about_an_unknown_task_changes_nothing(report: Report) -> None:
    assert tell(a_world(), report) == []


@pytest.mark.parametrize("report", [started(), checkpointed(1), *(ended(ending) for ending in Ending)])
def test_a_report_of_a_claim_that_was_given_up_changes_nothing(report: Report) -> None:
    """The node was lost: the task waits again under the fence of the claim that is gone."""
    waiting = a_task("run", fence=Fence(1))
    world = a_world(waiting, a_lease(waiting, "gpu0", 8 * GIB, state=LeaseState.QUARANTINED))
    assert tell(world, report) == []


def test_samples_and_progress_make_no_decision() -> None:
    progress = Progressed(RUN, Fence(1), NOW, 0.5, "half")
    assert tell(a_world(a_run()), progress, Sampled(NodeName("n1"), NOW, ())) == []


def test_reports_on_several_tasks_make_one_decision_each_in_their_order() -> None:
    other = holding(a_task("other", gpu_mb=8 * GIB), "gpu0")
    world = a_world(a_run(TaskState.ADMITTED), other)
    end = Ended(TaskId("other"), Fence(1), NOW, Ending.SUCCEEDED)
    decisions = tell(world, started(), end, checkpointed(1))
    assert [(d.subject, d.why, len(d.tasks)) for d in decisions] == [
        ("run", "checkpoint", 1),
        ("other", "ended", 1),
    ]


def test_a_refused_order_of_a_stopping_task_only_waits_for_its_proof() -> None:
    stopping = a_stopping_run(StopReason.CANCEL, started_at=None, lease_state=LeaseState.RESERVED)
    world = a_world(stopping)
    (decision,) = tell(world, ended(Ending.NEVER_STARTED))
    assert (decision.tasks, decision.outcome) == ((), None)
    assert task_of(tell(world, gone(proof=Proof.NEVER_STARTED))).state is TaskState.CANCELLED
