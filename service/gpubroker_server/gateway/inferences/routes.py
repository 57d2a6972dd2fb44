"""Routes that submit queued inferences and return their outputs. A queued inference is a task."""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol

from fastapi import Query, Response
from gpubroker.wire.tasks import Task as Shown
from msgspec.structs import replace
from pydantic import Field, StringConstraints, WithJsonSchema
from pydantic_core import to_json

from gpubroker_server.core.admission.admit import with_run
from gpubroker_server.core.admission.submission import Asked, Submission
from gpubroker_server.core.domain.holders import Inference
from gpubroker_server.core.domain.stored_objects import StoredObject
from gpubroker_server.core.domain.submission import INFERENCE_KIND as KIND
from gpubroker_server.core.explain.explain import is_deferred
from gpubroker_server.core.serving.batching import FORMAT, InferenceRequest, packed, response_in
from gpubroker_server.core.serving.tensors import BadTensor, Tensor, checked, tensor_of
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.records import JUST_ACCEPTED, bytes_of
from gpubroker_server.gateway.status.task_view import task_view
from gpubroker_server.gateway.submission.submissions import (
    IdempotencyKey,
    sent_key,
)
from gpubroker_server.gateway.submission.task_body import MaxRetries, Priority, StreamName, TimeoutSeconds
from gpubroker_server.gateway.submission.timing import Timed
from gpubroker_server.gateway.submission.translation import dependencies_of, times_of
from gpubroker_server.http.bodies import BinaryBody, Body, JsonBody, Labels, Name, WaitQuery, line
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import DEMAND_PROBLEMS, QUEUE_PROBLEMS, Fault, Problem
from gpubroker_server.http.routing import JSON_LENGTH, BinaryCall, Call, Resource, answer, app_part
from gpubroker_server.ports.model_servers import UnknownModel
from gpubroker_server.ports.store import AdmittedTask, RunSpec

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
]  # fmt: skip


NO_OBJECTS: Mapping[str, bytes] = MappingProxyType({})
NO_KEPT: Mapping[str, StoredObject] = MappingProxyType({})


class TensorParameters(Body):
    binary_data_size: Annotated[
        int,
        Field(
            ge=0,
            description="The bytes after the JSON that are this tensor's values, as in Triton's protocol.",
        ),
    ]


class InputTensor(Body):
    """A tensor as in Triton's protocol. Its values are in `data`, after the JSON, or in an object."""

    name: Annotated[str, line(1000, 1)]
    datatype: Datatype
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=64)]
    data: Annotated[
        list[Any] | None,
        WithJsonSchema({"type": "array"}),
        Field(description="The values row by row, nested or flat: numbers, booleans, or text for BYTES."),
    ] = None
    parameters: TensorParameters | None = None
    object: Annotated[
        str | None,
        StringConstraints(max_length=100),
        WithJsonSchema({"type": "string", "maxLength": 100}),
        Field(description="Id of an object (`POST /objects`) with its values in Triton's binary format."),
    ] = None


class WantedTensor(Body):
    name: Annotated[str, line(1000, 1)]


class SubmitInference(Timed, BinaryBody):
    """One inference. Only `model` and `inputs` are required."""

    model: Annotated[
        str,
        StringConstraints(pattern=r"^[^/\x00-\x1f\x7f]{1,500}$"),
        Field(description="The name of the model on its server.", examples=["resnet"]),
    ]
    version: Annotated[
        str,
        StringConstraints(pattern=r"^[0-9]{0,18}$"),
        Field(description="The version of the model. Default: the server chooses."),
    ] = ""
    id: Annotated[str, line(500), Field(description="Returned with the answer.")] = ""
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=1000)]
    outputs: Annotated[
        list[WantedTensor], Field(max_length=1000, description="The outputs to return. Default: all outputs.")
    ] = Field(default_factory=list)
    parameters: Annotated[
        dict[Annotated[str, line(500, 1)], str | bool | int | float],
        Field(max_length=100, description="Passed on to the model."),
    ] = Field(default_factory=dict)

    name: Name = ""
    model_type: Annotated[Name, Field(description="Its defaults hold for what is left out.")] = ""
    priority: Priority | None = None
    stream: StreamName = ""
    max_retries: MaxRetries | None = None
    timeout_seconds: TimeoutSeconds | None = None
    labels: Labels = Field(default_factory=dict)


