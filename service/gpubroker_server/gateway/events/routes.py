"""The event log: of one task, and of everything a token may see."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Response

from gpubroker_server.core.domain.units import Position, TaskId
from gpubroker_server.core.world.events import Event, task_of
from gpubroker_server.gateway.cluster.devices import sees
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.queries import EventQuery
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.records import find
from gpubroker_server.gateway.status.task_view import event_view
from gpubroker_server.gateway.status.views import EventPage

router = APIRouter(route_class=DirectRoute, tags=["events"])


@router.get(
    "/tasks/{task_id}/events",
    operation_id="tasks_events",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=EventPage,
    responses=problems("unauthenticated", "forbidden", "not-found", "events-gone", "validation-failed"),
)
async def list_task_events(call: Call, task_id: str, query: Annotated[EventQuery, Query()]) -> Response:
    """Read what happened to a task, oldest first: its states, its leases, the pledges made for it."""
    record = await find(call, task_id)
    limit = min(query.limit, call.parts.limits.page_items)
    events = await call.parts.store.events(Position(query.after), limit, record.task.id)
    return answer(await _page(call, events, events, query.after, await _oldest(call, query.after)))


@router.get(
    "/events",
    operation_id="events_list",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=EventPage,
    responses=problems("unauthenticated", "forbidden", "events-gone", "validation-failed"),
)
async def list_events(call: Call, query: Annotated[EventQuery, Query()]) -> Response:
    """Read the log, oldest first: your tenant's events, and with `cluster:read` those of nodes and devices.

    A page may be empty although more follows; go on from `next_after` until it no longer moves.
    """
    limit = min(query.limit, call.parts.limits.page_items)
    events = await call.parts.store.events(Position(query.after), limit)
    visible = [event for event in events if _sees(call.identity, event)]
    return answer(await _page(call, events, visible, query.after, await _oldest(call, query.after)))


def _sees(identity: Identity, event: Event) -> bool:
    if sees(identity, event.tenant):
        return True
    is_of_cluster = not event.tenant and task_of(event) is None
    return is_of_cluster and identity.may(Scope.CLUSTER_READ)


async def _oldest(call: Call, after: int) -> int:
    """Of the events that are kept; asked for when a page was read, so that none was taken out meanwhile.

    Raises Problem events-gone for a cursor behind which some are missing; 0 is none, but the beginning.
    """
    oldest = await call.parts.store.oldest()
    if 0 < after < oldest - 1:
        raise Problem(
            "events-gone",
            f"events up to position {oldest - 1} are no longer kept, and some of them came after {after}; "
            "read the present state (GET /tasks, GET /gpus), then go on without `after`",
        )
    return oldest


async def _page(
    call: Call, read: Sequence[Event], shown: Sequence[Event], after: int, oldest: int
) -> EventPage:
    strangers = await _strangers(call, shown)
    return {
        "items": [event_view(event, strangers) for event in shown],
        "next_after": read[-1].position if read else after,
        "oldest": oldest,
    }


async def _strangers(call: Call, events: Sequence[Event]) -> frozenset[str]:
    """Of the tasks that a victim's events say room is made for, those that this token may not know."""
    named = {TaskId(task) for event in events if (task := event.fields.get("freeing_for"))}
    known = {task: await call.parts.store.record(task) for task in sorted(named)}
    return frozenset(
        task
        for task, record in known.items()
        if record is None or not sees(call.identity, record.task.tenant)
    )
