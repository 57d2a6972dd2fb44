"""External leases: ask, renew, give back."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from gpubroker_server.core.domain.submission import EXTERNAL_KIND as KIND
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.queries import LeaseQuery, LeaseWaitQuery
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.http.waiters import moves_of
from gpubroker_server.gateway.leases.leases import (
    AskLease,
    LeasePage,
    LeaseStanding,
    LeaseView,
    RenewLease,
    check_node,
    demand_of_lease,
    lease_view,
    standing,
    states_of,
    task_of_lease,
)
from gpubroker_server.gateway.status.records import ask_leader, find, live_of, reread
from gpubroker_server.gateway.status.task_pages import page_of
from gpubroker_server.gateway.submission.permission import check_priority
from gpubroker_server.gateway.submission.submitting import IdempotencyKey, sent_before, submitted
from gpubroker_server.ports.store import RunSpec, TaskRecord

router = APIRouter(route_class=DirectRoute, tags=["leases"])


@router.post(
    "/leases",
    operation_id="leases_ask",
    dependencies=[needs(Scope.TASKS_WRITE)],
    status_code=202,
    response_model=LeaseView,
    response_description="It waits in the queue; `/leases/{id}/wait` answers when it is held.",
    responses=problems(
        "malformed-json",
        "unauthenticated",
        "forbidden",
        "priority-not-allowed",
        "validation-failed",
        "exceeds-capacity",
        "no-matching-device",
        "exceeds-maximum",
        "exceeds-quota",
        "idempotency-key-reused",
        "store-unavailable",
    ),
)
async def ask_lease(call: Call, body: AskLease, idempotency_key: IdempotencyKey = None) -> Response:
    """Ask for an external lease: GPU memory that something outside of the broker will use.

    It waits in the same queue as tasks, and may be asked to leave for a higher priority. Use the memory while
    the lease is `held`, renew it before `deadline_at`, and release it when the memory is free again.
    """
    try:
        task = _taken_in(call, body)
    except Problem:
        known = await sent_before(call, idempotency_key, "lease")
        if known is None:
            raise
        return _told(call, known.record, 202, known.headers)
    spec = RunSpec(kind=KIND, labels=body.labels)
    record, _is_new, headers = await submitted(call, task, spec, idempotency_key, "lease")
    return _told(call, record, 202, headers)


def _taken_in(call: Call, body: AskLease) -> Task:
    """The task that it is, which could be held here. Raises Problem."""
    parts, tenant = call.parts, call.identity.tenant
    if body.pid is not None:
        call.require(Scope.TASKS_COMMAND, "naming a process of a node")
    check_node(body, parts.world, names_nodes=call.identity.may(Scope.CLUSTER_READ))
    demand = parts.capacity.settled(demand_of_lease(body), "", tenant, body.labels, at="")
    now = parts.clock.now()
    task = task_of_lease(body, demand, tenant, parts.defaults, id=parts.ids.task(now), now=now)
    check_priority(call, task.priority)
    parts.capacity.check(demand, task.priority, tenant, at="")
    parts.capacity.check_times(task)
    return task


@router.get(
    "/leases",
    operation_id="leases_list",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=LeasePage,
    responses=problems("cursor-invalid", "unauthenticated", "forbidden", "validation-failed"),
)
async def list_leases(call: Call, query: Annotated[LeaseQuery, Query()]) -> Response:
    """List your tenant's external leases, newest first."""
    states, quarantined = states_of(query.state)
    return await page_of(
        call, query, lease_view, kind=KIND, states=states, quarantined=quarantined, name=query.holder
    )


@router.get(
    "/leases/{lease_id}",
    operation_id="leases_get",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=LeaseView,
    responses=problems("unauthenticated", "forbidden", "not-found"),
)
async def get_lease(call: Call, lease_id: str) -> Response:
    """Read an external lease: what it has, until when, and whether its holder is asked to leave."""
    return _told(call, await _find_lease(call, lease_id))


