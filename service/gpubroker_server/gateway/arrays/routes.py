"""Arrays: submit, read, results of items, cancel, retry of what failed."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

import structlog
from fastapi import Query as QueryMark
from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.submission import ArrayTerms, array_terms_from
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.gateway.arrays.items import (
    ItemPageView,
    ItemQuery,
    items_without_success,
    lines_of_items,
)
from gpubroker_server.gateway.arrays.submit import (
    GivenObjects,
    NewArray,
    SubmitArray,
    check_worker,
    items_of,
    joined,
    new_array,
    objects_left,
    terms_of,
    terms_text,
)
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import SUBMIT_PROBLEMS, Problem
from gpubroker_server.gateway.http.routing import PARTS, Call, Resource, answer, json_answer, view_of
from gpubroker_server.gateway.http.times import Time, rfc3339_or_none
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.again import again
from gpubroker_server.gateway.submission.batches import SentBatch, sent_batch
from gpubroker_server.gateway.submission.named_objects import objects_in_run
from gpubroker_server.gateway.submission.submissions import IdempotencyKey
from gpubroker_server.ports.arrays import ItemCounts
from gpubroker_server.ports.store import BatchSubmission

log = structlog.get_logger("gpubroker.gateway")

resource = Resource("arrays")

NDJSON = "application/x-ndjson"


class WorkerView(TypedDict):
    id: Annotated[str, Field(description="An ordinary task, with its own log, explanation and events.")]
    state: str


class ArrayView(TypedDict):
    """An array, its workers, and how far it is."""

    id: str
    name: str
    tenant: str
    state: Annotated[
        Literal["pending", "running", "succeeded", "failed", "cancelled"],
        Field(description="`failed`: items failed, or are left although no worker is."),
    ]
    total: int
    done: Annotated[int, Field(description="Of them, those that have a result or an error.")]
    failed: Annotated[int, Field(description="Of those, the ones with an error.")]
    fraction: float
    items_per_second: Annotated[float | None, Field(description="On average since the first result.")]
    eta_at: Annotated[Time | None, Field(description="When all are done, at this rate.")]
    chunk: int | None
    item_timeout_seconds: float | None
    item_retries: int
    result_format: Literal["json", "cloudpickle"]
    workers: list[WorkerView]
    submitted_at: Time
    last_item_at: Time | None
    retry_of: Annotated[str | None, Field(description="The array of which it does the failed items again.")]


_REFUSALS = f"{SUBMIT_PROBLEMS} not-found result-damaged"


@resource.route(
    "POST /arrays",
    "arrays_submit",
    Scope.TASKS_WRITE,
    ArrayView,
    _REFUSALS,
    status_code=202,
    response_description="The array is on disk, and its workers start as soon as there is room.",
)
async def submit_array(
    call: Call,
    parts: Parts,
    objects: Annotated[GivenObjects, PARTS],
    body: SubmitArray,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Run one function or command for many items.

    Up to `max_parallel` workers, ordinary tasks with the given resources, share the items. A worker that is
    preempted or lost loses only the items that it had not finished.
    """
    submissions, tenant = parts.submissions, call.identity.tenant
    sent = await sent_batch(call, submissions.store, idempotency_key, "array")
    if (known := await sent.stored_before()) is not None:
        return await _replayed(call, parts, known)
    check_worker(body)
    given = await items_of(body, objects, tenant)
    task, learned = await submissions.new_task(body, tenant)
    await submissions.check_allowed(call.identity, body, task)
    submissions.check_possible(task)
    spec = submissions.run_spec(body, body.run, learned)
    named = {**objects_in_run(spec), **given.objects}
    await submissions.check_objects(tenant, named)
    terms = terms_of(tenant, body, given, submissions.clock.now())
    arguments = joined(spec.arguments, given.packed)
    array = await new_array(submissions, task, spec, terms, arguments, body.max_parallel)
    return await _store(call, parts, array, sent)


@resource.route("GET /arrays/{array_id}", "arrays_get", Scope.TASKS_READ, ArrayView, "not-found")
async def get_array(call: Call, parts: Parts, array_id: str) -> Response:
    """Read how far an array is."""
    return answer(await _view(parts, await _find(call, parts, array_id)))


@resource.route(
    "GET /arrays/{array_id}/items",
    "arrays_items",
    Scope.TASKS_READ,
    ItemPageView,
    "not-found result-damaged validation-failed",
    responses={200: {"content": {NDJSON: {"schema": {"type": "string"}}}}},
)
async def get_items(
    call: Call, parts: Parts, array_id: str, query: Annotated[ItemQuery, QueryMark()]
) -> Response:
    """Fetch the results of items that are done: result or error, and how long each took."""
    terms = await _find(call, parts, array_id)
    submissions = parts.submissions
    found = await lines_of_items(submissions.store, submissions.blobs, terms.id, query)
    lines, after, has_more = found
    if query.format == "ndjson":
        headers = {"Next-After": str(after), "Has-More": str(has_more).lower()}
        return Response(b"".join(line + b"\n" for line in lines), 200, headers, NDJSON)
    rest = f'],"next_after":{after},"has_more":{str(has_more).lower()}}}'.encode()
    return json_answer(b'{"items":[' + b",".join(lines) + rest)


