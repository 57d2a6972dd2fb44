"""Workers of an array: places for items, which come back until no item is left."""

import pytest
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    Failure,
    Gone,
    ItemResult,
)
from gpubroker_server.core.domain.submission import (
    ARRAY_IMPORT_FAILED,
)
from gpubroker_server.core.domain.task import RetryOn, StopReason, TaskState
from gpubroker_server.core.domain.units import Fence, TaskId
from gpubroker_server.core.lifecycle.array_items import ArrayWork

from tests.builders import NOW, a_world
from tests.core.arrays import POLICY, Stage, a_worker, numbers_in, reported, result, terms


def test_workers_that_wait_are_cancelled_when_all_is_done() -> None:
    world = a_world(a_worker("w0"), a_worker("w1", TaskState.PENDING), a_worker("w2", TaskState.PENDING))
    stage = Stage(ArrayWork(terms(1), (), 0), world)
    stage.tell(reported("w0", 1, result(0)))
    assert set(world.tasks) == {"w0"}
    assert world.finished["default", TaskState.CANCELLED] == 2


@pytest.mark.parametrize("reason", [StopReason.PREEMPT, StopReason.TIMEOUT])
def test_a_worker_that_was_to_come_back_does_not_when_all_is_done(reason: StopReason) -> None:
    stage = Stage(ArrayWork(terms(1), (), 0))
    stage.stop("w1", reason)
    stage.tell(reported("w0", 1, result(0)))
    stage.tell(Gone(TaskId("w1"), Fence(1), NOW, Proof.PROCESS_ABSENT))
    assert {*stage.world.tasks} == {"w0", "w2"}
    assert stage.world.finished["default", TaskState.CANCELLED] == 1


def test_worker_preempted_after_the_last_result_does_not_come_back() -> None:
    """Each batch of reports looks at the arrays that are over."""
    stage = Stage(ArrayWork(terms(1), (), 0))
    stage.tell(reported("w0", 1, result(0)))
    stage.stop("w1", StopReason.PREEMPT)
    stage.tell(Gone(TaskId("w1"), Fence(1), NOW, Proof.PROCESS_ABSENT))
    assert stage.world.tasks[TaskId("w1")].state is TaskState.PENDING, "both in one batch"
    stage.tell()
    assert TaskId("w1") not in stage.world.tasks


def test_a_worker_that_cannot_import_is_not_tried_again() -> None:
    """Its retries are for crashes of items; it would fail as often."""
    stage = Stage(ArrayWork(terms(), (), 0))
    failures = {"w0": ARRAY_IMPORT_FAILED, "w1": "item_timeout"}
    ends = [
        Ended(TaskId(worker), Fence(1), NOW, Ending.FAILED, failure=Failure(kind, "no"))
        for worker, kind in failures.items()
    ]
    stage.tell(*ends)
    assert TaskId("w0") not in stage.world.tasks
    assert stage.world.tasks[TaskId("w1")].state is TaskState.PENDING


@pytest.mark.parametrize("how", ["stuck", "crash"])
def test_worker_whose_items_keep_ending_its_process_has_a_constant_wait(how: str) -> None:
    """It is a place for items, and has no number of tries of its own."""
    stage = Stage(ArrayWork(terms(25, chunk=1), (), 0))
    for fence in range(1, 60):
        if stage.work.left == 0:
            break
        at = {"fence": Fence(fence)}
        [answer] = stage.tell(reported("w0", 1, **at))
        if how == "stuck":
            [number] = numbers_in(answer.held)
            stuck = result(number, Failure("timeout", "the item took longer than 1 s"))
            stage.tell(reported("w0", 0, stuck, number=2, **at))
        stage.fail("w0", Failure("item_timeout", "it did not end") if how == "stuck" else None)
        task = stage.world.tasks[TaskId("w0")]
        assert task.state is TaskState.PENDING
        assert (task.failures, task.not_before) == (1, NOW + POLICY.retry_first_seconds)
        stage.start("w0")
    assert [line["number"] for line in stage.lines()] == list(range(25))
    assert {line["state"] for line in stage.lines()} == {"failed"}


def test_worker_that_crashes_before_taking_items_is_not_restarted_for_ever() -> None:
    stage = Stage(ArrayWork(terms(), (), 0))
    for _ in range(10):
        stage.fail("w0", None)
        stage.start("w0")
    stage.fail("w0", None)
    assert TaskId("w0") not in stage.world.tasks


def test_the_time_limit_of_a_run_costs_a_worker_nothing() -> None:
    """It may come from a profile, or from the most that a task may run. What the run held is done again."""
    stage = Stage(ArrayWork(terms(4, chunk=4), (), 0))
    [answer] = stage.tell(reported("w0", 1, result(0)))
    stage.stop("w0", StopReason.TIMEOUT)
    stage.tell(reported("w0", 0, result(1), number=2))
    stage.tell(Gone(TaskId("w0"), Fence(1), NOW, Proof.PROCESS_ABSENT))
    assert stage.world.tasks[TaskId("w0")].not_before == NOW + POLICY.retry_first_seconds
    stage.start("w0")
    [answer] = stage.tell(reported("w0", 1, fence=Fence(2)))
    assert (numbers_in(answer.held), stage.world.tasks[TaskId("w0")].failures) == ([2, 3], 0)