def request_of(
    body: SubmitInference,
    binary_data: bytes = b"",
    objects: Mapping[str, bytes] = NO_OBJECTS,
    passed: Mapping[str, StoredObject] = NO_KEPT,
) -> InferenceRequest:
    """Return the request that the model gets.

    `binary_data` is what followed the JSON. `objects` maps an id to the bytes of an object that is copied
    into the request. `passed` maps an id to an object that is read when the request is sent. Raises one
    Problem with all faults.
    """
    faults = [
        *_named_twice("inputs", [tensor.name for tensor in body.inputs]),
        *_named_twice("outputs", [tensor.name for tensor in body.outputs]),
    ]
    tensors: list[Tensor] = []
    begin = 0
    for index, given in enumerate(body.inputs):
        size = 0 if given.parameters is None else given.parameters.binary_data_size
        try:
            tensors.append(_tensor(given, binary_data[begin : begin + size], objects, passed))
        except BadTensor as bad:
            member = "data" if given.parameters is None else "parameters/binary_data_size"
            member = member if given.object is None else "object"
            faults.append(Fault(pointer=f"/inputs/{index}/{member}", detail=str(bad), code="bad-tensor"))
        begin += size
    if begin != len(binary_data) and not faults:
        detail = f"{len(binary_data)} bytes follow the JSON, and the inputs name {begin} (binary_data_size)"
        faults.append(Fault(pointer="/inputs", detail=detail, code="bad-tensor"))
    if faults:
        raise invalid(*faults)
    outputs = tuple(tensor.name for tensor in body.outputs)
    return InferenceRequest(tuple(tensors), body.version, outputs, body.parameters, body.id)


def _tensor(
    given: InputTensor,
    binary_data: bytes,
    objects: Mapping[str, bytes],
    passed: Mapping[str, StoredObject],
) -> Tensor:
    """Return one input with its values. Raises BadTensor."""
    if [given.data, given.parameters, given.object].count(None) != 2:
        raise BadTensor(
            "give its values in exactly one way: data, or parameters with binary_data_size if they follow "
            "the JSON, or object"
        )
    if given.data is not None:
        return tensor_of(given.name, given.datatype, given.shape, given.data)
    if given.object is not None and (kept := passed.get(given.object)) is not None:
        shape = tuple(given.shape)
        return checked(Tensor(given.name, given.datatype, shape, b"", kept.digest, kept.size_bytes))
    data = binary_data if given.object is None else objects[given.object]
    return checked(Tensor(given.name, given.datatype, tuple(given.shape), data))


def _named_twice(field: str, names: list[str]) -> list[Fault]:
    return [
        Fault(pointer=f"/{field}/{index}/name", detail=f'"{name}" is already named', code="named-twice")
        for index, name in enumerate(names)
        if name in names[:index]
    ]


def submission_of_inference(body: SubmitInference, tenant: str) -> Submission:
    """Return the submission of a body, without the values of its inputs. It asks for no resources, because
    the model holds the memory."""
    return Submission(
        tenant=tenant,
        spec=RunSpec(KIND, body.model, labels=body.labels, model_type=body.model_type),
        demand=Asked(gpus=0, cpu=0.0, memory_mb=0, answered_by=body.model),
        name=body.name,
        priority=body.priority,
        max_retries=body.max_retries,
        timeout_seconds=body.timeout_seconds,
        expected_seconds=body.expected_seconds,
        times=times_of(body),
        after=dependencies_of(body),
        stream=body.stream,
    )


resource = Resource("models")

_INLINE_BYTES = 64 * 1024
"""The size in bytes above which the values of a request are packed on a thread, and an object is not copied
into the request."""


