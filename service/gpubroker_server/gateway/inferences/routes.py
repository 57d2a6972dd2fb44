"""Queued inferences: submitted here, and tasks from then on."""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from fastapi import Response

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.explain.explain import stands_aside
from gpubroker_server.core.serving.batching import packed
from gpubroker_server.gateway.http.call import JSON_LENGTH, Call, answer
from gpubroker_server.gateway.http.concurrency import OneAtATime
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import PARTS, Resource
from gpubroker_server.gateway.inferences.inferences import (
    NO_OBJECTS,
    SubmitInference,
    demand_of_inference,
    request_of,
    spec_of_inference,
    task_of_inference,
)
from gpubroker_server.gateway.proxy.residency.residencies import Residencies
from gpubroker_server.gateway.proxy.residency.residency import UnknownModel
from gpubroker_server.gateway.status.records import JUST_ACCEPTED
from gpubroker_server.gateway.status.task_view import task_view
from gpubroker_server.gateway.status.views import TaskView
from gpubroker_server.gateway.submission.submissions import IdempotencyKey, Submissions
from gpubroker_server.gateway.submission.timing import dependencies_of, stands_for, timing_of
from gpubroker_server.ports.store import RunSpec

resource = Resource("models")

_INLINE_BYTES = 64 * 1024
"""The values of larger requests are packed on a thread."""


class NamedObjects(Protocol):
    async def values_of(self, tenant: str, named: Mapping[int, str]) -> Mapping[str, bytes]:
        """The objects that inputs name, by id; `named` is by index of the input. Raises Problem."""


@dataclass(frozen=True, slots=True)
class InferenceParts:
    """What the routes of inferences need."""

    submissions: Submissions
    objects: NamedObjects
    residencies: Residencies | None
    reads: OneAtATime = field(default_factory=lambda: OneAtATime("inferences on objects", max_waiting=64))
    """One inference has its objects in memory at a time."""


Parts = Annotated[InferenceParts, PARTS]


@resource.route(
    "POST /inferences",
    "inferences_submit",
    Scope.MODELS_INFER,
    TaskView,
    "malformed-json priority-not-allowed not-found payload-too-large unsupported-media-type "
    "validation-failed exceeds-capacity no-matching-device exceeds-maximum exceeds-quota "
    "idempotency-key-reused too-many-requests result-damaged store-unavailable",
    status_code=202,
    response_description="It is on disk, and sent to its model when that is loaded and its turn has come.",
    openapi_extra={
        "parameters": [
            {
                "name": JSON_LENGTH,
                "in": "header",
                "description": "The length of the JSON, if values of tensors follow it as bytes "
                "(`binary_data_size`), as in Triton's protocol.",
                "schema": {"type": "integer", "minimum": 0},
            }
        ],
        "requestBody": {
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        },
    },
)
async def submit_inference(
    call: Call, parts: Parts, body: SubmitInference, idempotency_key: IdempotencyKey = None
) -> Response:
    """Submit an inference that waits in the queue for its model.

    It is a task: `/tasks/{id}` has its state, `/tasks/{id}/result` the model's answer. While it waits, its
    model stays wanted. It may be sent to the model more than once; one answer counts.
    """
    submissions = parts.submissions
    live_of = submissions.records.live
    try:
        if not submissions.permissions.policy.serving.is_anywhere:
            raise Problem("not-found", "no model server is configured; set triton.servers")
        task = await _new_task(call, submissions, body)
        named = {at: tensor.object for at, tensor in enumerate(body.inputs) if tensor.object is not None}
        async with parts.reads.slot() if named else nullcontext():
            spec = await _spec_of(call, parts, body, task, named)
    except Problem:
        known = await submissions.sent_before(call, idempotency_key, "inference")
        if known is None:
            raise
        return answer(task_view(known.record, live_of(known.record.task)), 202, known.headers)
    record, is_new, headers = await submissions.submit(call, task, spec, idempotency_key, "inference")
    live = JUST_ACCEPTED if is_new else live_of(record.task)
    return answer(task_view(record, live), 202, {**headers, "Location": f"/tasks/{record.task.id}"})


async def _new_task(call: Call, submissions: Submissions, body: SubmitInference) -> Task:
    """Raises Problem for what is wrong with it, except its values."""
    tenant, permissions, capacity = call.identity.tenant, submissions.permissions, submissions.capacity
    permissions.check_stream(body.stream)
    stands, now = await stands_for(submissions.store, body), submissions.clock.now()
    demand = capacity.settled(demand_of_inference(body), "", tenant, body.labels, at="")
    task = task_of_inference(
        body,
        demand,
        tenant,
        submissions.defaults,
        timing_of(body, now),
        id=submissions.ids.task(now),
        now=now,
        after=dependencies_of(body, stands, tenant),
    )
    permissions.check_priority(call.identity, task.priority)
    capacity.check_times(task)
    return task


async def _spec_of(
    call: Call, parts: Parts, body: SubmitInference, task: Task, named: Mapping[int, str]
) -> RunSpec:
    """Large requests are on disk before the row that names them. Raises Problem."""
    objects = await parts.objects.values_of(call.identity.tenant, named) if named else NO_OBJECTS
    binary_data = await call.binary_data()
    size_bytes = len(await call.body()) + sum(map(len, objects.values()))
    if size_bytes > _INLINE_BYTES:
        stored = await asyncio.to_thread(lambda: packed(request_of(body, binary_data, objects)))
    else:
        stored = packed(request_of(body, binary_data, objects))
    if not stands_aside(task):
        await _want_model(parts, body.model, task.priority)
    return spec_of_inference(body, stored, await parts.submissions.put_if_large(stored, task.id))


async def _want_model(parts: Parts, model: str, priority: int) -> None:
    """Ask for the model's memory, if its server is in the ledger. Raises Problem for a model that no server
    has, and for one that would fit nowhere. A server that does not answer now is asked again later."""
    if parts.residencies is None or parts.residencies.holding(model):
        return
    try:
        await parts.residencies.want(model, priority, queued=True)
    except UnknownModel as unknown:
        if not parts.submissions.permissions.policy.serving.others:
            detail = f'there is no model "{model[:100]}": {unknown}; GET /models lists them'
            raise Problem("not-found", detail) from None
    except Problem as problem:
        if problem.kind.status < 500:
            raise
