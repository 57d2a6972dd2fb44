"""Worker sets: form, read, scale, call, end."""

import base64
import json
from dataclasses import asdict
from typing import Annotated, Literal

import structlog
from fastapi import Query, Response
from pydantic import BeforeValidator, Field, JsonValue, WithJsonSchema
from pydantic_core import to_json
from typing_extensions import TypedDict

from gpubroker_server.core.domain.submission import WorkerSet, worker_set_from
from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.core.lifecycle.worker_sets import scaled
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.bodies import Body, PageQuery, page_in_order
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.ids import is_task_id
from gpubroker_server.gateway.http.problems import SUBMIT_PROBLEMS, Fault, Problem
from gpubroker_server.gateway.http.routing import PARTS, STORED, Call, Resource, answer, json_answer, view_of
from gpubroker_server.gateway.http.times import Time
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.batches import sent_batch
from gpubroker_server.gateway.submission.demand import first
from gpubroker_server.gateway.submission.named_objects import objects_in_arguments, objects_in_run
from gpubroker_server.gateway.submission.submissions import (
    IdempotencyKey,
    arguments_of,
)
from gpubroker_server.gateway.submission.task_body import decoded
from gpubroker_server.gateway.workers.call_routing import CallRouter, states_of
from gpubroker_server.gateway.workers.submit import (
    NEEDS_ONE,
    MethodName,
    ScaleBy,
    SubmitWorkerSet,
    check_worker,
    new_worker_set,
    with_roles,
)
from gpubroker_server.ports.worker_calls import WorkerCall

log = structlog.get_logger("gpubroker.gateway")

resource = Resource("worker sets")


class SetWorkerView(TypedDict):
    id: Annotated[str, Field(description="An ordinary task, with its own log, explanation and events.")]
    state: Annotated[str, Field(description="As of a task; `held` if the worker is not wanted now.")]
    node: str | None
    attempt: int
    failures: Annotated[int, Field(description="Restarts after failures, until it has run well for long.")]


class WorkerSetView(TypedDict):
    """A worker set as it is now."""

    id: str
    name: str
    tenant: str
    state: Annotated[
        Literal["active", "over"], Field(description="`over`: it was ended, or none of its workers is left.")
    ]
    count: Annotated[int, Field(description="How many workers are wanted.")]
    min_count: int
    max_count: int
    places: Annotated[
        int,
        Field(
            description="A place is a task that is a worker while one is wanted, and is held otherwise. So "
            "many were made with the set; `max_count` may be that at most."
        ),
    ]
    max_concurrency: int
    scale: ScaleBy | None
    signal: float | None
    states: Annotated[dict[str, int], Field(description="How many workers are in which state.")]
    workers: list[SetWorkerView]
    created_at: Time


class WorkerSetPage(TypedDict):
    items: list[WorkerSetView]
    next_cursor: str | None
    has_more: bool


class ChangeWorkerSet(Body):
    """At least one of them. With `scale`, `count` is where it goes on from."""

    count: Annotated[int, Field(ge=0)] | None = None
    min_count: Annotated[int, Field(ge=0)] | None = None
    max_count: Annotated[int, Field(ge=1)] | None = None


class PostSignal(Body):
    value: Annotated[float, Field(ge=0, le=1e12, description="Such as the length of a queue of yours.")]


class CallWorkers(Body):
    """A call of one method, in one of the workers."""

    method: MethodName
    role: Annotated[MethodName | Literal[""], Field(description="Of `colocate_with`; empty: the set's.")] = ""
    args: Annotated[list[JsonValue], Field(max_length=10_000)] = Field(default_factory=list)
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    pickled: Annotated[
        bytes | None,
        BeforeValidator(decoded),
        Field(
            description="Instead of args and kwargs: base64 of the cloudpickle of `(args, kwargs)`. The "
            "service never unpickles it; the result is pickled too. Needs the scope `tasks:code`."
        ),
        WithJsonSchema({"type": ["string", "null"], "contentEncoding": "base64"}),
    ] = None
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400, description="Waiting included.")] = 60.0
    routing: Annotated[
        Literal["least_queue", "round_robin"],
        Field(description="`least_queue`: the worker with the fewest calls from this gateway."),
    ] = "least_queue"


class CallView(TypedDict):
    worker: Annotated[str, Field(description="The task that answered.")]
    attempt: int
    seconds: Annotated[float, Field(description="How long the method took.")]
    result: JsonValue
    data_base64: Annotated[str | None, Field(description="The pickled result of a pickled call.")]


_REFUSALS = f"{SUBMIT_PROBLEMS} not-found"
_CALL_PROBLEMS = (
    "malformed-json not-found validation-failed payload-too-large no-ray-driver worker-queue-full "
    "call-failed worker-lost no-worker call-timeout tenant-waits task-already-finished"
)


