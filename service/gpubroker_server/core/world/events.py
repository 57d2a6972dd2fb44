"""The events of the log, and how a decision becomes events."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, assert_never

from msgspec import Struct

from gpubroker_server.core.domain.decisions import Decision, Fields, Notice, Request, TaskWrite
from gpubroker_server.core.domain.device import Closure, Device, Node
from gpubroker_server.core.domain.errors import OutOfSync
from gpubroker_server.core.domain.estimates import SketchKey
from gpubroker_server.core.domain.holders import External, Gang, Inference, Model, Run, WorkerSeat
from gpubroker_server.core.domain.lease import HOLDERS_OF_TASKS, Lease, LeaseState
from gpubroker_server.core.domain.task import Task, members_of
from gpubroker_server.core.domain.units import Instant, Position, TaskId
from gpubroker_server.core.world.payload import Payload, fields_of, payload_of, released_members, without

SUBMITTED = "task.submitted"
_CORDON = ("cordon_reason", "cordoned_by", "cordoned_at", "draining_since", "drain_deadline_at")
_EVENTS_OF_THEIR_OWN = (*_CORDON, "environments")
"""The fields of a node that `node.seen` leaves out. Releases that do not know a field could not read it."""
"""The fields of a node that have an event of their own, because release 0.2.0 ignores an unknown event but
fails on an unknown field of a node."""
_CLOSURE = ("closure",)
"""The fields of a device that have an event of their own, because release 0.2.0 fails on an unknown field of
a device."""
_FORM_OF_STANDING = 4
"""The reader form of events about pauses and worker sets. A leader that does not know these events would
start paused tasks, and would not scale worker sets."""
_FORM_OF_LATE_RANKS = 4
"""The reader form of events about ranks that joined late. A reader that does not know such ranks cannot read
the members of a gang that has grown."""


class Event(Struct, frozen=True, eq=False):
    """One event of the log, in commit order: what changed in which row. It never holds a user's payload."""

    position: Position
    at: Instant
    kind: str
    """The subject and its change, for example `task.admitted`, `lease.released` or `node.seen`."""
    key: str
    version: int
    tenant: str
    payload: Payload
    task: Task | None = None
    """The task after the event, if this process wrote the event, so that it need not be decoded."""

    @property
    def fields(self) -> Fields:
        return fields_of(self.payload)

    def __eq__(self, other: object) -> bool:
        """Return True if both events record the same change. Their values are compared in decoded form, since
        only the process that wrote an event has the objects."""
        return isinstance(other, Event) and _facts(self) == _facts(other)

    def __hash__(self) -> int:
        return hash(self.position)


def _facts(event: Event) -> tuple[object, ...]:
    about = event.position, event.at, event.kind, event.key
    return *about, event.version, event.tenant, event.fields


def consecutive(events: Iterable[Event], position: Position) -> list[Event]:
    """Return the events after a position. Raises OutOfSync if one is missing."""
    fresh = [event for event in events if event.position > position]
    for expected, event in enumerate(fresh, start=position + 1):
        if event.position != expected:
            raise OutOfSync(
                f"after position {position}, event {event.position} came: {expected} is missing; "
                "read the World again from the rows"
            )
    return fresh


class NewEvent(Struct, frozen=True):
    """An event without a position. The last statement before COMMIT numbers it."""

    kind: str
    key: str
    version: int
    tenant: str
    payload: Payload
    task: Task | None = None
    reader: int = 1
    """The lowest reader form that may continue past this event. A new kind of event that changes the World,
    or a new meaning of a known field, gets a new number; an optional field does not."""

    @property
    def fields(self) -> Fields:
        return fields_of(self.payload)

    def at(self, position: Position, at: Instant) -> Event:
        return Event(position, at, self.kind, self.key, self.version, self.tenant, self.payload, self.task)


def submitted(task: Task) -> NewEvent:
    """Return the first event of a task, which has all its fields."""
    return NewEvent(SUBMITTED, task.id, task.version, task.tenant, payload_of(task), task, _form_of(task))


def _form_of(task: Task) -> int:
    """Return the reader form of a task's first event. A reader that does not know models or inferences would
    start them as runs."""
    match task.holder:
        case Run() | Gang() | WorkerSeat() | External():
            return 1
        case Model():
            return 2
        case Inference():
            return 3
        case _:
            assert_never(task.holder)


def requested(request: Request) -> NewEvent:
    return NewEvent("request.made", request.id, 1, request.tenant, request)


def task_of(event: Event | NewEvent) -> TaskId | None:
    """Return the task that an event is about; None for nodes, devices and holders that are no tasks."""
    match event.kind.partition(".")[0]:
        case "task":
            return TaskId(event.key)
        case "pledge":
            return TaskId(event.key.partition(":")[0])
        case "request":
            return TaskId(event.fields["task"])
        case "worker":
            return TaskId(event.key)
        case "lease":
            kind, holder, _rest = event.key.split(":", 2)
            return TaskId(holder) if kind in HOLDERS_OF_TASKS else None
    return None


