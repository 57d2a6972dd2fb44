"""Worker sets: form, read, scale, end. Calls are in `gateway/hot`."""

import json
from typing import Annotated, Literal

import structlog
from fastapi import Query, Response
from gpubroker.wire.answered import Page, Time
from gpubroker.wire.worker_sets import SetWorker
from gpubroker.wire.worker_sets import WorkerSet as Shown
from pydantic import Field

from gpubroker_server.core.admission.defaults import first
from gpubroker_server.core.domain.submission import WorkerSet, worker_set_from
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.lifecycle.worker_sets import scaled
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.named_objects import objects_in_arguments, objects_in_run
from gpubroker_server.gateway.submission.submissions import IdempotencyKey, accepted_headers
from gpubroker_server.gateway.submission.translation import arguments_of, submission_of
from gpubroker_server.gateway.workers.call_routing import states_of
from gpubroker_server.gateway.workers.submit import (
    NEEDS_ONE,
    SubmitWorkerSet,
    check_roles,
    check_worker,
    new_worker_set,
    with_roles,
)
from gpubroker_server.http.bodies import Body, JsonBody, PageQuery, page_in_order
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.ids import is_task_id
from gpubroker_server.http.problems import SUBMIT_PROBLEMS, Fault, Problem
from gpubroker_server.http.routing import STORED, Call, Caller, Resource, answer
from gpubroker_server.ports.store import BatchSubmission

log = structlog.get_logger("gpubroker.gateway")

resource = Resource("worker sets")


class ChangeWorkerSet(Body):
    """Changes of a worker set; give at least one. A set with `scale` continues to scale from `count`
    workers."""

    count: Annotated[int, Field(ge=0)] | None = None
    min_count: Annotated[int, Field(ge=0)] | None = None
    max_count: Annotated[int, Field(ge=1)] | None = None


class PostSignal(Body):
    value: Annotated[float, Field(ge=0, le=1e12, description="Such as the length of a queue of yours.")]


_REFUSALS = f"{SUBMIT_PROBLEMS} not-found"


@resource.route(
    "POST /worker-sets",
    "worker_sets_submit",
    Scope.TASKS_WRITE,
    Shown,
    _REFUSALS,
    status_code=202,
    response_description="The set is on disk, and its workers start as soon as there is room.",
)
async def submit_worker_set(
    call: Call, parts: Parts, body: JsonBody[SubmitWorkerSet], idempotency_key: IdempotencyKey = None
) -> Response:
    """Keep `count` workers running, each with an object of a class, and call their methods.

    Workers are ordinary tasks: each holds its own leases, is preempted, moved and explained like every task,
    and is restarted after a failure, with growing pauses.
    """
    submissions, caller = parts.submissions, call.identity

    async def new() -> BatchSubmission:
        submissions.leader.require("form")
        check_worker(body)
        check_roles(body, caller, submissions.policy)
        worker = submission_of(with_roles(body, submissions.defaults), caller.tenant)
        named = dict(objects_in_run(worker.spec))
        for name, role in body.colocate_with.items():
            of_role = objects_in_arguments(arguments_of(role.run))
            named |= {f"/colocate_with/{name}{place}": id for place, id in of_role.items()}
        return await new_worker_set(submissions, caller, body, worker, named)

    first_worker, is_new = await submissions.batch_once(call, idempotency_key, "worker set", new)
    if is_new:
        log.info("worker set accepted", task=first_worker, tenant=caller.tenant)
    headers = accepted_headers(f"/worker-sets/{first_worker}", is_new=is_new)
    return answer(_shown(await _find(caller, parts, first_worker), parts.world), 202, headers)


_FIELDS = {"created": ("id",), "count": ("count", "id")}


class WorkerSetQuery(PageQuery):
    sort: Annotated[
        Literal["created", "-created", "count", "-count"],
        Field(description="`-`: the latest, or those that want most workers, first; equal ones by age."),
    ] = "created"


@resource.route(
    "GET /worker-sets",
    "worker_sets_list",
    Scope.TASKS_READ,
    Page[Shown],
    "cursor-invalid follower-stale",
)
async def list_worker_sets(
    caller: Caller, parts: Parts, query: Annotated[WorkerSetQuery, Query()]
) -> Response:
    """List the worker sets that are not over, of your tenant, or with the scope admin those of all
    tenants."""
    parts.freshness.moment()
    visible = [workers for workers in parts.world.worker_sets.values() if caller.may_see(workers.tenant)]
    limit = parts.submissions.records.page_items
    page, cursor = page_in_order(visible, query, query.sort, _FIELDS, caller.tenant, limit)
    shown = tuple(_shown(workers, parts.world) for workers in page)
    return answer(Page(shown, cursor, cursor is not None))


@resource.route("GET /worker-sets/{set_id}", "worker_sets_get", Scope.TASKS_READ, Shown, "not-found")
async def get_worker_set(caller: Caller, parts: Parts, set_id: str) -> Response:
    """Read a worker set."""
    return answer(_shown(await _find(caller, parts, set_id), parts.world))


