"""Routes that request, list, renew and release external leases, and wait for them."""

from typing import Annotated, Any, Literal

from fastapi import Query, Response
from gpubroker.wire.answered import Page
from gpubroker.wire.leases import Lease, LeaseState
from pydantic import Field

from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.submission import EXTERNAL_KIND as KIND
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.gateway.leases.leases import (
    AskLease,
    RenewLease,
    check_node,
    lease_view,
    standing_of,
    states_of,
    submission_of_lease,
)
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.records import order_of
from gpubroker_server.gateway.submission.submissions import (
    IdempotencyKey,
    sent_key,
)
from gpubroker_server.http.bodies import JsonBody, Name, PageQuery, WaitQuery
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import DEMAND_PROBLEMS, QUEUE_PROBLEMS, Problem
from gpubroker_server.http.routing import STORED, Call, Caller, Resource, answer
from gpubroker_server.http.waiters import moves_of
from gpubroker_server.ports.store import AdmittedTask, TaskRecord

resource = Resource("leases")


LeaseStates = Literal[
    LeaseState.PENDING, LeaseState.HELD, LeaseState.STOPPING, LeaseState.QUARANTINED, LeaseState.ENDED
]


class LeaseQuery(PageQuery):
    state: Annotated[
        list[LeaseStates], Field(description="One or more states, repeated or separated by commas.")
    ] = []  # noqa: RUF012  # pydantic copies it
    holder: Annotated[Name | None, Field(description="The exact name of the holder.")] = None
    tenant: Annotated[
        str | None,
        Field(
            max_length=100,
            description="Another tenant's leases, or `*` for those of all: needs the scope `admin`.",
        ),
    ] = None
    sort: Annotated[
        Literal["submitted", "-submitted", "priority", "-priority"],
        Field(description="`-`: the latest, or the highest, first; equal ones by submission."),
    ] = "-submitted"


class LeaseWaitQuery(WaitQuery):
    state: Annotated[
        Literal[LeaseState.PENDING, LeaseState.HELD, LeaseState.STOPPING],
        Field(description="Wait for as long as it is in this state."),
    ] = LeaseState.PENDING


@resource.route(
    "POST /leases",
    "leases_ask",
    Scope.TASKS_WRITE,
    Lease,
    f"malformed-json {DEMAND_PROBLEMS} {QUEUE_PROBLEMS}",
    status_code=202,
    response_description="It waits in the queue; `/leases/{id}/wait` answers when it is held.",
)
async def ask_lease(
    call: Call, parts: Parts, body: JsonBody[AskLease], idempotency_key: IdempotencyKey = None
) -> Response:
    """Ask for an external lease: GPU memory that something outside of the broker will use.

    A lease waits in the queue of tasks, and its holder may be asked to leave for a higher priority. Use the
    memory while the lease is `held`, renew the lease before `deadline_at`, and release it when the memory is
    free again.
    """
    submissions, identity = parts.submissions, call.identity

    async def new_lease() -> AdmittedTask:
        if body.pid is not None:
            identity.require(Scope.TASKS_COMMAND, "naming a process of a node")
        check_node(body, submissions.world, names_nodes=identity.may(Scope.CLUSTER_READ))
        return await submissions.admitted(identity, submission_of_lease(body, identity.tenant))

    sent = await sent_key(call, idempotency_key, "lease")
    record, _, headers = await submissions.once(identity, sent, "lease", new_lease)
    return _answer(parts, record, 202, headers)


@resource.route("GET /leases", "leases_list", Scope.TASKS_READ, Page[Lease], "cursor-invalid")
async def list_leases(caller: Caller, parts: Parts, query: Annotated[LeaseQuery, Query()]) -> Response:
    """List your tenant's external leases; newest first, if not sorted."""
    states, quarantined = states_of(query.state)
    filters = {
        "tenant": caller.whose(query.tenant, "leases"),
        "kind": KIND,
        "states": states,
        "quarantined": quarantined,
        "name": query.holder,
    }
    filters |= order_of(query.sort)
    return await parts.records.page(caller, query, lease_view, **filters)


@resource.route("GET /leases/{lease_id}", "leases_get", Scope.TASKS_READ, Lease, "not-found")
async def get_lease(caller: Caller, parts: Parts, lease_id: str) -> Response:
    """Read an external lease: what it holds, its deadline, and whether its holder is asked to leave."""
    return _answer(parts, await _find_lease(caller, parts, lease_id))


