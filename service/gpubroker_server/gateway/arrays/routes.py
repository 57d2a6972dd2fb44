"""Routes that submit, read, cancel and retry arrays, and return the results of their items."""

import json
from collections.abc import Mapping
from typing import Annotated

import structlog
from fastapi import Query as QueryMark
from fastapi import Response
from gpubroker.wire.answered import Time
from gpubroker.wire.arrays import Array, ArrayItemPage, ArrayState, ArrayWorker
from msgspec.structs import replace

from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.submission import ArrayTerms, array_terms_from, state_of_array
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.arrays.items import (
    ItemQuery,
    items_without_success,
    lines_of_items,
)
from gpubroker_server.gateway.arrays.submit import (
    GivenObjects,
    SubmitArray,
    check_worker,
    items_of,
    joined,
    new_array,
    objects_left,
    terms_of,
)
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.again import again
from gpubroker_server.gateway.submission.named_objects import objects_in_run
from gpubroker_server.gateway.submission.submissions import IdempotencyKey, accepted_headers
from gpubroker_server.gateway.submission.translation import submission_of
from gpubroker_server.http.bodies import JsonBody
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import SUBMIT_PROBLEMS, Problem
from gpubroker_server.http.routing import Call, Caller, Resource, answer, app_part, json_answer
from gpubroker_server.ports.arrays import ItemCounts
from gpubroker_server.ports.store import BatchSubmission

log = structlog.get_logger("gpubroker.gateway")

resource = Resource("arrays")

NDJSON = "application/x-ndjson"


_REFUSALS = f"{SUBMIT_PROBLEMS} not-found result-damaged"