@resource.route(
    "PATCH /worker-sets/{set_id}",
    "worker_sets_scale",
    Scope.TASKS_WRITE,
    Shown,
    "malformed-json not-found",
    accepted=STORED,
)
async def scale_worker_set(
    caller: Caller, parts: Parts, set_id: str, body: JsonBody[ChangeWorkerSet]
) -> Response:
    """Change how many workers are wanted. Removed workers finish their calls within their grace period."""
    workers = await find_to_change(caller, parts, set_id, "worker_set.scale")
    given = {"least": body.min_count, "count": body.count, "most": body.max_count}
    fields = {name: number for name, number in given.items() if number is not None}
    after = scaled(workers, **fields)
    detail = ""
    if any(getattr(after, name) != number for name, number in fields.items()):
        detail = (
            f"min_count {first(body.min_count, after.least)}, count {first(body.count, after.count)} and "
            f"max_count {first(body.max_count, after.most)} must be in ascending order, and the set has room "
            f"for {len(workers.workers)} workers at most; form a new set for more"
        )
    elif after.least == 0 and workers.scaling is not None and workers.scaling.by != "signal":
        detail = NEEDS_ONE
    if detail:
        raise invalid(Fault(pointer="", detail=detail, code="contradiction"))
    # Only the requested fields are sent, because the set may have changed since this process read it.
    done = await parts.requests.ask(workers.id, workers.tenant, "scale", fields)
    return answer(_shown(await _find(caller, parts, set_id), parts.world), 200 if done else 202)


@resource.route(
    "POST /worker-sets/{set_id}/signal",
    "worker_sets_signal",
    Scope.TASKS_WRITE,
    Shown,
    "malformed-json not-found",
    accepted=STORED,
)
async def post_signal(caller: Caller, parts: Parts, set_id: str, body: JsonBody[PostSignal]) -> Response:
    """Post the signal of a set that scales by `signal`. The value holds until the next one is posted."""
    workers = await find_to_change(caller, parts, set_id, "worker_set.signal")
    if workers.scaling is None or workers.scaling.by != "signal":
        detail = "this set does not scale by a signal; form it with scale {by: signal, target: ...}"
        raise invalid(Fault(pointer="/value", detail=detail, code="no-signal"))
    done = await parts.requests.ask(workers.id, workers.tenant, "signal", {"value": body.value})
    return answer(_shown(await _find(caller, parts, set_id), parts.world), 200 if done else 202)


@resource.route(
    "DELETE /worker-sets/{set_id}",
    "worker_sets_end",
    Scope.TASKS_WRITE,
    Shown,
    "not-found",
    accepted=STORED,
)
async def end_worker_set(caller: Caller, parts: Parts, set_id: str) -> Response:
    """End a worker set: its workers are cancelled, and the set is over when all have ended."""
    workers = await find_to_change(caller, parts, set_id, "worker_set.end")
    states = await parts.submissions.store.states(workers.workers)
    left = [worker for worker, stored in states.items() if not stored.state.is_terminal]
    if left:
        await parts.requests.ask_many(left, workers.tenant, "cancel", {"by": caller.name})
    seen = _shown(await _find(caller, parts, set_id), parts.world)
    return answer(seen, 200 if seen.state == "over" else 202)


def _shown(workers: WorkerSet, world: World) -> Shown:
    rows = (world.tasks.get(worker) for worker in workers.workers)
    alive = [row for row in rows if row is not None and not row.is_terminal]
    return Shown(
        id=workers.id,
        name=workers.name,
        tenant=workers.tenant,
        state="active" if alive else "over",
        count=workers.count,
        min_count=workers.least,
        max_count=workers.most,
        places=len(workers.workers),
        max_concurrency=workers.max_concurrency,
        scale=workers.scaling,
        signal=workers.signal,
        states=states_of(workers, world),
        workers=tuple(
            SetWorker(
                id=row.id,
                state="held" if row.held and not row.is_active else str(row.state),
                node=row.node,
                attempt=row.fence,
                failures=row.failures,
            )
            for row in alive
        ),
        created_at=Time.at(workers.created_at),
    )


async def _find(caller: Caller, parts: Parts, set_id: str) -> WorkerSet:
    """Return the worker set with this id, or the one that has a worker with this id. Raises Problem not-found
    if there is none that the token may see."""
    workers = parts.world.worker_sets.of(TaskId(set_id))
    if workers is None and is_task_id(set_id):
        record = await parts.submissions.store.record(TaskId(set_id))
        seat = None if record is None else record.spec.seat
        text = await parts.submissions.store.batch_answer(TaskId(set_id) if seat is None else seat.id)
        stored = json.loads(text) if text else {}
        workers = worker_set_from(stored["worker_set"]) if "worker_set" in stored else None
    if workers is None or not caller.may_see(workers.tenant):
        raise Problem("not-found", f'there is no worker set "{set_id[:100]}"')
    return workers


async def find_to_change(caller: Caller, parts: Parts, set_id: str, action: str) -> WorkerSet:
    """Return a worker set as `_find` does. If it belongs to another tenant, `action` is written to the audit
    log."""
    workers = await _find(caller, parts, set_id)
    if workers.tenant != caller.tenant:
        about = {"tenant": workers.tenant, "action": action, "subject": workers.id}
        await parts.submissions.store.audit(by=caller.name, **about)
    return workers
