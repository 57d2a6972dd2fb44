"""Routes that read the events of one task, and all events that a token may see."""

from collections import deque
from collections.abc import Container, Sequence
from typing import Annotated, Any

from fastapi import Query, Response
from gpubroker.wire.answered import Time
from gpubroker.wire.events import Event as ShownEvent
from gpubroker.wire.events import EventPage
from msgspec.structs import replace
from pydantic import Field

from gpubroker_server.core.domain.units import Instant, Position, TaskId
from gpubroker_server.core.world.events import Event, task_of
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.wholes import whole_of
from gpubroker_server.http.bodies import Query as QueryModel
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import Call, Resource, answer
from gpubroker_server.http.times import rfc3339

resource = Resource("events")


WINDOW = 500
MOST_WINDOWS = 40
"""The largest number of windows, 20,000 events together, that are searched for the newest events that a token
may see."""


class EventQuery(QueryModel):
    after: Annotated[int, Field(ge=0, le=2**63 - 1, description="`next_after` of the page before.")] = 0
    limit: Annotated[int, Field(ge=1)] = 100
    last: Annotated[
        int | None, Field(ge=1, le=500, description="Instead of `after`: begin with so many of the newest.")
    ] = None


@resource.route(
    "GET /tasks/{task_id}/events",
    "tasks_events",
    Scope.TASKS_READ,
    EventPage,
    "not-found events-gone validation-failed",
)
async def list_task_events(
    call: Call, parts: Parts, task_id: str, query: Annotated[EventQuery, Query()]
) -> Response:
    """Read the events of a task, oldest first: its states, its leases, and the pledges made for it.

    With the id of an array or a worker set, the answer has the events of all its workers.
    """
    record = await parts.records.find(call.identity, task_id)
    whole = await whole_of(parts.records.store, record)
    tasks = (record.task.id,) if whole is None else whole.workers
    if query.last is not None:
        newest = await _newest_of(parts, tasks, query.last)
        return answer(await _page(call, parts, query, newest, newest))
    events = await _read(parts, query, tasks)
    return answer(await _page(call, parts, query, events, events))


@resource.route("GET /events", "events_list", Scope.TASKS_READ, EventPage, "events-gone validation-failed")
async def list_events(call: Call, parts: Parts, query: Annotated[EventQuery, Query()]) -> Response:
    """Read the log, oldest first: your tenant's events, and with `cluster:read` those of nodes and devices.

    A page may be empty although more events follow; read on from `next_after` until its value no longer
    changes.
    """
    if query.last is not None:
        head = await parts.records.store.head()
        newest = await _newest(call, parts, query.last, head)
        page = await _page(call, parts, query, newest, newest)
        return answer(replace(page, next_after=head))
    events = await _read(parts, query)
    visible = [event for event in events if _may_see(call.identity, event)]
    return answer(await _page(call, parts, query, events, visible))


async def _read(parts: Parts, query: EventQuery, tasks: Sequence[TaskId] | None = None) -> Sequence[Event]:
    limit = min(query.limit, parts.records.page_items)
    return await parts.records.store.events(Position(query.after), limit, tasks)


async def _newest(call: Call, parts: Parts, last: int, head: Position) -> list[Event]:
    """Return the newest `last` events that the token may see. The log is read backwards from its head in
    windows, of which there are at most `MOST_WINDOWS`."""
    store = parts.records.store
    visible: list[Event] = []
    end, oldest = head, await store.oldest()
    for _ in range(MOST_WINDOWS):
        start = Position(max(oldest - 1, end - WINDOW))
        inside = [event for event in await store.events(start, WINDOW) if event.position <= end]
        visible = [event for event in inside if _may_see(call.identity, event)] + visible
        end = start
        if len(visible) >= last or end < oldest:
            break
    return visible[-last:]


async def _newest_of(parts: Parts, tasks: Sequence[TaskId], last: int) -> list[Event]:
    newest: deque[Event] = deque(maxlen=last)
    after = Position(0)
    while events := await parts.records.store.events(after, WINDOW, tasks):
        newest.extend(events)
        after = events[-1].position
    return list(newest)


def _may_see(identity: Identity, event: Event) -> bool:
    is_of_cluster = not event.tenant and task_of(event) is None
    return identity.may_see(event.tenant) or (is_of_cluster and identity.may(Scope.CLUSTER_READ))


async def _page(
    call: Call, parts: Parts, query: EventQuery, events: Sequence[Event], visible: Sequence[Event]
) -> EventPage:
    """Return the page with the `visible` ones among `events`. Raises Problem events-gone if events after
    `query.after` are no longer kept, or if the log ends before it. The value 0 stands for the beginning of
    the log and is always valid."""
    # The oldest position is read after the events, so that a removal between the two reads is noticed.
    store = parts.records.store
    oldest = await store.oldest()
    if 0 < query.after < oldest - 1:
        raise Problem("events-gone", last_gone=oldest - 1, after=query.after)
    if not events and query.after > (head := await store.head()):
        raise Problem(
            "events-gone",
            f"`after` is {query.after} and the log is at {head}: the database was restored from a backup; "
            "read the present state (GET /tasks, GET /gpus), then read on without `after`",
        )
    hidden = await _hidden_tasks(call, parts, visible)
    next_after = events[-1].position if events else query.after
    return EventPage(tuple(_shown(event, hidden) for event in visible), next_after, oldest)


async def _hidden_tasks(call: Call, parts: Parts, events: Sequence[Event]) -> frozenset[str]:
    """Return the tasks for which victims made room, as far as this token may not see them."""
    named = {TaskId(task) for event in events if (task := event.fields.get("freeing_for"))}
    records = {task: await parts.records.store.record(task) for task in sorted(named)}
    return frozenset(
        task
        for task, record in records.items()
        if record is None or not call.identity.may_see(record.task.tenant)
    )


def _shown(event: Event, hidden: Container[str]) -> ShownEvent:
    fields = {
        name: None if name == "freeing_for" and value in hidden else _readable(name, value)
        for name, value in event.fields.items()
    }
    return ShownEvent(event.position, Time.at(event.at), event.kind, event.key, event.version, fields)


def _readable(name: str, value: Any) -> Any:
    """Return the value of a field as answers show it. Times are seconds in rows, and RFC 3339 in answers. The
    last column of a rank is left out: it names the task for which the rank made room, which may belong to
    another tenant."""
    if name == "members":
        return [row[:5] for row in value]
    is_time = name.endswith("_at") or name in {"since", "not_before"}
    return rfc3339(Instant(value)) if is_time and isinstance(value, int | float) else value
