"""Queued inferences: submitted here, and tasks from then on."""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext

from fastapi import APIRouter, Response

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.explain.explain import stands_aside
from gpubroker_server.core.serving.batching import packed
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import HEAD_LENGTH, Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.inferences.inferences import (
    NO_OBJECTS,
    SubmitInference,
    demand_of_inference,
    request_of,
    spec_of_inference,
    task_of_inference,
)
from gpubroker_server.gateway.objects.objects import values_of
from gpubroker_server.gateway.proxy.residency.residency import UnknownModel
from gpubroker_server.gateway.status.pending import NOT_YET_SEEN
from gpubroker_server.gateway.status.records import live_of
from gpubroker_server.gateway.status.task_view import Live, task_view
from gpubroker_server.gateway.status.views import TaskView
from gpubroker_server.gateway.submission.dependencies import dependencies_of, stands_for
from gpubroker_server.gateway.submission.permission import check_priority, check_stream
from gpubroker_server.gateway.submission.submissions import digest_if_large
from gpubroker_server.gateway.submission.submitting import IdempotencyKey, sent_before, submitted
from gpubroker_server.gateway.submission.timing import timing_of
from gpubroker_server.ports.store import RunSpec

router = APIRouter(route_class=DirectRoute, tags=["models"])

_AT_ONCE_BYTES = 64 * 1024
"""The values of larger requests are turned into bytes on a thread."""

_JUST_ACCEPTED = Live(leases=[], uuids={}, pending=NOT_YET_SEEN)


@router.post(
    "/inferences",
    operation_id="inferences_submit",
    dependencies=[needs(Scope.MODELS_INFER)],
    status_code=202,
    response_model=TaskView,
    response_description="It is on disk, and answered when its model is there and its turn has come.",
    responses=problems(
        "malformed-json",
        "unauthenticated",
        "forbidden",
        "priority-not-allowed",
        "not-found",
        "payload-too-large",
        "unsupported-media-type",
        "validation-failed",
        "exceeds-capacity",
        "no-matching-device",
        "exceeds-maximum",
        "exceeds-quota",
        "idempotency-key-reused",
        "too-many-requests",
        "result-damaged",
        "store-unavailable",
    ),
    openapi_extra={
        "parameters": [
            {
                "name": HEAD_LENGTH,
                "in": "header",
                "description": "How long the JSON is, if values of tensors follow it as bytes "
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
    call: Call, body: SubmitInference, idempotency_key: IdempotencyKey = None
) -> Response:
    """Submit an inference that waits in the queue for its model.

    It is a task: `/tasks/{id}` tells how it stands, `/tasks/{id}/result` what the model answered. While it
    waits its model stays wanted. It may be asked more than once; one answer counts.
    """
    try:
        if not call.parts.policy.serving.is_anywhere:
            raise Problem("not-found", "no server of models is configured; set triton.servers")
        task = await _taken_in(call, body)
        named = {at: tensor.object for at, tensor in enumerate(body.inputs) if tensor.object is not None}
        async with call.parts.reads.take() if named else nullcontext():
            spec = await _taken_spec(call, body, task, named)
    except Problem:
        known = await sent_before(call, idempotency_key, "inference")
        if known is None:
            raise
        return answer(task_view(known.record, live_of(call.parts, known.record.task)), 202, known.headers)
    record, is_new, headers = await submitted(call, task, spec, idempotency_key, "inference")
    live = _JUST_ACCEPTED if is_new else live_of(call.parts, record.task)
    return answer(task_view(record, live), 202, {**headers, "Location": f"/tasks/{record.task.id}"})


async def _taken_spec(call: Call, body: SubmitInference, task: Task, named: Mapping[int, str]) -> RunSpec:
    """Large requests are on disk before the row that names them. Raises Problem."""
    stored = await _stored(call, body, await values_of(call, named) if named else NO_OBJECTS)
    if not stands_aside(task):
        await _bring_model(call, body.model, task.priority)
    return spec_of_inference(body, stored, await digest_if_large(call, stored, task.id))


async def _stored(call: Call, body: SubmitInference, objects: Mapping[str, bytes]) -> bytes:
    """What is asked, as it is stored. Raises Problem."""
    behind = await call.behind()
    size_bytes = len(await call.body()) + sum(map(len, objects.values()))
    if size_bytes > _AT_ONCE_BYTES:
        return await asyncio.to_thread(lambda: packed(request_of(body, behind, objects)))
    return packed(request_of(body, behind, objects))


async def _taken_in(call: Call, body: SubmitInference) -> Task:
    """Raises Problem for what is wrong with it, but for its values."""
    parts, tenant = call.parts, call.identity.tenant
    check_stream(parts.policy, body.stream)
    stands, now = await stands_for(call, body), parts.clock.now()
    demand = parts.capacity.settled(demand_of_inference(body), "", tenant, body.labels, at="")
    after, timing = dependencies_of(body, stands, tenant), timing_of(body, now)
    id = parts.ids.task(now)
    task = task_of_inference(body, demand, tenant, parts.defaults, timing, id=id, now=now, after=after)
    check_priority(call, task.priority)
    parts.capacity.check_times(task)
    return task


async def _bring_model(call: Call, model: str, priority: int) -> None:
    """Where its memory is in the ledger it is wanted from now on. Raises Problem for one that no server has,
    and for one that would fit nowhere; a server that says nothing now is asked again later."""
    parts = call.parts
    if parts.residencies is None or parts.residencies.holding(model):
        return
    try:
        await parts.residencies.want(model, priority, queued=True)
    except UnknownModel as unknown:
        if not parts.policy.serving.others:
            detail = f'there is no model "{model[:100]}": {unknown}; GET /models lists them'
            raise Problem("not-found", detail) from None
    except Problem as problem:
        if problem.kind.status < 500:
            raise