def events_of(decision: Decision) -> Iterator[NewEvent]:
    """Yield the events of a decision, in this order: nodes, devices, tasks, leases, pledges, requests,
    notices, worker sets, pauses, work streams, estimates. Devices and tasks come before leases, because the
    World enters a lease into its device's ledger with its task's stop notice."""
    for node in decision.nodes:
        yield NewEvent("node.seen", node.name, node.version, "", without(node, _EVENTS_OF_THEIR_OWN))
    for device in decision.devices:
        yield NewEvent("device.seen", device.key, device.version, "", without(device, _CLOSURE))
    for write in decision.tasks:
        task = write.task
        form = _FORM_OF_LATE_RANKS if any(member.is_late for member in members_of(task)) else 1
        fields = _task_changes(write)
        yield NewEvent(f"task.{write.what}", task.id, task.version, task.tenant, fields, task, form)
    for lease in decision.leases:
        change, payload = lease_change(lease)
        yield NewEvent(f"lease.{change}", lease.key, lease.version, lease.tenant, payload)
    for written in decision.pledges:
        pledge, end = written.pledge, written.end
        change = "made" if end is None else str(end)
        yield NewEvent(f"pledge.{change}", pledge.key, 1, pledge.tenant, pledge)
    for request in decision.requests_done:
        answer = {"answer": decision.answer} if decision.answer else {}
        yield NewEvent("request.done", request, 1, "", {"task": decision.subject, **answer})
    for notice in decision.notices:
        yield NewEvent(notice.kind, notice.key, 1, notice.tenant, notice.fields)
    for row in decision.worker_sets:
        workers, kind = row.workers, f"worker_set.{row.what}"
        fields = {name: getattr(workers, name) for name in row.changed}
        payload = workers if row.what == "formed" else fields
        yield NewEvent(kind, workers.id, 1, workers.tenant, payload, reader=_FORM_OF_STANDING)
    for pauses, change in ((decision.paused, "paused"), (decision.resumed, "resumed")):
        for pause in pauses:
            yield NewEvent(f"queue.{change}", pause.queue, 1, pause.tenant, pause, reader=_FORM_OF_STANDING)
    for stream in decision.streams:
        # Release 0.2.0 ignores this event, and keeps the weights of its settings.
        change = "removed" if stream.is_untold else "changed"
        yield NewEvent(f"stream.{change}", stream.name, 1, "", stream)
    yield from _estimates("learned", ((lesson.topic, lesson.value) for lesson in decision.lessons))
    yield from _estimates("forgotten", ((topic, None) for topic in decision.forgotten))


def cordon_of(node: Node) -> Mapping[str, Any]:
    """Return the payload of a changed cordon."""
    return {name: getattr(node, name) for name in _CORDON}


def environments_notice(node: Node) -> Notice:
    """Return the notice that the environments of a node have changed."""
    return Notice("environments.changed", node.name, {"environments": node.environments})


class ClosureChange(Struct, frozen=True):
    """The fields that the World reads in an event about a GPU that was closed or reopened."""

    closure: Closure | None = None


def closure_notice(device: Device) -> Notice:
    """Return the notice that a GPU was closed or reopened, with its closure and its place."""
    what = "closed" if device.is_closed else "reopened"
    about = {"closure": device.closure, "node": device.node, "uuid": device.uuid, "index": device.index}
    return Notice(f"gpu.{what}", device.key, about)


def _task_changes(write: TaskWrite) -> dict[str, Any]:
    """Return the state and the changed hot fields."""
    payload: dict[str, Any] = {"state": write.task.state}
    for name in write.changed:
        payload[name] = getattr(write.task, name)
    match payload.pop("holder", None):
        case None:
            pass
        case Gang(members):
            payload["members"] = released_members(members)
        case holder:
            payload["model"] = holder
    return payload


def lease_change(lease: Lease) -> tuple[str, Payload]:
    """Return the change of a lease and its payload: all fields of a new lease, otherwise the changed ones."""
    if lease.version == 1:
        return lease.state.value, lease
    state = {"state": lease.state}
    if lease.state is LeaseState.HELD and lease.overused_mb:  # overuse is marked only while a lease is held
        return "overused", {**state, "mb": lease.mb, "overused_mb": lease.overused_mb}
    if lease.state is LeaseState.QUARANTINED:
        return lease.state.value, {**state, "quarantined_at": lease.quarantined_at}
    return lease.state.value, {**state, "proof": lease.proof} if lease.proof else state


def _estimates(change: str, topics: Iterable[tuple[SketchKey, float | None]]) -> Iterator[NewEvent]:
    """Yield one event per tenant and subject with what was learned. The event holds values, never a
    sketch."""
    for (tenant, subject), group in groupby(topics, key=lambda pair: (pair[0].tenant, pair[0].subject)):
        values = [[topic.kind, topic.what.value, value] for topic, value in group]
        yield NewEvent(f"estimate.{change}", subject, 1, tenant, {"values": values})
