"""The event log: of one task, and of everything that a token may see."""

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
"""20,000 events: what is farther back is not searched for the newest ones that a token may see."""


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
    """Read what happened to a task, oldest first: its states, its leases, the pledges made for it.

    With the id of an array or a worker set it has the events of all its workers.
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

    A page may be empty although more follows; read on from `next_after` until it stays the same.
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
    """Return the newest events that the token may see, read back from the head window by window, at most
    `MOST_WINDOWS`."""
    store = parts.records.store
    found: list[Event] = []
    end, oldest = head, await store.oldest()
    for _ in range(MOST_WINDOWS):
        start = Position(max(oldest - 1, end - WINDOW))
        inside = [event for event in await store.events(start, WINDOW) if event.position <= end]
        found = [event for event in inside if _may_see(call.identity, event)] + found
        end = start
        if len(found) >= last or end < oldest:
            break
    return found[-last:]


async def _newest_of(parts: Parts, tasks: Sequence[TaskId], last: int) -> list[Event]:
    found: deque[Event] = deque(maxlen=last)
    after = Position(0)
    while events := await parts.records.store.events(after, WINDOW, tasks):
        found.extend(events)
        after = events[-1].position
    return list(found)


def _may_see(identity: Identity, event: Event) -> bool:
    is_of_cluster = not event.tenant and task_of(event) is None
    return identity.may_see(event.tenant) or (is_of_cluster and identity.may(Scope.CLUSTER_READ))


async def _page(
    call: Call, parts: Parts, query: EventQuery, events: Sequence[Event], visible: Sequence[Event]
) -> EventPage:
    """Return a page of events. Raises Problem events-gone if events after the cursor are no longer kept, or
    the log does not go so far; 0 is not a cursor."""
    # Asked after the events were read, so that none was removed in between.
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
    """Return the tasks for which victims made room and which this token may not see."""
    named = {TaskId(task) for event in events if (task := event.fields.get("freeing_for"))}
    known = {task: await parts.records.store.record(task) for task in sorted(named)}
    return frozenset(
        task
        for task, record in known.items()
        if record is None or not call.identity.may_see(record.task.tenant)
    )


def _shown(event: Event, hidden: Container[str]) -> ShownEvent:
    fields = {
        name: None if name == "freeing_for" and value in hidden else _readable(name, value)
        for name, value in event.fields.items()
    }
    return ShownEvent(event.position, Time.at(event.at), event.kind, event.key, event.version, fields)


def _readable(name: str, value: Any) -> Any:
    """Rows have times as seconds, answers as RFC 3339. A rank's row ends with the task that it made room for,
    which may be another tenant's: it is left out."""
    if name == "members":
        return [row[:5] for row in value]
    is_time = name.endswith("_at") or name in {"since", "not_before"}
    return rfc3339(Instant(value)) if is_time and isinstance(value, int | float) else value
