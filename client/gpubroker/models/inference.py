"""Requests to models: the options, and what is sent for `infer` and `infer_later`."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

from gpubroker.errors import BrokerError, WrongArgument
from gpubroker.models.stored_object import StoredObject
from gpubroker.models.tensors import HEAD_BYTES, check_names, encode, tensor_of
from gpubroker.tasks.submission import plain
from gpubroker.transport.exchange import Call
from gpubroker.transport.operations import path_part

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_PATIENCE_SECONDS = 300.0
"""The longest wait for an answer, in which the model is loaded, a slot gets free, and the model computes. The
service has its own limit for each of these, and answers when one is exceeded."""


class InferOptions(TypedDict, total=False):
    """The keyword arguments of `infer`."""

    priority: int | str
    """The priority from 0 to 100, or the name of a band; orders the requests that wait for the model."""
    model_type: str
    """The kind of model, for which the operator may have set a priority."""
    outputs: Sequence[str]
    """The outputs that are wanted. Default: all."""
    version: int | str
    """The version of the model. Default: the server's choice."""
    parameters: Mapping[str, Any]
    """Parameters of the model, passed to Triton unchanged."""
    timeout_seconds: float
    """The longest wait for a slot. A request that reaches it is not retried."""
    idempotent: bool
    """True if it does no harm to ask twice: the request is then sent again even if it may have been carried
    out, and the service may send it to another server."""


Inputs = Mapping[str, Any]
"""Name -> a numpy array, or what numpy makes an array of; a `StoredObject`; or a mapping with `datatype`,
`shape` and `data` as in Triton's protocol, or with `object`, an object's id. A mapping needs no numpy."""


class InferLaterOptions(TypedDict, total=False):
    """The keyword arguments of `infer_later`."""

    version: str
    """The version of the model."""
    outputs: Sequence[str]
    """The outputs that are wanted. Default: all."""
    parameters: Mapping[str, Any]
    """Parameters of the model, passed to Triton unchanged."""
    id: str
    """An id that comes back with the answer."""
    name: str
    """The name in lists."""
    model_type: str
    """The kind of work, for which the operator may have set priority, retries and time limit."""
    priority: int | str
    """The priority from 0 to 100, or the name of a band; also the priority at which the model is loaded for
    this request."""
    stream: str
    labels: Mapping[str, str]
    max_retries: int
    timeout_seconds: float
    after: Sequence[Any]
    """The tasks, or their ids, that must end first."""
    not_before: datetime | str
    queue_ttl_seconds: float
    deadline_at: datetime | str
    deadline_seconds: float
    expected_seconds: float
    idempotency_key: str
    """A key: inferences with the same key and body make one task. Default: a new key."""


class InferStreamOptions(TypedDict, total=False):
    """The keyword arguments of `infer_stream`, with the same meaning as for `infer`."""

    priority: int | str
    model_type: str
    version: int | str
    timeout_seconds: float


