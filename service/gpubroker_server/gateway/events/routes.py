"""Routes that read the events of one task, and all events that a token may see: as pages, or as streams."""

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import Header, Query, Response
from gpubroker.wire.events import EventPage
from pydantic import Field

from gpubroker_server.core.domain.units import Position, TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.gateway.events.selection import KindQuery, LabelledTasks, Selection, hidden_tasks
from gpubroker_server.gateway.events.showing import shown
from gpubroker_server.gateway.events.stream import EVENT_STREAM, EventStream, EventStreamResponse, Followed
from gpubroker_server.gateway.parts import AppParts, Parts
from gpubroker_server.gateway.status.wholes import whole_of
from gpubroker_server.http.answering import JSON
from gpubroker_server.http.bodies import LABELS_PARAMETER, LabelQuery
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import Call, Resource, answer

resource = Resource("events")


WINDOW = 500
MAX_WINDOWS = 40
"""The largest number of windows, 20,000 events together, that are searched for the newest events that a token
may see."""

_STREAM = (
    "With `Accept: text/event-stream` the answer is a stream: the `id` of each message is the position of an "
    "event, `event` its kind, `data` the event. `Last-Event-ID` begins after that position."
)
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": _STREAM, "content": {EVENT_STREAM: {"schema": {"type": "string"}}}}
}
LastEventId = Annotated[
    int | None,
    Header(
        alias="Last-Event-ID",
        ge=0,
        le=2**63 - 1,
        description="The id of the last message of a stream that broke off. Goes before `after` and `last`; "
        "only for streams.",
    ),
]


class EventQuery(KindQuery):
    after: Annotated[int, Field(ge=0, le=2**63 - 1, description="`next_after` of the page before.")] = 0
    limit: Annotated[int, Field(ge=1, description="The most events of a page; not for streams.")] = 100
    last: Annotated[
        int | None,
        Field(
            ge=0,
            le=500,
            description="Instead of `after`: begin with so many of the newest; 0: with what is yet to come.",
        ),
    ] = None


class EventLogQuery(EventQuery, LabelQuery):
    task: Annotated[
        list[Annotated[str, Field(max_length=100)]],
        Field(
            default_factory=list,
            max_length=100,
            description="Only events of these tasks, arrays and worker sets; repeated or separated by "
            "commas.",
        ),
    ]
    tenant: Annotated[
        str | None,
        Field(
            max_length=100,
            description="Only events of this tenant; another one, or `*` for all, needs the scope `admin`.",
        ),
    ] = None


class EventRequest(NamedTuple):
    """The events that a request asks for."""

    call: Call
    parts: AppParts
    query: EventQuery
    selection: Selection
    labelled: LabelledTasks
    resumes_at: int | None = None
    """The id of the last message that the client of a stream has; None if it begins one."""

    @property
    def wants_stream(self) -> bool:
        """True if the request accepts a stream. Of a stream and JSON, the one that it names first counts:
        generated clients name all that the document lists, and cannot read a stream."""
        accepted = (self.call.header(b"accept") or "").lower().split(",")
        kinds = [kind.partition(";")[0].strip() for kind in accepted]
        return EVENT_STREAM in kinds and JSON not in kinds[: kinds.index(EVENT_STREAM)]

    async def of(self, events: Sequence[Event]) -> Sequence[Event]:
        return await self.labelled.of([event for event in events if self.selection.wants(event)])


@resource.route(
    "GET /tasks/{task_id}/events",
    "tasks_events",
    Scope.TASKS_READ,
    EventPage,
    "not-found events-gone event-streams-full validation-failed",
    responses=_STREAMED,
)
async def list_task_events(
    call: Call,
    parts: Parts,
    task_id: str,
    query: Annotated[EventQuery, Query()],
    last_event_id: LastEventId = None,
) -> Response:
    """Read the events of a task, oldest first: its states, its leases, and the pledges made for it.

    With the id of an array or a worker set, the answer has the events of all its workers. A stream ends with
    a message `end` when the task, or all workers, have ended.
    """
    record = await parts.records.find(call.identity, task_id)
    followed = Followed(record, await whole_of(parts.records.store, record))
    selection = Selection(call.identity, tuple(query.kind), followed.tasks)
    labelled = LabelledTasks(parts.records.store, {})
    return await _answer(EventRequest(call, parts, query, selection, labelled, last_event_id), followed)


@resource.route(
    "GET /events",
    "events_list",
    Scope.TASKS_READ,
    EventPage,
    "not-found events-gone event-streams-full validation-failed",
    responses=_STREAMED,
    openapi_extra={"parameters": [LABELS_PARAMETER]},
)
async def list_events(
    call: Call, parts: Parts, query: Annotated[EventLogQuery, Query()], last_event_id: LastEventId = None
) -> Response:
    """Read the log, oldest first: your tenant's events, and with `cluster:read` those of nodes and devices.

    A page may be empty although more events follow; read on from `next_after` until its value no longer
    changes. A stream goes on until the client closes it.
    """
    tenant = None if query.tenant is None else call.identity.whose(query.tenant, "events")
    tasks = None if not query.task else await _tasks_named(call, parts, query.task)
    selection = Selection(call.identity, tuple(query.kind), tasks, tenant)
    labelled = LabelledTasks(parts.records.store, query.labels)
    return await _answer(EventRequest(call, parts, query, selection, labelled, last_event_id))


