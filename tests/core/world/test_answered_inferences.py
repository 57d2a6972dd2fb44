"""What is counted of queued inferences: how they ended, and how long they waited first."""

from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant
from gpubroker_server.core.world.model_index import WAIT_BOUNDS, InferenceCounts, ModelIndex
from msgspec.structs import replace

from tests.builders import NOW, a_task
from tests.core.served import an_inference


def sent(task: Task, after_seconds: float) -> Task:
    started = Instant(NOW + after_seconds)
    return replace(task, state=TaskState.RUNNING, fence=Fence(task.fence + 1), started_at=started)


def test_an_inferences_wait_ends_at_its_first_send_and_is_counted_once() -> None:
    answered, task = InferenceCounts(), an_inference()
    running = sent(task, 0.3)
    back = replace(running, state=TaskState.PENDING)
    for before, after in ((task, running), (running, back), (back, sent(back, 100.0))):
        answered.note(before, after)
    below = [bound for bound in WAIT_BOUNDS if bound < 0.3]
    assert answered.waits() == (*[0] * len(below), *[1] * (len(WAIT_BOUNDS) + 1 - len(below)))
    assert round(answered.waited_seconds, 6) == 0.3
    assert not answered.ended


def test_an_inferences_wait_begins_when_it_may_be_sent() -> None:
    answered, task = InferenceCounts(), an_inference(not_before=Instant(NOW + 50.0))
    answered.note(task, sent(task, 60.0))
    assert answered.waited_seconds == 10.0


def test_ended_inferences_are_counted_by_state_and_other_tasks_are_not() -> None:
    answered, task = InferenceCounts(), an_inference()
    running = sent(task, 1.0)
    answered.note(running, replace(running, state=TaskState.FAILED))
    answered.note(task, replace(task, state=TaskState.CANCELLED))
    answered.note(a_task(), replace(a_task(), state=TaskState.CANCELLED))
    assert answered.ended == {TaskState.FAILED: 1, TaskState.CANCELLED: 1}
    assert answered.waits()[-1] == 0


def test_when_a_model_was_last_asked_is_known_of_the_last_names() -> None:
    models = ModelIndex()
    for number in range(1030):
        asked = a_task(f"ask{number}", answered_by=f"m{number}")
        models.note(sent(asked, number))
        models.note(
            replace(sent(asked, number), state=TaskState.SUCCEEDED, finished_at=Instant(NOW + number + 1))
        )
    assert models.answered_at("m0") == 0.0
    assert models.answered_at("m1029") == NOW + 1030