@router.get(
    "/leases/{lease_id}/wait",
    operation_id="leases_wait",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=LeaseView,
    response_description="Its state is another one by now.",
    responses={
        202: {"model": LeaseView, "description": "The time is over and its state is still the same."},
        **problems("unauthenticated", "forbidden", "not-found", "validation-failed"),
    },
)
async def wait_for_lease(call: Call, lease_id: str, query: Annotated[LeaseWaitQuery, Query()]) -> Response:
    """Wait until an external lease is no longer in a state.

    `pending`: to get it; `held`: to hear the notice to leave.
    """
    parts = call.parts
    seconds = min(query.timeout_seconds, parts.limits.wait_seconds)
    with parts.waiters.expect(moves_of(lease_id)) as moved:
        record = await _find_lease(call, lease_id)
        if _stands(call, record) is query.state and seconds > 0:
            await moved.within(Seconds(seconds))
            record = await reread(parts, record)
    return _told(call, record, 202 if _stands(call, record) is query.state else 200)


@router.post(
    "/leases/{lease_id}/renew",
    operation_id="leases_renew",
    dependencies=[needs(Scope.TASKS_WRITE)],
    response_model=LeaseView,
    responses={
        202: {"model": LeaseView, "description": "Asked for; the leader has not carried it out yet."},
        **problems(
            "unauthenticated",
            "forbidden",
            "not-found",
            "lease-ended",
            "lease-under-notice",
            "validation-failed",
        ),
    },
)
async def renew_lease(call: Call, lease_id: str, body: RenewLease = RenewLease()) -> Response:  # noqa: B008  # frozen
    """Say that an external lease is still needed: its deadline moves on."""
    record = await _find_lease(call, lease_id)
    task = record.task
    if task.is_terminal and _stands(call, record) is not LeaseStanding.ENDED:
        raise Problem(
            "lease-ended",
            f"lease {task.id} was to be given back, and its memory counts as used until it is released: free "
            f"the memory, then DELETE /leases/{task.id}; after that ask for a new lease",
        )
    if task.is_terminal:
        raise Problem("lease-ended", f"lease {task.id} has ended; free its memory and ask for a new lease")
    if task.state is TaskState.STOPPING:
        raise Problem(
            "lease-under-notice",
            f"lease {task.id} is to be given back ({task.stop_reason}); free its memory, then release it",
        )
    return await _asked(call, record, "renew", body.model_dump(exclude_none=True))


@router.delete(
    "/leases/{lease_id}",
    operation_id="leases_release",
    dependencies=[needs(Scope.TASKS_WRITE)],
    response_model=LeaseView,
    responses={
        202: {"model": LeaseView, "description": "Asked for; the leader has not carried it out yet."},
        **problems("unauthenticated", "forbidden", "not-found"),
    },
)
async def release_lease(call: Call, lease_id: str) -> Response:
    """Give an external lease back: its memory is free, or it is no longer wanted.

    Done again it changes nothing. Whoever releases a quarantined lease states that its memory is free; who
    did is noted.
    """
    record = await _find_lease(call, lease_id)
    if _stands(call, record) is LeaseStanding.ENDED:
        return _told(call, record)
    return await _asked(call, record, "release", {"by": call.identity.name})


async def _find_lease(call: Call, lease_id: str) -> TaskRecord:
    """Raises Problem not-found; also for what is a task that the broker starts."""
    record = await find(call, lease_id, "lease")
    if record.task.external is None:
        raise Problem("not-found", f'"{lease_id[:100]}" is a task; GET /leases lists your leases')
    return record


async def _asked(call: Call, record: TaskRecord, what: str, fields: dict[str, Any]) -> Response:
    settled = await ask_leader(call, record.task, what, fields)
    return _told(call, await reread(call.parts, record), 200 if settled else 202)


def _stands(call: Call, record: TaskRecord) -> LeaseStanding:
    return standing(record.task, live_of(call.parts, record.task, explained=False))


def _told(
    call: Call, record: TaskRecord, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return answer(lease_view(record, live_of(call.parts, record.task)), status, headers)
