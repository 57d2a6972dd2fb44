"""Inference requests and responses, which are stored, joined into batches and split again.

Values become bytes once, when a request comes in. Joining and splitting do not look into the bytes.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from gpubroker_server.core.domain.setting_marks import written
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.tensors import BadTensor, Tensor, split_rows

FORMAT: Final = "tensors"
"""The format of a result that is an `InferenceResponse`."""

_LENGTH_BYTES: Final = 4
_OWN_STATE: Final = frozenset({"sequence_id", "sequence_start", "sequence_end"})
"""Parameters of requests for which the model keeps state. Such requests are not joined with others."""


class BatchRules(Struct, frozen=True):
    most_rows: Annotated[int, Meta(ge=1, le=65_536), written("max_size", {})] = 16
    """The most rows in one request to the model, which may itself take fewer; 1 for no batches."""
    delay_seconds: Annotated[Seconds, Meta(ge=0, le=60)] = Seconds(0.005)
    """The longest time that the first request of a batch waits for others."""


class InferenceRequest(Struct, frozen=True):
    inputs: tuple[Tensor, ...]
    version: str = ""
    """The version of the model; empty if the server chooses it."""
    outputs: tuple[str, ...] = ()
    """Names of the wanted outputs; empty for all."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    @property
    def rows(self) -> int:
        """The number of rows of each input; 0 if the inputs differ in it."""
        counts = {tensor.rows for tensor in self.inputs}
        return counts.pop() if len(counts) == 1 else 0

    @property
    def may_be_joined(self) -> bool:
        """True if the request can be joined with others along the first dimension."""
        is_in_memory = not any(tensor.stored for tensor in self.inputs)
        return self.rows > 0 and is_in_memory and not _OWN_STATE & self.parameters.keys()

    def batch_key(self) -> tuple[Any, ...]:
        """Return a key that is equal for requests that may share a batch, because they differ only in their
        rows."""
        inputs = tuple((tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in self.inputs)
        return self.version, inputs, self.outputs, json.dumps(self.parameters, sort_keys=True)


class InferenceResponse(Struct, frozen=True):
    model: str
    version: str
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


def batches(requests: Sequence[InferenceRequest], most_rows: int) -> list[list[int]]:
    """Return the indexes of the requests of each batch, ordered by the first request of each. A batch of
    several requests has at most `most_rows` rows."""
    open_batches: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
    all_batches: list[list[int]] = []
    for index, request in enumerate(requests):
        if most_rows < 2 or not request.may_be_joined:
            all_batches.append([index])
            continue
        key = request.batch_key()
        rows, batch = open_batches.get(key, (most_rows, []))
        if rows + request.rows > most_rows:
            rows, batch = 0, []
            all_batches.append(batch)
        batch.append(index)
        open_batches[key] = rows + request.rows, batch
    return all_batches


def joined(requests: Sequence[InferenceRequest]) -> InferenceRequest:
    """Return the requests of a batch as one request with all their rows."""
    first, *others = requests
    if not others:
        return first
    rows = sum(request.rows for request in requests)
    inputs = (
        replace(
            tensor, shape=(rows, *tensor.shape[1:]), data=b"".join(q.inputs[index].data for q in requests)
        )
        for index, tensor in enumerate(first.inputs)
    )
    return replace(first, inputs=tuple(inputs), id="")


def split(response: InferenceResponse, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
    """Return the response to each request of a batch, split from the response to the batch. Raises BadTensor
    if the model did not answer by rows."""
    rows = [request.rows for request in requests]
    outputs = [split_rows(tensor, rows) for tensor in response.outputs]
    return [
        replace(response, outputs=tuple(parts[index] for parts in outputs), id=request.id)
        for index, request in enumerate(requests)
    ]


def packed(message: InferenceRequest | InferenceResponse) -> bytes:
    """Return the stored form of a message: the length of the head, the head as JSON, and the data of the
    tensors."""
    tensors = message.inputs if isinstance(message, InferenceRequest) else message.outputs
    head: dict[str, Any] = {
        "id": message.id,
        "version": message.version,
        "parameters": dict(message.parameters),
        "tensors": [_row_of(each_tensor) for each_tensor in tensors],
    }
    if isinstance(message, InferenceRequest):
        head["outputs"] = list(message.outputs)
    else:
        head["model"] = message.model
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((len(text).to_bytes(_LENGTH_BYTES, "little"), text, *(tensor.data for tensor in tensors)))


def _row_of(tensor: Tensor) -> list[Any]:
    """Return the row of the head that describes a tensor. If an object has the tensor's data, its digest and
    size come last."""
    stored = [tensor.stored, tensor.stored_bytes] if tensor.stored else []
    return [tensor.name, tensor.datatype, list(tensor.shape), len(tensor.data), *stored]


def request_in(data: bytes) -> InferenceRequest:
    """Return the request that `packed` stored. Raises BadTensor."""
    head, tensors = _unpacked(data)
    return InferenceRequest(tensors, head["version"], tuple(head["outputs"]), head["parameters"], head["id"])


def response_in(data: bytes) -> InferenceResponse:
    """Return the response that `packed` stored. Raises BadTensor."""
    head, tensors = _unpacked(data)
    return InferenceResponse(head["model"], head["version"], tensors, head["parameters"], head["id"])


def _unpacked(data: bytes) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        head = json.loads(data[_LENGTH_BYTES:begin])
        rows = [(name, datatype, tuple(shape), *rest) for name, datatype, shape, *rest in head["tensors"]]
    except (ValueError, KeyError, TypeError) as fault:
        raise BadTensor(f"the stored bytes cannot be read: {fault}") from None
    return head, _sliced(rows, data, begin)


def encoded_request(request: InferenceRequest) -> tuple[bytes, Sequence[Tensor]]:
    """Return a request in Triton's binary form: the JSON, and the tensors whose data follows the JSON."""
    head: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": tensor.size_bytes},
            }
            for tensor in request.inputs
        ],
        "parameters": {**request.parameters, "binary_data_output": True},
    }
    if request.id:
        head["id"] = request.id
    if request.outputs:
        binary = {"binary_data": True}
        head["outputs"] = [{"name": name, "parameters": binary} for name in request.outputs]
    return json.dumps(head, separators=(",", ":")).encode(), request.inputs


