"""The event log: of one task, and of everything a token may see."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Response

from service.core.events import Event
from service.core.units import Position
from service.gateway.direct import Call, DirectRoute, answer, needs, problems
from service.gateway.identity import Identity, Scope
from service.gateway.lookup import find
from service.gateway.schemas import EventQuery
from service.gateway.translate import event_view
from service.gateway.views import EventPage

router = APIRouter(route_class=DirectRoute, tags=["events"])


@router.get(
    "/tasks/{task_id}/events",
    operation_id="tasks_events",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=EventPage,
    responses=problems("unauthenticated", "forbidden", "not-found", "validation-failed"),
)
async def list_task_events(call: Call, task_id: str, query: Annotated[EventQuery, Query()]) -> Response:
    """Read what happened to a task, oldest first: its states, its leases, the pledges made for it."""
    record = await find(call, task_id)
    limit = min(query.limit, call.parts.limits.page_items)
    events = await call.parts.store.events(Position(query.after), limit, record.task.id)
    return answer(_page(events, events, query.after))


@router.get(
    "/events",
    operation_id="events_list",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=EventPage,
    responses=problems("unauthenticated", "forbidden", "validation-failed"),
)
async def list_events(call: Call, query: Annotated[EventQuery, Query()]) -> Response:
    """Read the log, oldest first: your tenant's events, and with `cluster:read` those of nodes and devices.

    A page may be empty although more follows; go on from `next_after` until it no longer moves.
    """
    limit = min(query.limit, call.parts.limits.page_items)
    events = await call.parts.store.events(Position(query.after), limit)
    visible = [event for event in events if _sees(call.identity, event)]
    return answer(_page(events, visible, query.after))


def _sees(identity: Identity, event: Event) -> bool:
    if event.tenant == identity.tenant:
        return True
    return identity.may(Scope.ADMIN) or (not event.tenant and identity.may(Scope.CLUSTER_READ))


def _page(read: Sequence[Event], shown: Sequence[Event], after: int) -> EventPage:
    return {
        "items": [event_view(event) for event in shown],
        "next_after": read[-1].position if read else after,
    }