@resource.route(
    "POST /arrays",
    "arrays_submit",
    Scope.TASKS_WRITE,
    Array,
    _REFUSALS,
    status_code=202,
    response_description="The array is on disk, and its workers start as soon as there is room.",
)
async def submit_array(
    call: Call,
    parts: Parts,
    objects: Annotated[GivenObjects, app_part(GivenObjects)],
    body: JsonBody[SubmitArray],
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Run one function or command for many items.

    Up to `max_parallel` workers, ordinary tasks with the given resources, share the items. A worker that is
    preempted or lost loses only the items that it had not finished.
    """
    submissions, caller = parts.submissions, call.identity

    async def new() -> BatchSubmission:
        check_worker(body)
        given = await items_of(body, objects, caller.tenant)
        worker = submission_of(body, caller.tenant)
        named = {**objects_in_run(worker.spec), **given.objects}
        terms = terms_of(caller.tenant, body, given, submissions.clock.now())
        spec = replace(worker.spec, arguments=joined(worker.spec.arguments, given.packed))
        worker = replace(worker, spec=spec)
        return await new_array(submissions, caller, worker, terms, named, body.max_parallel)

    return await _accepted(call, parts, *await submissions.batch_once(call, idempotency_key, "array", new))


@resource.route("GET /arrays/{array_id}", "arrays_get", Scope.TASKS_READ, Array, "not-found")
async def get_array(caller: Caller, parts: Parts, array_id: str) -> Response:
    """Read the state and progress of an array."""
    return answer(await _shown(parts, await _find(caller, parts, array_id)))


@resource.route(
    "GET /arrays/{array_id}/items",
    "arrays_items",
    Scope.TASKS_READ,
    ArrayItemPage,
    "not-found result-damaged",
    responses={200: {"content": {NDJSON: {"schema": {"type": "string"}}}}},
)
async def get_items(
    caller: Caller, parts: Parts, array_id: str, query: Annotated[ItemQuery, QueryMark()]
) -> Response:
    """Fetch the results of items that are done: the result or the error of each, and how long it took."""
    terms = await _find(caller, parts, array_id)
    submissions = parts.submissions
    answered = await lines_of_items(submissions.store, submissions.blobs, terms.id, query)
    lines, after, has_more = answered
    if query.format == "ndjson":
        headers = {"Next-After": str(after), "Has-More": str(has_more).lower()}
        return Response(b"".join(line + b"\n" for line in lines), 200, headers, NDJSON)
    rest = f'],"next_after":{after},"has_more":{str(has_more).lower()}}}'.encode()
    return json_answer(b'{"items":[' + b",".join(lines) + rest)


@resource.route(
    "POST /arrays/{array_id}/cancel",
    "arrays_cancel",
    Scope.TASKS_WRITE,
    Array,
    "not-found",
    status_code=202,
    response_description="Stored. Workers that run have their notice; results stay.",
)
async def cancel_array(caller: Caller, parts: Parts, array_id: str) -> Response:
    """Cancel the workers of an array that have not ended."""
    terms = await _find_to_change(caller, parts, array_id, "array.cancel")
    states = await parts.submissions.store.states(terms.workers)
    left = [worker for worker, stored in states.items() if not stored.state.is_terminal]
    if left:
        await parts.requests.ask_many(left, terms.tenant, "cancel", {"by": caller.name})
    return answer(await _shown(parts, terms), 202)


@resource.route(
    "POST /arrays/{array_id}/retry",
    "arrays_retry",
    Scope.TASKS_WRITE,
    Array,
    f"{_REFUSALS} array-not-finished nothing-to-retry",
    status_code=202,
    response_description="A new array is on disk; its `retry_of` is the old one.",
)
async def retry_array(
    call: Call, parts: Parts, array_id: str, idempotency_key: IdempotencyKey = None
) -> Response:
    """Retry the items of an ended array that failed or were not done, as a new array.

    Items keep their numbers.
    """
    submissions, caller = parts.submissions, call.identity
    old = await _find_to_change(caller, parts, array_id, "array.retry")

    async def new() -> BatchSubmission:
        state = _state(old, await submissions.store.item_counts(old.id), await _worker_states(parts, old))
        if not state.is_terminal:
            raise Problem("array-not-finished", array=old.id, state=state)
        numbers = await items_without_success(submissions.store, submissions.blobs, old)
        if not numbers:
            raise Problem("nothing-to-retry", array=old.id)
        worker = await again(submissions.blobs, await submissions.records.find(caller, old.id))
        named = await objects_left(worker.spec, old, numbers)
        now = submissions.clock.now()
        terms = replace(old, numbers=tuple(numbers), workers=(), submitted_at=now, retry_of=old.id)
        return await new_array(submissions, caller, worker, terms, named, len(old.workers))

    purpose = f"retry of array {old.id}"
    stored = await submissions.batch_once(call, idempotency_key, "array", new, purpose=purpose)
    return await _accepted(call, parts, *stored)


async def _accepted(call: Call, parts: Parts, array: TaskId, is_new: bool) -> Response:
    terms = await _find(call.identity, parts, array)
    if is_new:
        log.info("array accepted", task=array, tenant=terms.tenant)
    return answer(await _shown(parts, terms), 202, accepted_headers(f"/arrays/{array}", is_new=is_new))


async def _find(caller: Caller, parts: Parts, array_id: str) -> ArrayTerms:
    """Return the terms of the array with this id, or of the array that has a worker with this id. Raises
    Problem not-found if there is none that the token may see."""
    record = await parts.submissions.records.find(caller, array_id)
    seat = record.task.holder
    array = seat.array if isinstance(seat, WorkerSeat) else record.task.id
    text = await parts.submissions.store.batch_answer(array)
    fields = json.loads(text) if text else {}
    if "numbers" not in fields:
        raise Problem("not-found", f"task {record.task.id} is no worker of an array")
    return array_terms_from(fields)


async def _find_to_change(caller: Caller, parts: Parts, array_id: str, action: str) -> ArrayTerms:
    terms = await _find(caller, parts, array_id)
    await parts.submissions.records.find_to_change(caller, terms.id, action)
    return terms


States = Mapping[TaskId, TaskState]
"""Worker -> its state, for the workers that have a row."""


async def _worker_states(parts: Parts, terms: ArrayTerms) -> States:
    rows = await parts.submissions.store.states(terms.workers)
    return {worker: stored.state for worker, stored in rows.items()}


def _state(terms: ArrayTerms, counts: ItemCounts, workers: States) -> ArrayState:
    return state_of_array(terms, counts.done, counts.failed, workers.values())


async def _shown(parts: Parts, terms: ArrayTerms) -> Array:
    # The workers are read before the results, because a worker stores its last results before it ends.
    workers = await _worker_states(parts, terms)
    counts = await parts.submissions.store.item_counts(terms.id)
    rate, left = counts.per_second, terms.total - counts.done
    state = _state(terms, counts, workers)
    is_under_way = state is ArrayState.RUNNING and rate is not None and counts.last_at is not None
    eta_at = counts.last_at + left / rate if is_under_way and rate and counts.last_at else None
    return Array(
        id=terms.id,
        name=terms.name,
        tenant=terms.tenant,
        state=state,
        total=terms.total,
        done=counts.done,
        failed=counts.failed,
        fraction=counts.done / terms.total,
        items_per_second=rate,
        eta_at=Time.at_or_none(eta_at),
        chunk=terms.chunk,
        item_timeout_seconds=terms.item_timeout_seconds,
        item_retries=terms.item_retries,
        retry_on=tuple(cause.value for cause in terms.retry_on),
        result_format=terms.result_format,
        workers=tuple(
            ArrayWorker(worker, workers[worker].value) for worker in terms.workers if worker in workers
        ),
        submitted_at=Time.at(terms.submitted_at),
        last_item_at=Time.at_or_none(counts.last_at),
        retry_of=terms.retry_of,
    )