async def _tasks_named(call: Call, parts: AppParts, named: Sequence[str]) -> tuple[TaskId, ...]:
    """Return the tasks that these ids name, with all workers of arrays and worker sets. Raises Problem
    not-found."""
    tasks: dict[TaskId, None] = {}
    for task_id in named:
        record = await parts.records.find(call.identity, task_id)
        whole = await whole_of(parts.records.store, record)
        tasks |= dict.fromkeys((record.task.id,) if whole is None else whole.workers)
    return tuple(tasks)


async def _answer(request: EventRequest, followed: Followed | None = None) -> Response:
    if request.wants_stream:
        return await _stream(request, followed)
    query, store = request.query, request.parts.records.store
    if query.last is not None:
        head = await store.head()
        newest = await _newest(request, query.last, head)
        return answer(await _page(request, newest, max(head, newest[-1].position if newest else head)))
    limit = min(query.limit, request.parts.records.page_items)
    events = await store.events(Position(query.after), limit, request.selection.tasks)
    page = await _page(request, await request.of(events), events[-1].position if events else query.after)
    # The oldest position was read after the events, so that a removal between the two reads is noticed.
    _check_kept(query.after, Position(page.oldest))
    if not events:
        _check_reached(query.after, await store.head())
    return answer(page)


async def _stream(request: EventRequest, followed: Followed | None) -> EventStreamResponse:
    """Return a stream, from the position that the client has reached, or else from where the query says.
    Raises Problem events-gone or event-streams-full."""
    call, parts, selection, store = (
        request.call,
        request.parts,
        request.selection,
        request.parts.records.store,
    )
    newest: Sequence[Event] = ()
    start = Position(request.query.after if request.resumes_at is None else request.resumes_at)
    if request.resumes_at is None and request.query.last is not None:
        start = await store.head()
        newest = [one for one in await _newest(request, request.query.last, start) if one.position <= start]
    _check_kept(start, await store.oldest())
    _check_reached(start, await store.head())

    def wants(event: Event) -> bool:
        return selection.wants(event) or (followed is not None and event.kind.startswith("task."))

    tenants = None if selection.tasks is not None else selection.tenants
    subscription = parts.subscriptions.open(call.identity.name, wants, tasks=selection.tasks, tenants=tenants)
    secret = (call.header(b"authorization") or "").partition(" ")[2].strip()
    stream = EventStream(parts, selection, request.labelled, subscription, secret, followed)
    return EventStreamResponse(stream.text(newest, start), subscription)


async def _newest(request: EventRequest, last: int, head: Position) -> Sequence[Event]:
    """Return the newest `last` of the events that are asked for."""
    if not last:
        return ()
    tasks = request.selection.tasks
    return await (_newest_of_log(request, last, head) if tasks is None else _newest_of_tasks(request, last))


async def _newest_of_log(request: EventRequest, last: int, head: Position) -> Sequence[Event]:
    """Return the newest `last` events of the whole log that are asked for. The log is read backwards from its
    head in windows, of which there are at most `MAX_WINDOWS`."""
    store = request.parts.records.store
    found: list[Event] = []
    end, oldest = head, await store.oldest()
    for _ in range(MAX_WINDOWS):
        start = Position(max(oldest - 1, end - WINDOW))
        inside = [event for event in await store.events(start, WINDOW) if event.position <= end]
        found = [*await request.of(inside), *found]
        end = start
        if len(found) >= last or end < oldest:
            break
    return found[-last:]


async def _newest_of_tasks(request: EventRequest, last: int) -> Sequence[Event]:
    newest: deque[Event] = deque(maxlen=last)
    after = Position(0)
    while events := await request.parts.records.store.events(after, WINDOW, request.selection.tasks):
        newest.extend(await request.of(events))
        after = events[-1].position
    return list(newest)


async def _page(request: EventRequest, events: Sequence[Event], next_after: int) -> EventPage:
    store = request.parts.records.store
    hidden = await hidden_tasks(store, request.selection.identity, events)
    return EventPage(tuple(shown(event, hidden) for event in events), next_after, await store.oldest())


def _check_kept(after: int, oldest: Position) -> None:
    """Check that no event after a position has been removed. The value 0 stands for the beginning of the log
    and is always valid. Raises Problem events-gone."""
    if 0 < after < oldest - 1:
        headers = {"Oldest-Event-ID": str(oldest)}
        raise Problem("events-gone", headers=headers, last_gone=oldest - 1, oldest=oldest, after=after)


def _check_reached(after: int, head: Position) -> None:
    """Check that the log reaches a position. Raises Problem events-gone if it does not."""
    if after > head:
        raise Problem(
            "events-gone",
            f"`after` is {after} and the log is at {head}: the database was restored from a backup; "
            "read the present state (GET /tasks, GET /gpus), then read on without `after`",
        )
