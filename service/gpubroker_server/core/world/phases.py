"""How long a task has been in each phase, over all its attempts."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from gpubroker_server.core.domain.task import TERMINAL, Move, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.events import SUBMITTED, Event

Course = Sequence[tuple[TaskState, Instant]]
"""The states of a task, each with the time when it began."""

PHASES = (TaskState.PENDING, TaskState.ADMITTED, TaskState.RUNNING, TaskState.STOPPING)
STATE_EVENTS = tuple(f"task.{move}" for move in Move if move is not Move.CHANGED)

_BEGAN_AT = {
    TaskState.PENDING: "submitted_at",
    TaskState.ADMITTED: "admitted_at",
    TaskState.RUNNING: "started_at",
    **dict.fromkeys(TERMINAL, "finished_at"),
}


def course_of_row(task: Task) -> Course | None:
    """None if only the event log knows it: the task was asked to stop, or came back to the queue."""
    came_back = task.fence > 1 or (task.fence == 1 and task.admitted_at is None)
    if came_back or task.stop_reason is not None:
        return None
    times = (
        (TaskState.PENDING, task.submitted_at),
        (TaskState.ADMITTED, task.admitted_at),
        (TaskState.RUNNING, task.started_at),
        (task.state, task.finished_at),
    )
    return [(state, at) for state, at in times if at is not None]


def course_of_events(events: Iterable[Event]) -> Course | None:
    """`events`: those of one task whose kinds are in STATE_EVENTS, in order. None if its first is gone."""
    course: list[tuple[TaskState, Instant]] = []
    for event in events:
        if not course and event.kind != SUBMITTED:
            return None
        state = TaskState(event.fields["state"])
        at = event.fields.get(_BEGAN_AT.get(state, "")) or event.at
        course.append((state, Instant(at)))
    return course or None


def seconds_in_phases(course: Course, now: Instant) -> Mapping[TaskState, Seconds]:
    """All of PHASES; the present one counts until now."""
    seconds = dict.fromkeys(PHASES, Seconds(0.0))
    for (state, began), (_, ended) in pairwise([*course, (TaskState.PENDING, now)]):
        if state in seconds:
            seconds[state] = Seconds(seconds[state] + max(0.0, ended - began))
    return seconds