def stream_call(model: str, inputs: Mapping[str, Any], options: InferStreamOptions) -> Call:
    """Return the call of a streamed request. Raises WrongArgument for invalid inputs or options."""
    _check_options("infer_stream", options, InferStreamOptions)
    check_model(model, "infer_stream()")
    check_names(inputs)
    try:
        body = json.dumps(dict(inputs), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise WrongArgument(
            f"the inputs cannot be written as JSON ({error}); pass numbers, booleans, text or lists of them"
        ) from None
    headers = {"Accept-Encoding": "identity", **_queue_headers(options)}
    path = f"/v2/models/{path_part(model)}{_versioned(options)}/generate_stream"
    return Call(
        "POST", path, body=body, headers=headers, patience_seconds=_PATIENCE_SECONDS, repeatable=False
    )


def event_in(line: str) -> dict[str, Any] | None:
    """Return the event that a line of `generate_stream` holds; None for a line between events. Raises
    BrokerError if the event is an error of the model."""
    name, _, text = line.partition(":")
    if name != "data":
        return None
    try:
        event: dict[str, Any] = json.loads(text)
    except ValueError:
        raise BrokerError(f"cannot read an event of the model: {text[:80]!r}", code="not-a-model") from None
    if set(event) == {"error"}:
        raise BrokerError(str(event["error"]))
    return event


def _queue_headers(options: Mapping[str, Any]) -> dict[str, str]:
    headers = {
        "x-priority": options.get("priority"),
        "x-model-type": options.get("model_type"),
        "x-timeout-seconds": options.get("timeout_seconds"),
    }
    return {name: str(value) for name, value in headers.items() if value is not None}


def _versioned(options: Mapping[str, Any]) -> str:
    version = options.get("version")
    return "" if version is None else f"/versions/{path_part(str(version))}"


def infer_call(model: str, inputs: "Mapping[str, ArrayLike]", options: InferOptions) -> Call:
    """Return the call of a request; it is repeatable only if the options have `idempotent`. Raises
    WrongArgument."""
    _check_options("infer", options, InferOptions)
    check_model(model, "infer()")
    body, head_bytes = encode(inputs, options.get("outputs"), options.get("parameters"))
    is_idempotent = options.get("idempotent", False)
    headers = {
        "Content-Type": "application/octet-stream",
        HEAD_BYTES: str(head_bytes),
        # Compressing tensors costs more time than it saves.
        "Accept-Encoding": "identity",
        **_queue_headers(options),
        **({"x-idempotent": "true"} if is_idempotent else {}),
    }
    return Call(
        "POST",
        f"/v2/models/{path_part(model)}{_versioned(options)}/infer",
        body=body,
        headers=headers,
        patience_seconds=_PATIENCE_SECONDS,
        repeatable=is_idempotent,
    )


INLINE_BYTES = 4 * 2**20
"""The most bytes of values that are sent with a queued inference. If there are more, the large values are
uploaded as objects."""

_UPLOADED_BYTES = 128 * 1024


def tensors_of(model: str, inputs: Inputs, options: InferLaterOptions) -> list[tuple[dict[str, Any], bytes]]:
    """Return the inputs of a queued inference: the description of each, and its bytes if it names no object.
    Raises WrongArgument."""
    _check_options("infer_later", options, InferLaterOptions)
    check_model(model, "infer_later()")
    check_names(inputs)
    return [_input(name, value) for name, value in inputs.items()]


def uploads_of(tensors: Sequence[tuple[dict[str, Any], bytes]]) -> list[int]:
    """Return the indexes of the inputs to send as objects; empty if all fit into one request."""
    if sum(len(data) for _, data in tensors) <= INLINE_BYTES:
        return []
    return [at for at, (_, data) in enumerate(tensors) if len(data) > _UPLOADED_BYTES]


def as_object(tensor: Mapping[str, Any], id: str) -> dict[str, Any]:
    """Return the description of an input whose bytes are an object."""
    return {**{key: value for key, value in tensor.items() if key != "parameters"}, "object": id}


def inference_body(
    model: str, tensors: Sequence[tuple[dict[str, Any], bytes]], options: InferLaterOptions
) -> tuple[bytes, dict[str, str]]:
    """Return the body of `POST /inferences`, and the headers that describe it. Raises WrongArgument."""
    given = {name: plain(name, value) for name, value in options.items() if name != "idempotency_key"}
    if "outputs" in given:
        given["outputs"] = [{"name": name} for name in given["outputs"]]
    body = {"model": model, "inputs": [tensor for tensor, _ in tensors], **given}
    try:
        head = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise WrongArgument(
            f"the inputs cannot be written as JSON ({error}); pass numbers, booleans or text"
        ) from None
    data = b"".join(data for _, data in tensors)
    if not data:
        return head, {}
    return head + data, {HEAD_BYTES: str(len(head)), "Content-Type": "application/octet-stream"}


def check_model(model: object, method: str) -> None:
    """Check that `model` can be the name of a model; an empty name would be the path of another resource.
    Raises WrongArgument."""
    if not isinstance(model, str) or not model:
        raise WrongArgument(f"{method} needs the name of a model, not {model!r}; models() lists them")


def _check_options(method: str, options: Mapping[str, Any], known: type) -> None:
    for name in options:
        if name not in known.__annotations__:
            raise WrongArgument(
                f"{method}() has no option {name}; options: {', '.join(sorted(known.__annotations__))}"
            )


def _input(name: str, value: Any) -> tuple[dict[str, Any], bytes]:
    if isinstance(value, StoredObject):
        value = value.as_input(name)
    return ({"name": name, **value}, b"") if isinstance(value, Mapping) else tensor_of(name, value)