@resource.route(
    "POST /arrays/{array_id}/cancel",
    "arrays_cancel",
    Scope.TASKS_WRITE,
    ArrayView,
    "not-found",
    status_code=202,
    response_description="Stored. Workers that run have their notice; results stay.",
)
async def cancel_array(call: Call, parts: Parts, array_id: str) -> Response:
    """Cancel what is left of an array."""
    terms = await _find_to_change(call, parts, array_id, "array.cancel")
    states = await parts.submissions.store.states(terms.workers)
    left = [worker for worker, stored in states.items() if not stored.state.is_terminal]
    if left:
        await parts.requests.ask_many(left, terms.tenant, "cancel", {})
    return answer(await _view(parts, terms), 202)


@resource.route(
    "POST /arrays/{array_id}/retry",
    "arrays_retry",
    Scope.TASKS_WRITE,
    ArrayView,
    f"{_REFUSALS} array-not-finished nothing-to-retry",
    status_code=202,
    response_description="A new array is on disk; its `retry_of` is the old one.",
)
async def retry_array(
    call: Call, parts: Parts, array_id: str, idempotency_key: IdempotencyKey = None
) -> Response:
    """Do the items of an ended array again that failed or were left, as a new array.

    Items keep their numbers.
    """
    old = await _find_to_change(call, parts, array_id, "array.retry")
    submissions = parts.submissions
    sent = await sent_batch(call, submissions.store, idempotency_key, "array", f"retry of array {old.id}")
    if (known := await sent.stored_before()) is not None:
        return await _replayed(call, parts, known)
    state = _state(old, await submissions.store.item_counts(old.id), await _worker_states(parts, old))
    if state in ("pending", "running"):
        raise Problem("array-not-finished", array=old.id, state=state)
    numbers = await items_without_success(submissions.store, submissions.blobs, old)
    if not numbers:
        raise Problem("nothing-to-retry", array=old.id)
    record = await submissions.records.find(call.identity, old.id)
    task, spec = await again(submissions, call.identity, record)
    await submissions.check_objects(old.tenant, await objects_left(spec, old, numbers))
    now = submissions.clock.now()
    terms = replace(old, numbers=tuple(numbers), workers=(), submitted_at=now, retry_of=old.id)
    array = await new_array(submissions, task, spec, terms, spec.arguments, len(old.workers))
    return await _store(call, parts, array, sent)


async def _store(call: Call, parts: Parts, array: NewArray, sent: SentBatch) -> Response:
    """One commit for all of it. Raises Problem."""
    submissions, terms = parts.submissions, array.terms
    submissions.leader.require("array")
    submissions.check_queue(worker.task for worker in array.workers)
    if (known := await sent.store(BatchSubmission(array.workers, answer=terms_text(terms)))) is not None:
        return await _replayed(call, parts, known)
    log.info("array accepted", task=terms.id, tenant=terms.tenant)
    return answer(await _view(parts, terms), 202, {"Location": f"/arrays/{terms.id}"})


async def _replayed(call: Call, parts: Parts, array: TaskId) -> Response:
    headers = {"Location": f"/arrays/{array}", "Idempotency-Replayed": "true"}
    return answer(await _view(parts, await _find(call, parts, array)), 202, headers)


async def _find(call: Call, parts: Parts, array_id: str) -> ArrayTerms:
    """Raises Problem not-found, also for an array that the token may not see."""
    first = await parts.submissions.records.find(call.identity, array_id)
    text = await parts.submissions.store.batch_answer(first.task.id)
    fields = json.loads(text) if text else {}
    if "numbers" not in fields:
        raise Problem("not-found", f"task {first.task.id} is not the first worker of an array")
    return array_terms_from(fields)


async def _find_to_change(call: Call, parts: Parts, array_id: str, action: str) -> ArrayTerms:
    terms = await _find(call, parts, array_id)
    await parts.submissions.records.find_to_change(call.identity, terms.id, action)
    return terms


States = Mapping[TaskId, TaskState]
"""Of the workers that have a row."""


async def _worker_states(parts: Parts, terms: ArrayTerms) -> States:
    found = await parts.submissions.store.states(terms.workers)
    return {worker: stored.state for worker, stored in found.items()}


def _state(terms: ArrayTerms, counts: ItemCounts, workers: States) -> str:
    """It follows from the items and the workers."""
    if counts.done >= terms.total:
        return "failed" if counts.failed else "succeeded"
    left = [state for state in workers.values() if not state.is_terminal]
    if not left:
        return "cancelled" if TaskState.CANCELLED in workers.values() else "failed"
    has_begun = counts.done > 0 or len(left) < len(workers) or set(left) != {TaskState.PENDING}
    return "running" if has_begun else "pending"


async def _view(parts: Parts, terms: ArrayTerms) -> ArrayView:
    # The workers first: the last results are stored before a worker ends.
    workers = await _worker_states(parts, terms)
    counts = await parts.submissions.store.item_counts(terms.id)
    rate, left = counts.per_second, terms.total - counts.done
    state = _state(terms, counts, workers)
    is_under_way = state == "running" and rate is not None and counts.last_at is not None
    eta_at = Instant(counts.last_at + left / rate) if is_under_way and rate and counts.last_at else None
    return view_of(
        ArrayView,
        terms,
        state=state,
        done=counts.done,
        failed=counts.failed,
        fraction=counts.done / terms.total,
        items_per_second=rate,
        eta_at=rfc3339_or_none(eta_at),
        workers=[
            {"id": worker, "state": workers[worker].value} for worker in terms.workers if worker in workers
        ],
        last_item_at=rfc3339_or_none(counts.last_at),
    )
