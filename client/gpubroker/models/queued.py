"""From arrays to the body of `POST /inferences`: what a model is asked, to be answered when it has time."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

from gpubroker.errors import WrongArgument
from gpubroker.models.objects import StoredObject
from gpubroker.models.requests import check_model
from gpubroker.models.tensors import HEAD_BYTES, described, named
from gpubroker.tasks.submission import plain

Inputs = Mapping[str, Any]
"""By name: an array of numpy, or what it makes one of; an array that was uploaded; or a mapping with
`datatype`, `shape` and `data` as in Triton's protocol, or `object`, the id of one, which needs no numpy."""


class InferLaterOptions(TypedDict, total=False):
    """What `infer_later` takes by name. All may be left out."""

    version: str
    """Of the model."""
    outputs: Sequence[str]
    """All that the model has, if not given."""
    parameters: Mapping[str, Any]
    """Passed on to the model."""
    id: str
    """Comes back with the answer."""
    name: str
    """Shown in lists."""
    priority: int | str
    """0 to 100, or the name of a band; while it waits its model is wanted at that."""
    stream: str
    labels: Mapping[str, str]
    max_retries: int
    timeout_seconds: float
    after: Sequence[Any]
    """Tasks, or their ids, that must have ended before."""
    not_before: datetime | str
    queue_ttl_seconds: float
    deadline_at: datetime | str
    deadline_seconds: float
    expected_seconds: float
    idempotency_key: str
    """Inferences with the same key and body are one. Made up by the SDK if not given."""


def inference_body(model: str, inputs: Inputs, options: InferLaterOptions) -> tuple[bytes, dict[str, str]]:
    """The body of `POST /inferences`, and the headers that say what it is. Raises WrongArgument."""
    known = InferLaterOptions.__annotations__
    for name in options:
        if name not in known:
            raise WrongArgument(f"infer_later() knows no option {name}; there are {', '.join(sorted(known))}")
    check_model(model, "infer_later()")
    given = {name: plain(name, value) for name, value in options.items() if name != "idempotency_key"}
    if "outputs" in given:
        given["outputs"] = [{"name": name} for name in given["outputs"]]
    told = [_tensor(name, said) for name, said in named(inputs).items()]
    body = {"model": model, "inputs": [tensor for tensor, _ in told], **given}
    try:
        head = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise WrongArgument(
            f"the inputs do not fit into JSON ({error}); give numbers, booleans or text"
        ) from None
    behind = b"".join(data for _, data in told)
    if not behind:
        return head, {}
    return head + behind, {HEAD_BYTES: str(len(head)), "Content-Type": "application/octet-stream"}


def _tensor(name: str, given: Any) -> tuple[dict[str, Any], bytes]:
    if isinstance(given, StoredObject):
        given = given.as_input(name)
    return ({"name": name, **given}, b"") if isinstance(given, Mapping) else described(name, given)