@resource.route(
    "POST /worker-sets",
    "worker_sets_submit",
    Scope.TASKS_WRITE,
    WorkerSetView,
    _REFUSALS,
    status_code=202,
    response_description="The set is on disk, and its workers start as soon as there is room.",
)
async def submit_worker_set(
    call: Call, parts: Parts, body: SubmitWorkerSet, idempotency_key: IdempotencyKey = None
) -> Response:
    """Keep `count` workers running, each with an object of a class, and call their methods.

    Workers are ordinary tasks: each holds its own leases, is preempted, moved and explained like every task,
    and is restarted with growing pauses after it failed.
    """
    submissions, tenant = parts.submissions, call.identity.tenant
    sent = await sent_batch(call, submissions.store, idempotency_key, "worker set")
    if (known := await sent.stored_before()) is not None:
        return _accepted(await _find(call, parts, known), parts, is_new=False)
    submissions.leader.require("form")
    check_worker(body)
    for role in body.colocate_with.values():
        submissions.permissions.check_run(call.identity, role.run)
    for name, role in body.colocate_with.items():
        submissions.check_profile(role.profile, at=f"/colocate_with/{name}/profile")
    submissions.check_profile(body.profile)
    wanted = with_roles(body, submissions.defaults)
    task, learned = await submissions.new_task(wanted, tenant)
    await submissions.check_allowed(call.identity, wanted, task)
    submissions.check_possible(task)
    spec = submissions.run_spec(wanted, body.run, learned)
    named = dict(objects_in_run(spec))
    for name, role in body.colocate_with.items():
        at = f"/colocate_with/{name}"
        found = objects_in_arguments(arguments_of(role.run))
        named |= {f"{at}{place}": id for place, id in found.items()}
    await submissions.check_objects(tenant, named)
    new = await new_worker_set(submissions, body, task, spec, set(named.values()))
    submissions.check_queue(worker.task for worker in new.batch.submissions)
    with parts.requests.expected(new.batch.requests) as settle:
        if (known := await sent.store(new.batch)) is not None:
            return _accepted(await _find(call, parts, known), parts, is_new=False)
        await settle()
    log.info("worker set accepted", task=new.workers.id, tenant=tenant)
    return _accepted(new.workers, parts, is_new=True)


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
    WorkerSetPage,
    "cursor-invalid follower-stale validation-failed",
)
async def list_worker_sets(call: Call, parts: Parts, query: Annotated[WorkerSetQuery, Query()]) -> Response:
    """List the worker sets that are not over, of the token's tenant, or of all for an administrator."""
    parts.freshness.as_of()
    mine = [one for one in parts.world.worker_sets.values() if call.identity.may_see(one.tenant)]
    most = parts.submissions.records.page_items
    page, cursor = page_in_order(mine, query, query.sort, _FIELDS, call.identity.tenant, most)
    views = [view(workers, parts.world) for workers in page]
    return answer(WorkerSetPage(items=views, next_cursor=cursor, has_more=cursor is not None))


@resource.route("GET /worker-sets/{set_id}", "worker_sets_get", Scope.TASKS_READ, WorkerSetView, "not-found")
async def get_worker_set(call: Call, parts: Parts, set_id: str) -> Response:
    """Read a worker set."""
    return answer(view(await _find(call, parts, set_id), parts.world))


@resource.route(
    "PATCH /worker-sets/{set_id}",
    "worker_sets_scale",
    Scope.TASKS_WRITE,
    WorkerSetView,
    "malformed-json not-found validation-failed",
    accepted=STORED,
)
async def scale_worker_set(call: Call, parts: Parts, set_id: str, body: ChangeWorkerSet) -> Response:
    """Want more or fewer workers. Those that leave finish the calls under way, within their grace period."""
    workers = await _find_to_change(call, parts, set_id, "worker_set.scale")
    given = {"least": body.min_count, "count": body.count, "most": body.max_count}
    fields = {name: number for name, number in given.items() if number is not None}
    after = scaled(workers, **fields)
    detail = ""
    if any(getattr(after, name) != number for name, number in fields.items()):
        detail = (
            f"min_count {first(body.min_count, after.least)}, count {first(body.count, after.count)} and "
            f"max_count {first(body.max_count, after.most)} must rise, and the set has "
            f"{len(workers.workers)} places; form a new set for more"
        )
    elif after.least == 0 and workers.scaling is not None and workers.scaling.by != "signal":
        detail = NEEDS_ONE
    if detail:
        raise invalid(Fault(pointer="", detail=detail, code="contradiction"))
    # Only what was given: the set may have changed since this process last read it.
    done = await parts.requests.ask(workers.id, workers.tenant, "scale", fields)
    return answer(view(await _find(call, parts, set_id), parts.world), 200 if done else 202)


