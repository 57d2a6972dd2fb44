"""The time that a task has spent in each phase, over all its attempts."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

from gpubroker_server.core.domain.holders import is_started_by_agent
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.events import SUBMITTED, Event


class Phase(StrEnum):
    QUEUED = "queued"
    ADMITTED = "admitted"
    """The task's memory is leased, and the node's agent is not known to have the order. The agent reports
    when it got the order only with the start of the process; until then all of the time counts here."""
    STARTING = "starting"
    """The agent has the order, and the run waits for a process, or the process imports and unpickles. A model
    that is being loaded, which no agent starts, is in this phase from its admission on."""
    RUNNING = "running"
    STOPPING = "stopping"


Course = Sequence[tuple[Phase | None, Instant]]
"""The phases of a task, each with the instant at which it began; None stands for the end of the task."""

STATE_EVENTS = tuple(f"task.{move}" for move in Move if move is not Move.CHANGED)

_PHASES = {
    TaskState.PENDING: Phase.QUEUED,
    TaskState.ADMITTED: Phase.ADMITTED,
    TaskState.RUNNING: Phase.RUNNING,
    TaskState.STOPPING: Phase.STOPPING,
}
_BEGAN_AT = {
    Phase.QUEUED: "submitted_at",
    Phase.ADMITTED: "admitted_at",
    Phase.RUNNING: "started_at",
    None: "finished_at",
}


def course_of_row(task: Task) -> Course | None:
    """Return the phases by the task's row; None if only the event log knows them, because the task was asked
    to stop or came back to the queue."""
    was_requeued = task.fence > 1 or (task.fence == 1 and task.admitted_at is None)
    if was_requeued or task.stop_reason is not None:
        return None
    course: list[tuple[Phase | None, Instant]] = [(Phase.QUEUED, task.submitted_at)]
    if task.admitted_at is not None:
        course.append(
            (Phase.ADMITTED if is_started_by_agent(task.holder) else Phase.STARTING, task.admitted_at)
        )
    if task.started_at is not None:
        _begin(course, task.started_at, task.ordered_at)
    return course if task.finished_at is None else [*course, (None, task.finished_at)]


def course_of_events(events: Iterable[Event], *, by_agent: bool = True) -> Course | None:
    """Return the phases by the events of one task whose kinds are in STATE_EVENTS, in order; None if its
    first event is gone. `by_agent` is True if a node agent starts the task."""
    course: list[tuple[Phase | None, Instant]] = []
    for event in events:
        if not course and event.kind != SUBMITTED:
            return None
        fields = event.fields
        phase = _PHASES.get(TaskState(fields["state"]))
        at = Instant(fields.get(_BEGAN_AT.get(phase, "")) or event.at)
        if (started_at := fields.get("started_at")) is not None:
            _begin(course, started_at, fields.get("ordered_at"))
        if phase is not Phase.RUNNING:
            course.append((Phase.STARTING if phase is Phase.ADMITTED and not by_agent else phase, at))
    return course or None


def _begin(course: list[tuple[Phase | None, Instant]], at: Instant, ordered_at: Instant | None) -> None:
    """Add the phases up to the start of the run. If it is not known when the agent had the order, the order
    counts as given at once."""
    phase, since = course[-1]
    if phase is Phase.ADMITTED:
        if ordered_at is None:
            course.pop()
        course.append((Phase.STARTING, since if ordered_at is None else ordered_at))
    course.append((Phase.RUNNING, at))


def seconds_in_phases(course: Course, now: Instant) -> Mapping[Phase, Seconds]:
    """Return the seconds in each phase; the present phase counts until now."""
    seconds = dict.fromkeys(Phase, Seconds(0.0))
    for (phase, began), (_, ended) in pairwise([*course, (None, now)]):
        if phase is not None:
            seconds[phase] = Seconds(seconds[phase] + max(0.0, ended - began))
    return seconds
