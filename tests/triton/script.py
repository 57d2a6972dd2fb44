"""What a program does with a client of Triton: one list of calls, for the client of any kind."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from msgspec import Struct, field
from tritonclient.utils import InferenceServerException


class Step(Struct, frozen=True):
    method: str
    args: tuple[object, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)


def steps(kit: ModuleType) -> Iterator[Step]:
    """`kit`: the client's module, which has its own classes of inputs and outputs."""
    yield Step("is_server_live")
    yield Step("is_server_ready")
    yield Step("get_server_metadata")
    for model in ("identity_fp32", "nope"):
        yield Step("is_model_ready", (model,))
        yield Step("get_model_metadata", (model,))
        yield Step("get_model_config", (model, "1"))
    yield Step("get_trace_settings")
    yield Step("get_log_settings")
    yield Step("get_system_shared_memory_status")
    yield Step("load_model", ("fails_at_load",))
    yield Step("load_model", ("nope",))
    yield Step("load_model", ("identity_fp32",))
    yield Step("unload_model", ("nope",))
    yield Step("get_model_repository_index")
    yield from inferences(kit)


def inferences(kit: ModuleType) -> Iterator[Step]:
    is_http = kit.__name__.startswith("tritonclient.http")
    small = np.arange(8, dtype=np.float32).reshape(2, 4)
    large = np.arange(1_500_000, dtype=np.float32).reshape(1000, 1500)
    for array in (small, large):
        yield Step("infer", ("identity_fp32", [given(kit, "INPUT0", "FP32", array)]))
    if is_http:
        yield Step("infer", ("identity_fp32", [given(kit, "INPUT0", "FP32", small, binary_data=False)]))
    for how in ("gzip", "deflate"):
        packed = {"request_compression_algorithm": how, "response_compression_algorithm": how}
        if not is_http:
            packed = {"compression_algorithm": how}
        yield Step("infer", ("identity_fp32", [given(kit, "INPUT0", "FP32", small)]), packed)
    texts = np.array([b"", b"one", "zwölf".encode(), b"\xff\x00"], dtype=np.object_)
    yield Step("infer", ("echo_bytes", [given(kit, "text_input", "BYTES", texts)]))
    said = {"request_id": "7", "priority": 1, "timeout": 2_000_000, "parameters": {"foo": "bar"}}
    named = {"model_version": "1", "outputs": [kit.InferRequestedOutput("OUTPUT0")], **said}
    query = {"query_params": {"k": "v w"}} if is_http else {}
    yield Step("infer", ("identity_fp32", [given(kit, "INPUT0", "FP32", small)]), {**named, **query})
    yield Step("infer", ("identity_fp32", [given(kit, "INPUT0", "FP32", small[0])]))
    yield Step("infer", ("identity_fp32", [given(kit, "INPUT0", "INT32", small.astype(np.int32))]))
    yield Step("infer", ("nope", [given(kit, "INPUT0", "FP32", small)]))
    yield Step("infer", ("stream_n", [given(kit, "text_input", "BYTES", texts[:1])]))


def given(kit: ModuleType, name: str, datatype: str, array: Any, **options: object) -> Any:
    tensor = kit.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, **options)
    return tensor


async def told(kit: ModuleType, client: Any, headers: Mapping[str, str]) -> list[object]:
    """What the client makes of each answer, as values that can be compared."""
    return [await _told(getattr(client, step.method), step, dict(headers)) for step in steps(kit)]


async def _told(call: Callable[..., Any], step: Step, headers: dict[str, str]) -> object:
    try:
        answer = call(*step.args, headers=headers, **step.options)
        if inspect.isawaitable(answer):
            answer = await answer
    except InferenceServerException as error:
        return step.method, error.status(), error.message()
    if step.method != "infer":
        return step.method, answer
    response = answer.get_response()
    if not isinstance(response, dict):
        return step.method, response.SerializeToString(deterministic=True)
    arrays = [answer.as_numpy(output["name"]) for output in response["outputs"]]
    return step.method, response, [(array.dtype, array.shape, _content(array)) for array in arrays]


def _content(array: Any) -> object:
    return array.tolist() if array.dtype == object else array.tobytes()