class NamedObjects(Protocol):
    """Access to the stored objects that inputs name."""

    async def named(self, tenant: str, named: Mapping[int, str]) -> Mapping[str, StoredObject]:
        """Return the objects that inputs name, by id. `named` maps the index of an input to the id of its
        object. Raises Problem if the tenant lacks one."""

    async def values_of(self, kept: Iterable[StoredObject]) -> Mapping[str, bytes]:
        """Return the bytes of these objects, by id. Raises Problem if bytes are missing or damaged."""


@resource.route(
    "POST /inferences",
    "inferences_submit",
    Scope.MODELS_INFER,
    Shown,
    f"malformed-json not-found payload-too-large unsupported-media-type too-many-requests result-damaged "
    f"{DEMAND_PROBLEMS} {QUEUE_PROBLEMS}",
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
    call: BinaryCall,
    parts: Parts,
    objects: Annotated[NamedObjects, app_part(NamedObjects)],
    body: JsonBody[SubmitInference],
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Submit an inference that waits in the queue for its model.

    An inference is a task: `/tasks/{id}` has its state, and `/tasks/{id}/result` the answer of the model.
    While the inference waits, its model stays wanted. The request may be sent to the model more than once,
    but only one answer is stored.
    """
    submissions, identity = parts.submissions, call.identity

    async def new_inference() -> AdmittedTask:
        if not submissions.permissions.policy.serving.is_anywhere:
            raise Problem("not-found", "no model server is configured; set triton.servers")
        submission = submission_of_inference(body, identity.tenant)
        if submission.priority is None:
            submission = replace(submission, priority=_usual_priority(call, parts, body))
        new = await submissions.admitted(identity, submission, named={})
        submissions.check_queue((new.task,))
        named = {
            index: tensor.object for index, tensor in enumerate(body.inputs) if tensor.object is not None
        }
        async with parts.reads.slot() if named else nullcontext():
            most = submissions.permissions.policy.serving.body_bytes
            new = await _with_values(call, objects, body, new, named, most)
            if new.spec.objects:
                submissions.leader.require("inference_object")
            submissions.check_queue((new.task,))
            if not is_deferred(new.task, submissions.world):
                await _want_model(parts, body.model, new.task.priority)
            return await submissions.with_object(new)

    sent = await sent_key(call, idempotency_key, "inference")
    record, is_new, headers = await submissions.once(identity, sent, "inference", new_inference)
    shown = task_view(record, JUST_ACCEPTED) if is_new else await submissions.records.view(record)
    return answer(shown, 202, {**headers, "Location": f"/tasks/{record.task.id}"})


def _usual_priority(call: BinaryCall, parts: Parts, body: SubmitInference) -> int | None:
    """Return the priority that a request sent directly to the model would have, but not more than the token
    allows. Returns None if the model type of the inference has a default priority."""
    submissions, identity = parts.submissions, call.identity
    if submissions.defaults.named(body.model_type, "").priority is not None:
        return None
    usual = submissions.permissions.policy.serving.priority
    if parts.residencies is not None:
        usual = parts.residencies.priority_of(body.model)
    return min(usual, submissions.permissions.highest_priority(identity))


async def _with_values(
    call: BinaryCall,
    objects: NamedObjects,
    body: SubmitInference,
    new: AdmittedTask,
    named: Mapping[int, str],
    most: int,
) -> AdmittedTask:
    """Return the admitted task with the values of its inputs. Raises Problem if the values have more than
    `most` bytes, or if an object is missing."""
    row_by_id = await objects.named(call.identity.tenant, named) if named else NO_KEPT
    copied = {id for at, id in named.items() if not _is_passed(body.inputs[at], row_by_id[id])}
    passed = {id: row for id, row in row_by_id.items() if id not in copied}
    values = (
        await objects.values_of(row_by_id[id] for id in named.values() if id in copied)
        if copied
        else NO_OBJECTS
    )
    binary_data = await call.binary_data()
    copied_bytes = len(await call.body()) + len(binary_data) + sum(map(len, values.values()))
    size_bytes = copied_bytes + sum(passed[id].size_bytes for id in named.values() if id in passed)
    if size_bytes > most:
        detail = f"a request to a model may have {most} bytes, and this one has {size_bytes}; split it"
        raise invalid(Fault(pointer="/inputs", detail=detail, code="objects-too-large"))
    if copied_bytes > _INLINE_BYTES:
        stored = await asyncio.to_thread(lambda: packed(request_of(body, binary_data, values, passed)))
    else:
        stored = packed(request_of(body, binary_data, values, passed))
    return with_run(new, replace(new.spec, arguments=stored, objects=tuple(sorted(passed))))


def _is_passed(given: InputTensor, kept: StoredObject) -> bool:
    """Return True if the object is read only when the request is sent. A small object is copied into the
    request, and so is one of datatype BYTES, whose values must be checked because they differ in length."""
    return kept.size_bytes > _INLINE_BYTES and given.datatype != "BYTES"


async def _want_model(parts: Parts, model: str, priority: int) -> None:
    """Ask for the model to be loaded, if its server is in the ledger. Raises Problem if no server has the
    model, or if the model fits nowhere. A server that does not answer now is asked again later."""
    reason = "it is in no repository"
    try:
        if parts.residencies is not None:
            if not parts.residencies.holding(model):
                await parts.residencies.want(model, priority, queued=True)
            return
    except UnknownModel as unknown:
        reason = str(unknown)
    except Problem as problem:
        if problem.kind.status < 500:
            raise
        return
    if any(server.lists(model) for server in parts.outside):
        return
    if not any(await asyncio.gather(*(server.may_have(model) for server in parts.outside))):
        raise Problem("not-found", f'there is no model "{model[:100]}": {reason}; GET /models lists them')


@resource.route(
    "GET /inferences/{task_id}/outputs",
    "inferences_outputs",
    Scope.TASKS_READ,
    None,
    "not-found task-not-finished tenant-waits result-damaged",
    response_class=Response,
    responses={
        200: {
            "description": f"JSON that describes the outputs, followed by their bytes (`{JSON_LENGTH}` says "
            "where they begin), as Triton answers in binary.",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def get_outputs(
    call: Call, parts: Parts, task_id: str, query: Annotated[WaitQuery, Query()]
) -> Response:
    """Wait for the end of a queued inference, and fetch its outputs as bytes.

    `/tasks/{id}/result` has the outputs as JSON."""
    records, seconds = parts.submissions.records, min(query.timeout_seconds, parts.limits.wait_seconds)
    record = await records.find(call.identity, task_id)
    if not isinstance(record.task.holder, Inference):
        id = record.task.id
        raise Problem("not-found", f"task {id} is no inference; /tasks/{id}/result has what it left")
    task = (await records.at_its_end(record, seconds)).task
    if not task.is_terminal:
        raise Problem("task-not-finished", task=task.id, state=task.state)
    stored = await records.store.result(task.id)
    data = None if stored is None or stored.format != FORMAT else await bytes_of(records.blobs, stored)
    if data is None:
        raise Problem(
            "not-found",
            f"task {task.id} ({task.state}) has no outputs of a model; see /tasks/{task.id}/result",
        )
    try:
        head, tensors = await asyncio.to_thread(_outputs, data)
    except BadTensor as bad:
        raise Problem("result-damaged", f"the answer that was stored cannot be read: {bad}") from None
    headers = {JSON_LENGTH: str(len(head))}
    return Response(b"".join((head, *tensors)), media_type="application/octet-stream", headers=headers)


def _outputs(data: bytes) -> tuple[bytes, list[bytes]]:
    """Return the JSON that describes the outputs, and their bytes. Raises BadTensor."""
    response = response_in(data)
    described = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in response.outputs
    ]
    head = {"model_name": response.model, "model_version": response.version, "id": response.id}
    text = to_json({**head, "parameters": response.parameters, "outputs": described})
    return text, [tensor.data for tensor in response.outputs]
