"""Tasks that run after others, and times that are kept, on real Ray, as their users see them."""

from datetime import datetime
from pathlib import Path
from typing import Any

from gpubroker import Broker, Task

from tests.e2e.service_process import until
from tests.patience import PATIENCE_SECONDS


def ended(broker: Broker, task: Task) -> Task:
    return broker.wait(task, timeout_seconds=PATIENCE_SECONDS)


def started_at(task: Task) -> datetime:
    assert task.started_at is not None
    return task.started_at


def finished_at(task: Task) -> datetime:
    assert task.finished_at is not None
    return task.finished_at


def test_failing_branch_of_a_diamond_fails_only_the_tasks_that_need_it(
    broker: Broker, tmp_path: Path
) -> None:
    """prepare -> (left, right), of which right fails -> join needs both, report and tidy only their ends."""
    witness, go = tmp_path / "witness", tmp_path / "go"
    prepare = broker.submit("tests.e2e.work:hold", str(witness), str(go), name="prepare")
    left = broker.submit("tests.e2e.work:add", 1, 2, after=[prepare])
    right = broker.submit("tests.e2e.work:fail", "no luck", after=[prepare])
    join = broker.submit("tests.e2e.work:add", 3, 4, after=[left, right])
    report = broker.submit("tests.e2e.work:add", 5, 6, after=[join])
    either = [{"task": left.id, "on_failure": "ignore"}, {"task": right.id, "on_failure": "ignore"}]
    tidy = broker.submit("tests.e2e.work:add", 7, 8, after=either, priority="critical")
    until(witness.exists, "the first one runs")
    assert [task.id for task in broker.list(after=prepare)] == [right.id, left.id]
    waits = broker.get(left).pending
    assert waits is not None
    assert waits.reason == "DependencyPending"
    assert waits.inherits is not None
    assert (waits.inherits.priority, waits.inherits.task) == (tidy.priority, tidy.id)
    go.touch()
    assert broker.result(tidy, timeout_seconds=PATIENCE_SECONDS) == 15
    assert [ended(broker, task).state for task in (left, right)] == ["succeeded", "failed"]
    for task, names in ((join, f"{right.id}, which has failed"), (report, f"{right.id} did not succeed")):
        lost = ended(broker, task)
        assert (lost.state, lost.attempt, lost.failed_by) == ("failed", 0, right.id)
        assert lost.error is not None
        assert names in lost.error.message
    done = {task.id: broker.get(task) for task in (prepare, left, right, tidy)}
    assert finished_at(done[prepare.id]) <= min(started_at(done[left.id]), started_at(done[right.id]))
    assert started_at(done[tidy.id]) >= max(finished_at(done[left.id]), finished_at(done[right.id]))


def test_run_at_its_deadline_hears_the_notice_and_expires_when_it_is_gone(
    broker: Broker, tmp_path: Path
) -> None:
    witness = tmp_path / "witness"
    task = broker.submit(
        "tests.e2e.work:hear",
        str(witness),
        deadline_seconds=4,
        grace_seconds=30,
        gpu_mb=1024,
        max_retries=3,
    )
    late = ended(broker, task)
    assert (late.state, late.attempt, late.raw["stop_reason"]) == ("expired", 1, "deadline")
    assert witness.read_text(encoding="utf-8").splitlines() == ["began", "heard"]
    assert late.deadline_at is not None
    assert finished_at(late) >= late.deadline_at
    until(lambda: all(gpu.leased_mb == 0 for gpu in broker.gpus()), "its memory is free again")


def test_a_task_that_is_not_started_within_its_time_to_wait_expires(broker: Broker, tmp_path: Path) -> None:
    go = tmp_path / "go"
    holder = broker.submit("tests.e2e.work:hold", str(tmp_path / "witness"), str(go), gpus=2)
    impatient = broker.submit("tests.e2e.work:add", 1, 2, gpu_mb=1024, queue_ttl_seconds=1)
    patient = broker.submit("tests.e2e.work:add", 3, 4, gpu_mb=1024, queue_ttl_seconds=1)
    patient = broker.change(patient, queue_ttl_seconds=None)
    late = ended(broker, impatient)
    assert (late.state, late.attempt) == ("expired", 0)
    assert late.error is not None
    assert "within its time limit to wait of 1 s" in late.error.message
    assert broker.get(patient).state == "pending"
    go.touch()
    assert broker.result(patient, timeout_seconds=PATIENCE_SECONDS) == 7
    assert ended(broker, holder).state == "succeeded"


def test_frozen_run_is_ended_at_its_limit_and_gives_its_memory_back(broker: Broker, tmp_path: Path) -> None:
    go = tmp_path / "go"
    limits: dict[str, Any] = {"timeout_seconds": 3, "grace_seconds": 0.2}
    task = broker.submit("tests.e2e.work:stand_still", str(go), gpu_mb=4096, **limits)
    until(lambda: broker.get(task).state == "running", "its beginning was heard of")
    go.touch()
    late = ended(broker, task)
    assert late.error is not None
    assert (late.state, late.error.kind) == ("failed", "timeout")
    until(lambda: not any(gpu.holders for gpu in broker.gpus()), "its memory is back")
    assert broker.quarantine().items == ()
