"""The events of the log, and how a decision becomes events."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, field
from itertools import groupby

from gpubroker_server.core.domain.decisions import Decision, Fields, Request
from gpubroker_server.core.domain.errors import OutOfSync
from gpubroker_server.core.domain.estimates import SketchKey
from gpubroker_server.core.domain.lease import HOLDERS_OF_TASKS
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Position, TaskId
from gpubroker_server.core.domain.values import value
from gpubroker_server.core.world.event_codec import lease_change, row_fields, task_changes, task_fields

SUBMITTED = "task.submitted"
_FORM_OF_STANDING = 4
"""Of pauses and worker sets: a leader that does not know them would start what is paused, and scale
nothing."""
_FORM_OF_LATE_RANKS = 4
"""A reader that does not know them cannot read the members of a gang that has grown."""


@value
class Event:
    """One event of the log: what changed in which row, in commit order. Never a payload."""

    position: Position
    at: Instant
    kind: str
    """`task.admitted`, `lease.released`, `pledge.made`, `device.seen`, `node.seen`, `request.made`, ..."""
    key: str
    version: int
    tenant: str
    fields: Fields
    task: Task | None = field(default=None, compare=False, repr=False)
    """The task after the event, if this process wrote the event: it need not be decoded."""


def consecutive(events: Iterable[Event], position: Position) -> list[Event]:
    """The events after a position. Raises OutOfSync if one is missing."""
    fresh = [event for event in events if event.position > position]
    for expected, event in enumerate(fresh, start=position + 1):
        if event.position != expected:
            raise OutOfSync(
                f"after position {position}, event {event.position} came: {expected} is missing; "
                "read the World again from the rows"
            )
    return fresh


@value
class NewEvent:
    """An event without a position; the last statement before COMMIT numbers it."""

    kind: str
    key: str
    version: int
    tenant: str
    fields: Fields
    task: Task | None = field(default=None, compare=False, repr=False)
    reader: int = 1
    """The lowest reader form that may read on past this event. A new kind that changes the World, or a new
    meaning of a known field, gets a new number; an optional field does not."""

    def at(self, position: Position, at: Instant) -> Event:
        return Event(position, at, self.kind, self.key, self.version, self.tenant, self.fields, self.task)


def submitted(task: Task) -> NewEvent:
    """The first event of a task: all its fields."""
    return NewEvent(SUBMITTED, task.id, task.version, task.tenant, task_fields(task), task, _form_of(task))


def _form_of(task: Task) -> int:
    """A reader that does not know models or inferences would start them as runs."""
    if task.is_inference:
        return 3
    return 1 if task.model is None else 2


def requested(request: Request) -> NewEvent:
    return NewEvent("request.made", request.id, 1, request.tenant, row_fields(request))


def task_of(event: Event | NewEvent) -> TaskId | None:
    """The task that an event is about; None for nodes, devices and holders that are no tasks."""
    match event.kind.partition(".")[0]:
        case "task":
            return TaskId(event.key)
        case "pledge":
            return TaskId(event.fields["preemptor"])
        case "request":
            return TaskId(event.fields["task"])
        case "worker":
            return TaskId(event.key)
        case "lease":
            kind, holder, _rest = event.key.split(":", 2)
            return TaskId(holder) if kind in HOLDERS_OF_TASKS else None
    return None


def events_of(decision: Decision) -> Iterator[NewEvent]:
    """The events of a decision, in this order: nodes, devices, tasks, leases, pledges, requests,
    notices, worker sets, pauses, work streams, estimates."""
    for node in decision.nodes:
        yield NewEvent("node.seen", node.name, node.version, "", row_fields(node))
    for device in decision.devices:
        yield NewEvent("device.seen", device.key, device.version, "", row_fields(device))
    for write in decision.tasks:
        task = write.task
        form = _FORM_OF_LATE_RANKS if any(member.is_late for member in task.members) else 1
        fields = task_changes(write)
        yield NewEvent(f"task.{write.what}", task.id, task.version, task.tenant, fields, task, form)
    for lease in decision.leases:
        what, fields = lease_change(lease)
        yield NewEvent(f"lease.{what}", lease.key, lease.version, lease.tenant, fields)
    for written in decision.pledges:
        pledge, end = written.pledge, written.end
        what = "made" if end is None else str(end)
        yield NewEvent(f"pledge.{what}", pledge.key, 1, pledge.tenant, row_fields(pledge))
    for request in decision.requests_done:
        answer = {"answer": decision.answer} if decision.answer else {}
        yield NewEvent("request.done", request, 1, "", {"task": decision.subject, **answer})
    for notice in decision.notices:
        yield NewEvent(notice.kind, notice.key, 1, notice.tenant, notice.fields)
    for row in decision.worker_sets:
        workers, kind = row.workers, f"worker_set.{row.what}"
        fields = {name: getattr(workers, name) for name in row.changed}
        fields = asdict(workers) if row.what == "formed" else fields
        yield NewEvent(kind, workers.id, 1, workers.tenant, fields, reader=_FORM_OF_STANDING)
    for pauses, what in ((decision.paused, "paused"), (decision.resumed, "resumed")):
        for pause in pauses:
            fields = row_fields(pause)
            yield NewEvent(f"queue.{what}", pause.queue, 1, pause.tenant, fields, reader=_FORM_OF_STANDING)
    for stream in decision.streams:
        # Release 0.2.0 passes over it: it goes on with the weights of its settings.
        what = "removed" if stream.is_untold else "changed"
        yield NewEvent(f"stream.{what}", stream.name, 1, "", row_fields(stream))
    yield from _estimates("learned", ((lesson.topic, lesson.value) for lesson in decision.lessons))
    yield from _estimates("forgotten", ((topic, None) for topic in decision.forgotten))


def _estimates(what: str, topics: Iterable[tuple[SketchKey, float | None]]) -> Iterator[NewEvent]:
    """One event for what one run teaches. It holds values, never a sketch."""
    for (tenant, subject), group in groupby(topics, key=lambda pair: (pair[0].tenant, pair[0].subject)):
        values = [[topic.kind, topic.what.value, value] for topic, value in group]
        yield NewEvent(f"estimate.{what}", subject, 1, tenant, {"values": values})
