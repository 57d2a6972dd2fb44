"""Queued inferences: schema, the tensors in it, and the task that each is."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.submission import INFERENCE_KIND as KIND
from gpubroker_server.core.domain.task import Dependency, Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.serving.batching import InferenceRequest
from gpubroker_server.core.serving.tensors import BadTensor, Tensor, checked, tensor_of
from gpubroker_server.gateway.http.bodies import BinaryBody, Body, Labels, Name, line
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.problems import Fault
from gpubroker_server.gateway.submission.demand import Defaults
from gpubroker_server.gateway.submission.task_body import MaxRetries, Priority, StreamName, TimeoutSeconds
from gpubroker_server.gateway.submission.timing import Timed, Timing
from gpubroker_server.ports.store import RunSpec

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
]  # fmt: skip


NO_OBJECTS: Mapping[str, bytes] = MappingProxyType({})


class TensorParameters(Body):
    binary_data_size: Annotated[
        int, Field(ge=0, description="How many bytes after the JSON are its values, as in Triton's protocol.")
    ]


class InputTensor(Body):
    """As in Triton's protocol, with its values here, after the JSON, or in an object."""

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
        Field(description="Left out: the server chooses."),
    ] = ""
    id: Annotated[str, line(500), Field(description="Returned with the answer.")] = ""
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=1000)]
    outputs: Annotated[
        list[WantedTensor], Field(max_length=1000, description="Left out: all outputs of the model.")
    ] = Field(default_factory=list)
    parameters: Annotated[
        dict[Annotated[str, line(500, 1)], str | bool | int | float],
        Field(max_length=100, description="Passed on to the model."),
    ] = Field(default_factory=dict)

    name: Name = ""
    priority: Priority | None = None
    stream: StreamName = ""
    max_retries: MaxRetries | None = None
    timeout_seconds: TimeoutSeconds | None = None
    labels: Labels = Field(default_factory=dict)


def request_of(
    body: SubmitInference, binary_data: bytes = b"", objects: Mapping[str, bytes] = NO_OBJECTS
) -> InferenceRequest:
    """The values as the model gets them. `binary_data` followed the JSON; `objects`: the named ones, by id.

    Raises one Problem with all faults.
    """
    faults = [
        *_named_twice("inputs", [tensor.name for tensor in body.inputs]),
        *_named_twice("outputs", [tensor.name for tensor in body.outputs]),
    ]
    tensors: list[Tensor] = []
    begin = 0
    for at, given in enumerate(body.inputs):
        size = 0 if given.parameters is None else given.parameters.binary_data_size
        try:
            tensors.append(_tensor(given, binary_data[begin : begin + size], objects))
        except BadTensor as bad:
            where = "data" if given.parameters is None else "parameters/binary_data_size"
            where = where if given.object is None else "object"
            faults.append(Fault(pointer=f"/inputs/{at}/{where}", detail=str(bad), code="bad-tensor"))
        begin += size
    if begin != len(binary_data) and not faults:
        detail = f"{len(binary_data)} bytes follow the JSON, and the inputs name {begin} (binary_data_size)"
        faults.append(Fault(pointer="/inputs", detail=detail, code="bad-tensor"))
    if faults:
        raise invalid(*faults)
    outputs = tuple(tensor.name for tensor in body.outputs)
    return InferenceRequest(tuple(tensors), body.version, outputs, body.parameters, body.id)


def _tensor(given: InputTensor, binary_data: bytes, objects: Mapping[str, bytes]) -> Tensor:
    """Raises BadTensor."""
    if [given.data, given.parameters, given.object].count(None) != 2:
        raise BadTensor(
            "give its values in exactly one way: data, or parameters with binary_data_size if they follow "
            "the JSON, or object"
        )
    if given.data is not None:
        return tensor_of(given.name, given.datatype, given.shape, given.data)
    data = binary_data if given.object is None else objects[given.object]
    return checked(Tensor(given.name, given.datatype, tuple(given.shape), data))


def _named_twice(field: str, names: list[str]) -> list[Fault]:
    return [
        Fault(pointer=f"/{field}/{at}/name", detail=f'"{name}" is already named', code="named-twice")
        for at, name in enumerate(names)
        if name in names[:at]
    ]


def demand_of_inference(body: SubmitInference) -> Demand:
    return Demand(answered_by=body.model)


def task_of_inference(
    body: SubmitInference,
    demand: Demand,
    tenant: str,
    defaults: Defaults,
    timing: Timing,
    *,
    id: TaskId,
    now: Instant,
    after: tuple[Dependency, ...],
) -> Task:
    timeout = defaults.timeout_seconds if body.timeout_seconds is None else body.timeout_seconds
    return Task(
        id=id,
        tenant=tenant,
        name=body.name,
        priority=defaults.priority if body.priority is None else body.priority,
        demand=demand,
        submitted_at=now,
        max_retries=defaults.max_retries if body.max_retries is None else body.max_retries,
        timeout_seconds=None if timeout is None else Seconds(timeout),
        grace_seconds=Seconds(0.0),
        not_before=timing.not_before,
        after=after,
        awaits=bool(after),
        queue_ttl_seconds=timing.queue_ttl_seconds,
        expires_at=timing.expires_at,
        deadline_at=timing.deadline_at,
        expected_seconds=timing.expected_seconds,
        stream=body.stream,
    )


def spec_of_inference(body: SubmitInference, stored: bytes, digest: str | None) -> RunSpec:
    """`stored`: the packed request; `digest`: of the object that holds it instead of the row."""
    return RunSpec(
        kind=KIND,
        entrypoint=body.model,
        arguments=stored if digest is None else b"",
        arguments_digest=digest,
        labels=body.labels,
    )
