"""Requests to models that Triton serves behind the service, each a generator as in `gpubroker.operations`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict
from urllib.parse import quote

from gpubroker.errors import BrokerError, ModelUnavailable, WrongArgument
from gpubroker.models.tensors import HEAD_BYTES, read, written
from gpubroker.transport.exchange import Answer, Call, Steps, exchange

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_PATIENCE_SECONDS = 300.0
"""The service may have to load the model and to wait for its turn, and then the model works. Of all three it
tells by itself when they take too long, as its operator has set."""


class InferOptions(TypedDict, total=False):
    """What `infer` takes by name besides the model and its inputs."""

    priority: int | str
    """0 to 100, or the name of a band: who waits longer in front of the model."""
    model_type: str
    """Kind of model, for which the operator may have set a priority."""
    outputs: Sequence[str]
    """Only these; left out, all that the model has."""
    version: int | str
    """Of the model; left out, as the server chooses."""
    parameters: Mapping[str, Any]
    """The model's own, passed to Triton untouched."""
    timeout_seconds: float
    """So long it may wait for its turn; then it is not tried again either."""
    idempotent: bool
    """To ask twice does no harm: it is sent again, by the service to another server too, where nobody knows
    whether it was carried out."""


def infer(
    model: str, inputs: "Mapping[str, ArrayLike]", options: InferOptions, retry_seconds: float
) -> "Steps[dict[str, NDArray[Any]]]":
    """Unless it is idempotent it is sent again only after an answer which says that nothing was done."""
    for unknown in options.keys() - InferOptions.__annotations__:
        known = ", ".join(InferOptions.__annotations__)
        raise WrongArgument(f"infer() knows no option {unknown}; there are {known}")
    check_model(model, "infer()")
    body, head_bytes = written(inputs, options.get("outputs"), options.get("parameters"))
    repeatable = options.get("idempotent", False)
    version, timeout_seconds = options.get("version"), options.get("timeout_seconds")
    said = {
        "x-priority": options.get("priority"),
        "x-model-type": options.get("model_type"),
        "x-timeout-seconds": timeout_seconds,
        "x-idempotent": "true" if repeatable else None,
    }
    headers = {
        "Content-Type": "application/octet-stream",
        HEAD_BYTES: str(head_bytes),
        # Else the server would compress what the client then has to open.
        "Accept-Encoding": "identity",
        **{name: str(value) for name, value in said.items() if value is not None},
    }
    path = f"/v2/models/{quote(model, safe='')}"
    if version is not None:
        path += f"/versions/{quote(str(version), safe='')}"
    call = Call(
        "POST",
        f"{path}/infer",
        body=body,
        headers=headers,
        patience_seconds=_PATIENCE_SECONDS,
        repeatable=repeatable,
    )
    answer = yield from about(model, call, retry_seconds if timeout_seconds is None else 0.0)
    return read(answer)


def check_model(model: object, asked: str) -> None:
    """Raises WrongArgument for what can be no name: as a part of a path it would ask for something else."""
    if not isinstance(model, str) or not model:
        raise WrongArgument(f"{asked} needs the name of a model, and {model!r} is none; models() lists them")


def about(model: str, call: Call, retry_seconds: float) -> Steps[Answer]:
    """As `exchange`; what is said of the model names it."""
    try:
        return (yield from exchange(call, retry_seconds))
    except ModelUnavailable as fault:
        fault.model = model
        raise


def triton_healthy() -> Steps[bool]:
    try:
        yield from exchange(Call("GET", "/v2/health/ready"), 0.0)
    except BrokerError as fault:
        if fault.status == 0:
            raise
        return False
    return True