@resource.route(
    "GET /leases/{lease_id}/wait",
    "leases_wait",
    Scope.TASKS_READ,
    Lease,
    "not-found tenant-waits",
    accepted="The time is over and it is still in this state.",
    response_description="It is in another state now.",
)
async def wait_for_lease(
    caller: Caller, parts: Parts, lease_id: str, query: Annotated[LeaseWaitQuery, Query()]
) -> Response:
    """Wait until an external lease is no longer in a state.

    With `pending`, the answer comes when the lease is held; with `held`, when its holder is asked to leave.
    """
    records, seconds = parts.records, min(query.timeout_seconds, parts.limits.wait_seconds)
    with records.waiters.expect_for(caller.tenant, moves_of(lease_id)) as moved:
        record = await _find_lease(caller, parts, lease_id)
        if _standing(parts, record) is query.state and seconds > 0:
            await moved.within(Seconds(seconds))
            record = await records.reread(record)
    return _answer(parts, record, 202 if _standing(parts, record) is query.state else 200)


@resource.route(
    "POST /leases/{lease_id}/renew",
    "leases_renew",
    Scope.TASKS_WRITE,
    Lease,
    "not-found lease-ended lease-under-notice",
    accepted=STORED,
)
async def renew_lease(
    caller: Caller,
    parts: Parts,
    lease_id: str,
    body: JsonBody[RenewLease] = RenewLease(),  # noqa: B008  # frozen
) -> Response:
    """Renew an external lease that is still needed: its deadline moves on."""
    record = await _find_lease(caller, parts, lease_id, "lease.renew")
    task = record.task
    if task.is_terminal and _standing(parts, record) is not LeaseState.ENDED:
        remedy = f"free the memory, then DELETE /leases/{task.id}; after that ask for a new lease"
        ended = "has ended, and its memory counts as used until it is released"
        raise Problem("lease-ended", lease=task.id, ended=ended, remedy=remedy)
    if task.is_terminal:
        remedy = "free its memory, and ask for a new lease"
        raise Problem("lease-ended", lease=task.id, ended="has ended", remedy=remedy)
    if task.state is TaskState.STOPPING:
        raise Problem("lease-under-notice", lease=task.id, reason=task.stop_cause or task.stop_reason)
    return await _requested(parts, record, "renew", body.model_dump(exclude_none=True))


@resource.route(
    "DELETE /leases/{lease_id}", "leases_release", Scope.TASKS_WRITE, Lease, "not-found", accepted=STORED
)
async def release_lease(caller: Caller, parts: Parts, lease_id: str) -> Response:
    """Release an external lease: its memory is free, or it is no longer wanted.

    A second release changes nothing. Releasing a quarantined lease states that its memory is free; the
    name of your token is recorded with it.
    """
    record = await _find_lease(caller, parts, lease_id, "lease.release")
    if _standing(parts, record) is LeaseState.ENDED:
        return _answer(parts, record)
    return await _requested(parts, record, "release", {"by": caller.name})


async def _find_lease(caller: Caller, parts: Parts, lease_id: str, action: str = "") -> TaskRecord:
    """Return the record of a lease. `action` is written to the audit log if the lease belongs to another
    tenant. Raises Problem not-found, also for a task that is not a lease."""
    record = await parts.records.find(caller, lease_id, "lease")
    if not isinstance(record.task.holder, External):
        raise Problem("not-found", f'"{lease_id[:100]}" is a task; GET /leases lists your leases')
    if action and record.task.tenant != caller.tenant:
        about = {"tenant": record.task.tenant, "action": action, "subject": record.task.id}
        await parts.records.store.audit(by=caller.name, **about)
    return record


async def _requested(parts: Parts, record: TaskRecord, change: str, fields: dict[str, Any]) -> Response:
    settled = await parts.requests.ask(record.task.id, record.task.tenant, change, fields)
    return _answer(parts, await parts.records.reread(record), 200 if settled else 202)


def _standing(parts: Parts, record: TaskRecord) -> LeaseState:
    return standing_of(record.task, parts.records.live(record.task, explained=False))


def _answer(
    parts: Parts, record: TaskRecord, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return answer(lease_view(record, parts.records.live(record.task)), status, headers)