@resource.route(
    "POST /worker-sets/{set_id}/signal",
    "worker_sets_signal",
    Scope.TASKS_WRITE,
    WorkerSetView,
    "malformed-json not-found validation-failed",
    accepted=STORED,
)
async def post_signal(call: Call, parts: Parts, set_id: str, body: PostSignal) -> Response:
    """Tell a set that scales by `signal` the number that its workers follow. It holds until the next one."""
    workers = await _find_to_change(call, parts, set_id, "worker_set.signal")
    if workers.scaling is None or workers.scaling.by != "signal":
        detail = "this set does not scale by a signal; form it with scale {by: signal, target: ...}"
        raise invalid(Fault(pointer="/value", detail=detail, code="no-signal"))
    done = await parts.requests.ask(workers.id, workers.tenant, "signal", {"value": body.value})
    return answer(view(await _find(call, parts, set_id), parts.world), 200 if done else 202)


@resource.route(
    "POST /worker-sets/{set_id}/call", "worker_sets_call", Scope.TASKS_WRITE, CallView, _CALL_PROBLEMS
)
async def call_worker(
    call: Call, parts: Parts, router: Annotated[CallRouter, PARTS], set_id: str, body: CallWorkers
) -> Response:
    """Call a method in one worker, and wait for what it returns. No call is stored.

    A call is sent once, except to a worker that has refused it before it began.
    """
    workers = parts.world.worker_sets.get(TaskId(set_id))
    if workers is None or workers.tenant != call.identity.tenant:
        workers = await _find_to_change(call, parts, set_id, "worker_set.call")
        states = await parts.submissions.store.states(workers.workers)
        if all(stored.state.is_terminal for stored in states.values()):
            detail = f"worker set {workers.id} is over: none of its workers is left; form a new one"
            raise Problem("task-already-finished", detail)
    if body.pickled is None:
        form, arguments = "json", to_json({"args": body.args, "kwargs": body.kwargs})
    else:
        call.identity.require(Scope.TASKS_CODE, "pickled arguments")
        form, arguments = "cloudpickle", body.pickled
    asked = WorkerCall(body.role, body.method, form, arguments)
    run, got = await router.call(workers, asked, Seconds(body.timeout_seconds), body.routing)
    about = f'{{"worker":"{run.task}","attempt":{run.fence},"seconds":{got.seconds:.6f},'.encode()
    if form == "json":
        return json_answer(b"".join((about, b'"result":', got.result, b',"data_base64":null}')))
    return json_answer(
        b"".join((about, b'"result":null,"data_base64":"', base64.b64encode(got.result), b'"}'))
    )


@resource.route(
    "DELETE /worker-sets/{set_id}",
    "worker_sets_end",
    Scope.TASKS_WRITE,
    WorkerSetView,
    "not-found",
    accepted=STORED,
)
async def end_worker_set(call: Call, parts: Parts, set_id: str) -> Response:
    """End a set: its workers are cancelled, and it is over when all are gone."""
    workers = await _find_to_change(call, parts, set_id, "worker_set.end")
    states = await parts.submissions.store.states(workers.workers)
    left = [worker for worker, stored in states.items() if not stored.state.is_terminal]
    if left:
        await parts.requests.ask_many(left, workers.tenant, "cancel", {})
    seen = view(await _find(call, parts, set_id), parts.world)
    return answer(seen, 200 if seen["state"] == "over" else 202)


def view(workers: WorkerSet, world: World) -> WorkerSetView:
    rows = (world.tasks.get(worker) for worker in workers.workers)
    alive = [row for row in rows if row is not None and not row.is_terminal]
    return view_of(
        WorkerSetView,
        workers,
        state="active" if alive else "over",
        min_count=workers.least,
        max_count=workers.most,
        places=len(workers.workers),
        scale=None if workers.scaling is None else asdict(workers.scaling),
        states=dict(states_of(workers, world)),
        workers=[
            {
                "id": row.id,
                "state": "held" if row.held and not row.is_active else str(row.state),
                "node": row.node,
                "attempt": row.fence,
                "failures": row.failures,
            }
            for row in alive
        ],
    )


def _accepted(workers: WorkerSet, parts: Parts, *, is_new: bool) -> Response:
    headers = {"Location": f"/worker-sets/{workers.id}"}
    if not is_new:
        headers["Idempotency-Replayed"] = "true"
    return answer(view(workers, parts.world), 202, headers)


async def _find(call: Call, parts: Parts, set_id: str) -> WorkerSet:
    """Raises Problem not-found, also for a set that the token may not see."""
    workers = parts.world.worker_sets.get(TaskId(set_id))
    if workers is None and is_task_id(set_id):
        text = await parts.submissions.store.batch_answer(TaskId(set_id))
        kept = json.loads(text) if text else {}
        workers = worker_set_from(kept["worker_set"]) if "worker_set" in kept else None
    if workers is None or not call.identity.may_see(workers.tenant):
        raise Problem("not-found", f'there is no worker set "{set_id[:100]}"')
    return workers


async def _find_to_change(call: Call, parts: Parts, set_id: str, action: str) -> WorkerSet:
    workers = await _find(call, parts, set_id)
    if workers.tenant != call.identity.tenant:
        about = {"tenant": workers.tenant, "action": action, "subject": workers.id}
        await parts.submissions.store.audit(by=call.identity.name, **about)
    return workers
