"""How long a task has been in each phase, from its row or from its events."""

from collections.abc import Mapping
from typing import Any

from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Position
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.phases import (
    Course,
    course_of_events,
    course_of_row,
    seconds_in_phases,
)

from tests.builders import NOW, a_task


def seconds(course: Course | None, until: float) -> list[float]:
    """In the queue, admitted, starting, running, stopping."""
    assert course is not None
    return list(seconds_in_phases(course, Instant(NOW + until)).values())


def an_event(what: str, state: str, at: float, **fields: float) -> Event:
    changes: Mapping[str, object] = {"state": state, **fields}
    return Event(Position(1), Instant(NOW + at), f"task.{what}", "t", 1, "default", changes)


SUBMITTED = an_event("submitted", "pending", 0.5, submitted_at=NOW)


def test_a_task_of_one_attempt_is_known_from_its_row() -> None:
    waits = a_task()
    assert seconds(course_of_row(waits), 5.0) == [5.0, 0.0, 0.0, 0.0, 0.0]
    starts = a_task(state=TaskState.ADMITTED, fence=Fence(1), admitted_at=NOW + 5.0)
    assert seconds(course_of_row(starts), 6.0) == [5.0, 1.0, 0.0, 0.0, 0.0]
    times: dict[str, Any] = {
        "fence": Fence(1),
        "admitted_at": NOW + 5.0,
        "ordered_at": NOW + 5.5,
        "started_at": NOW + 7.0,
    }
    assert seconds(course_of_row(a_task(state=TaskState.RUNNING, **times)), 10.0) == [5.0, 0.5, 1.5, 3.0, 0.0]
    done = a_task(state=TaskState.SUCCEEDED, finished_at=NOW + 9.0, **times)
    assert seconds(course_of_row(done), 99.0) == [5.0, 0.5, 1.5, 2.0, 0.0]


def test_run_without_its_order_time_was_starting_since_its_admission() -> None:
    """An agent of an earlier release does not tell that time."""
    times: dict[str, Any] = {"fence": Fence(1), "admitted_at": NOW + 5.0, "started_at": NOW + 7.0}
    assert seconds(course_of_row(a_task(state=TaskState.RUNNING, **times)), 8.0) == [5.0, 0.0, 2.0, 1.0, 0.0]


def test_a_model_is_starting_while_its_server_loads_it() -> None:
    events = [SUBMITTED, an_event("admitted", "admitted", 1.0, admitted_at=NOW + 1.0)]
    assert seconds(course_of_events(events, by_agent=False), 3.0) == [1.0, 0.0, 2.0, 0.0, 0.0]
    loads = a_task(holder=Model("models", "m"), state=TaskState.ADMITTED, fence=Fence(1), admitted_at=NOW)
    assert seconds(course_of_row(loads), 3.0) == [0.0, 0.0, 3.0, 0.0, 0.0]


def test_row_does_not_know_the_past_of_a_task_that_stopped_or_came_back() -> None:
    assert course_of_row(a_task(fence=Fence(2), admitted_at=NOW)) is None
    assert course_of_row(a_task(fence=Fence(1))) is None, "it waits again"
    stops = a_task(state=TaskState.STOPPING, fence=Fence(1), admitted_at=NOW, stop_reason=StopReason.CANCEL)
    assert course_of_row(stops) is None


def test_the_phases_of_all_attempts_add_up() -> None:
    course = course_of_events(
        [
            SUBMITTED,
            an_event("admitted", "admitted", 10.5, admitted_at=NOW + 10.0),
            an_event("started", "running", 12.5, started_at=NOW + 12.0, ordered_at=NOW + 10.5),
            an_event("stopping", "stopping", 20.0),
            an_event("requeued", "pending", 23.0),
            an_event("admitted", "admitted", 24.0, admitted_at=NOW + 24.0),
            an_event("started", "running", 25.0, started_at=NOW + 25.0),
            an_event("succeeded", "succeeded", 31.0, finished_at=NOW + 30.0),
        ]
    )
    assert seconds(course, 99.0) == [11.0, 0.5, 2.5, 13.0, 3.0]


def test_a_run_whose_start_and_end_came_together_was_starting_in_between() -> None:
    course = course_of_events(
        [
            SUBMITTED,
            an_event("admitted", "admitted", 1.0, admitted_at=NOW + 1.0),
            an_event(
                "succeeded",
                "succeeded",
                5.0,
                ordered_at=NOW + 2.0,
                started_at=NOW + 3.0,
                finished_at=NOW + 5.0,
            ),
        ]
    )
    assert seconds(course, 9.0) == [1.0, 1.0, 1.0, 2.0, 0.0]


def test_clocks_that_disagree_make_no_negative_phase() -> None:
    course = course_of_events([SUBMITTED, an_event("admitted", "admitted", 0.0, admitted_at=NOW - 1.0)])
    assert seconds(course, 1.0) == [0.0, 2.0, 0.0, 0.0, 0.0]


def test_a_log_that_does_not_go_back_to_the_submit_says_nothing() -> None:
    assert course_of_events([an_event("started", "running", 12.0)]) is None
    assert course_of_events([]) is None


def test_what_an_agent_does_not_start_is_starting_from_its_admission() -> None:
    course = course_of_events(
        [
            SUBMITTED,
            an_event("admitted", "admitted", 1.0, admitted_at=NOW + 1.0),
            an_event("started", "running", 4.0, started_at=NOW + 4.0),
        ],
        by_agent=False,
    )
    assert seconds(course, 5.0) == [1.0, 0.0, 3.0, 1.0, 0.0]