def decoded_response(body: bytes, head_bytes: int) -> InferenceResponse:
    """Return the response that `body` has in Triton's binary form, with JSON of `head_bytes` bytes. Raises
    BadTensor."""
    try:
        head = json.loads(body[:head_bytes])
        outputs = [
            (
                str(output["name"]),
                str(output["datatype"]),
                tuple(map(int, output["shape"])),
                int(output["parameters"]["binary_data_size"]),
            )
            for output in head["outputs"]
        ]
        model, version = str(head["model_name"]), str(head["model_version"])
        parameters, id = dict(head.get("parameters") or {}), str(head.get("id") or "")
    except (ValueError, KeyError, TypeError, OverflowError) as fault:
        raise BadTensor(f"the answer cannot be read: {fault!r}") from None
    return InferenceResponse(model, version, _sliced(outputs, body, head_bytes), parameters, id)


def _sliced(rows: Iterable[tuple[Any, ...]], data: bytes, begin: int) -> tuple[Tensor, ...]:
    """Return the tensors of these rows, whose data begins at `begin`. A row has the name, the datatype, the
    shape and the number of bytes; then, if an object has the data, its digest and size. Raises BadTensor if
    the tensors do not fill the data."""
    tensors, at = [], begin
    for name, datatype, shape, size, *stored in rows:
        tensors.append(Tensor(name, datatype, shape, data[at : at + size], *stored))
        at += size
    if at != len(data):
        raise BadTensor(f"the tensors take {at - begin} bytes, and {len(data) - begin} came")
    return tuple(tensors)