def test_an_item_that_hangs_through_each_time_limit_of_its_run_fails() -> None:
    stage = Stage(ArrayWork(terms(1), (), 0))
    for fence in (1, 2):
        stage.tell(reported("w0", 1, fence=Fence(fence)))
        stage.stop("w0", StopReason.TIMEOUT)
        stage.tell(Gone(TaskId("w0"), Fence(fence), NOW, Proof.PROCESS_ABSENT))
        stage.start("w0")
    stage.tell(reported("w0", 1, fence=Fence(3)))
    assert [line["error"]["kind"] for line in stage.lines()] == ["killed"]


def test_an_item_that_cannot_be_interrupted_is_tried_as_often_as_it_may_be() -> None:
    """Each try ends its run, and the next run counts from zero."""
    stage = Stage(ArrayWork(terms(2, chunk=2, item_retries=1), (), 0))
    stage.tell(reported("w0", 1))
    late = ItemResult(0, 3.0, 1, None, Failure("timeout", "the item took longer than 1 s"))
    stage.tell(reported("w0", 0, late, number=2))
    stage.tell(reported("w0", 0, late, number=2))
    assert stage.lines() == [], "also if the report comes twice"
    stage.fail("w0", Failure("item_timeout", "it did not end"))
    stage.start("w0")
    [answer] = stage.tell(reported("w0", 1, fence=Fence(2)))
    assert numbers_in(answer.held) == [0, 1]
    stage.tell(reported("w0", 0, late, number=2, fence=Fence(2)))
    assert [(line["number"], line["tries"], line["error"]["kind"]) for line in stage.lines()] == [
        (0, 2, "timeout")
    ]


@pytest.mark.parametrize(
    ("retry_on", "kind", "again"),
    [
        ((RetryOn.FAILURE,), "timeout", False),
        ((RetryOn.FAILURE,), "exception", True),
        ((RetryOn.TIMEOUT,), "timeout", True),
        ((RetryOn.TIMEOUT,), "exception", False),
    ],
)
def test_an_item_that_ended_its_run_is_tried_again_only_as_its_array_says(
    retry_on: tuple[RetryOn, ...], kind: str, again: bool
) -> None:
    stage = Stage(ArrayWork(terms(1, item_retries=1, retry_on=retry_on), (), 0))
    stage.tell(reported("w0", 1))
    stage.tell(reported("w0", 0, ItemResult(0, 3.0, 1, None, Failure(kind, "why")), number=2))
    assert [line["tries"] for line in stage.lines()] == ([] if again else [1])


@pytest.mark.parametrize(("retry_on", "crashes"), [((RetryOn.TIMEOUT,), 2), (tuple(RetryOn), 4)])
def test_a_crash_of_an_item_uses_a_retry_only_if_failures_do(
    retry_on: tuple[RetryOn, ...], crashes: int
) -> None:
    """After the first crash, which proves nothing."""
    stage = Stage(ArrayWork(terms(1, item_retries=2, retry_on=retry_on), (), 0))
    for fence in range(1, 10):
        stage.tell(reported("w0", 1, fence=Fence(fence)))
        if stage.lines():
            break
        stage.restart("w0", crashed=True)
    assert fence == crashes + 1


def test_an_item_that_crashes_its_process_is_found_and_fails_alone() -> None:
    """The others that its runs held are done."""
    stage = Stage(ArrayWork(terms(12, chunk=4, item_retries=1), (), 0))
    fence = 1
    for _ in range(40):
        task = stage.world.tasks[TaskId("w0")]
        held = numbers_in(stage.work.held_by(task))
        if 6 in held:
            stage.restart("w0", crashed=True)
            fence, held = fence + 1, []
        stage.tell(reported("w0", 4, *map(result, held), fence=Fence(fence)))
        if not stage.work.left:
            break
    lines = stage.lines()
    assert [line["number"] for line in lines] == list(range(12))
    assert [line["number"] for line in lines if line["state"] == "failed"] == [6]
    assert lines[6]["error"]["kind"] == "killed"
    assert lines[6]["tries"] == 3


def test_a_run_gets_nothing_beside_an_item_that_may_crash_it() -> None:
    stage = Stage(ArrayWork(terms(6, chunk=2), (), 0))
    stage.tell(reported("w0", 1))
    stage.restart("w0", crashed=True)
    [first] = stage.tell(reported("w0", 6, *map(result, range(2, 6)), fence=Fence(2)))
    assert numbers_in(first.held) == [0]
    [again] = stage.tell(reported("w0", 6, fence=Fence(2), number=2))
    assert again.held == first.held
    [other] = stage.tell(reported("w1", 6))
    assert numbers_in(other.held) == [1]
