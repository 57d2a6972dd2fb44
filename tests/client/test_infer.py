"""Requests to models: what is sent, what comes back, and decorated functions."""

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpubroker import (
    AsyncBroker,
    Broker,
    BrokerError,
    ModelUnavailable,
    Refused,
    Unreachable,
    WrongArgument,
    inference,
)

from tests.client.conftest import Do
from tests.client.recorded_service import HANG_UP, RecordedService, Reply, Request, a_problem

X = np.array([[1, 2], [3, 4]], np.float32)


def answering(**outputs: tuple[str, list[int], bytes]) -> Reply:
    """Datatype, shape and bytes of each."""
    described = [
        {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, (kind, shape, data) in outputs.items()
    ]
    head = json.dumps({"model_name": "m", "model_version": "1", "outputs": described}).encode()
    data = b"".join(data for _, _, data in outputs.values())
    return Reply(200, head + data, {"Inference-Header-Content-Length": str(len(head))})


ECHO = answering(y=("FP32", [2, 2], X.tobytes()))


def sent(request: Request) -> tuple[dict[str, Any], bytes]:
    """The JSON of its body, and the rest."""
    size = int(request.headers["inference-header-content-length"])
    return json.loads(request.body[:size]), request.body[size:]


def test_arrays_are_sent_and_returned(service: RecordedService, do: Do) -> None:
    service.reply_with(ECHO)
    found = do("infer", "folder/model", {"x": X})
    assert list(found) == ["y"]
    assert found["y"].dtype == np.float32
    assert np.array_equal(found["y"], X)
    found["y"] += 1  # the caller's own
    [request] = service.requests
    assert (request.method, request.path) == ("POST", "/v2/models/folder%2Fmodel/infer")
    assert request.headers["authorization"] == "Bearer gpb_secret"
    assert request.headers["accept-encoding"] == "identity"
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}
    assert sent(request) == (
        {"inputs": [tensor], "parameters": {"binary_data_output": True}},
        X.tobytes(),
    )
    assert not [name for name in request.headers if name.startswith("x-")]


def test_the_options_of_infer_are_sent(service: RecordedService, do: Do) -> None:
    service.reply_with(ECHO)
    wishes = {"priority": "critical", "model_type": "llm", "timeout_seconds": 2.5}
    do("infer", "m", {"x": X}, version=3, outputs=["y"], parameters={"temperature": 0.5}, **wishes)
    [request] = service.requests
    assert request.path == "/v2/models/m/versions/3/infer"
    options = {name: text for name, text in request.headers.items() if name.startswith("x-")}
    assert options == {"x-priority": "critical", "x-model-type": "llm", "x-timeout-seconds": "2.5"}
    head, _ = sent(request)
    assert head["outputs"] == [{"name": "y", "parameters": {"binary_data": True}}]
    assert head["parameters"] == {"temperature": 0.5, "binary_data_output": True}


COUNTED = struct.pack("<I", 2) + b"ab" + struct.pack("<I", 0) + struct.pack("<I", 5) + "zwölf"[:4].encode()
AS_SENT: Mapping[str, tuple[Any, tuple[str, list[int], bytes]]] = {
    "a scalar": (np.int32(7), ("INT32", [], b"\7\0\0\0")),
    "a number": (7, ("INT64", [], b"\7" + bytes(7))),
    "a list": ([1.5], ("FP64", [1], struct.pack("<d", 1.5))),
    "an empty array": (np.zeros((0, 4), np.uint8), ("UINT8", [0, 4], b"")),
    "every other column": (np.arange(8, dtype=np.int16)[::2], ("INT16", [4], struct.pack("<4h", 0, 2, 4, 6))),
    "columns first": (np.asfortranarray(X), ("FP32", [2, 2], X.tobytes())),
    "big-endian": (X.astype(">f4"), ("FP32", [2, 2], X.tobytes())),
    "bool": (np.array([True, False]), ("BOOL", [2], b"\1\0")),
    "half": (np.array([1], np.float16), ("FP16", [1], b"\0\x3c")),
    "bfloat16": (np.array([1], ml_dtypes.bfloat16), ("BF16", [1], b"\x80\x3f")),
    "text and bytes": (np.array(["ab", b"", "zwöl"], object), ("BYTES", [3], COUNTED)),
    "fixed width": (np.array([["ab"]]), ("BYTES", [1, 1], COUNTED[:6])),
    "text of any width": (
        np.array(["ab", "", "zwöl"], np.dtypes.StringDType()),
        ("BYTES", [3], COUNTED),
    ),
    "bytes that end with NULs": ([b"ab\0"], ("BYTES", [1], b"\3\0\0\0ab\0")),
    "text beside bytes": (["ab", b"\xff"], ("BYTES", [2], COUNTED[:6] + b"\1\0\0\0\xff")),
    "one text": ("ab", ("BYTES", [], COUNTED[:6])),
}


@pytest.mark.parametrize("case", AS_SENT)
def test_any_array_is_sent_in_row_major_order_and_little_endian(service: RecordedService, case: str) -> None:
    given, (datatype, shape, data) = AS_SENT[case]
    service.reply_with(ECHO)
    with Broker(service.url, "t") as broker:
        broker.infer("m", {"x": given})
    head, rest = sent(service.requests[0])
    [tensor] = head["inputs"]
    assert (tensor["datatype"], tensor["shape"], rest) == (datatype, shape, data)


def test_text_comes_back_as_bytes_and_bfloat16_as_float32(service: RecordedService, do: Do) -> None:
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    service.reply_with(
        answering(a=("BYTES", [3], COUNTED), b=("BF16", [2], values.tobytes()), c=("BOOL", [0], b""))
    )
    found = do("infer", "m", {})
    assert found["a"].tolist() == [b"ab", b"", "zwöl".encode()]
    assert (found["b"].dtype, found["b"].tolist()) == (np.float32, [1.5, -2.0])
    assert (found["c"].dtype, found["c"].shape) == (np.bool_, (0,))


def test_outputs_sent_as_json_are_decoded(service: RecordedService, do: Do) -> None:
    outputs = [
        {"name": "n", "datatype": "INT8", "shape": [1, 2], "data": [1, 2]},
        {"name": "classes", "datatype": "BYTES", "shape": [1], "data": ["0.9:1:cat"]},
    ]
    service.reply_with(Reply(200, {"outputs": outputs}))
    found = do("infer", "m", {"x": X})
    assert (found["n"].dtype, found["n"].tolist()) == (np.int8, [[1, 2]])
    assert found["classes"].tolist() == [b"0.9:1:cat"]


@pytest.mark.parametrize(
    "reply",
    [Reply(200, b"<html>"), Reply(200, {"outputs": [{"name": "y"}]}), answering(y=("FP32", [9], b""))],
)
def test_an_answer_that_is_not_a_models_is_an_error(service: RecordedService, reply: Reply) -> None:
    service.reply_with(reply)
    with Broker(service.url, "t") as broker, pytest.raises(BrokerError, match="cannot read") as caught:
        broker.infer("m", {"x": X})
    assert caught.value.code == "not-a-model"


def test_invalid_inputs_are_not_sent(service: RecordedService, do: Do) -> None:
    with pytest.raises(WrongArgument, match="input x has the dtype complex128"):
        do("infer", "m", {"x": np.zeros(1, np.complex128)})
    with pytest.raises(WrongArgument, match="an element of type int"):
        do("infer", "m", {"x": np.array([1, "a"], object)})
    with pytest.raises(WrongArgument, match="an element of type int"):
        do("infer", "m", {"x": [1, "a"]})
    with pytest.raises(WrongArgument, match="inputs is of type ndarray; pass a mapping"):
        do("infer", "m", X)
    with pytest.raises(WrongArgument, match="input x is not an array"):
        do("infer", "m", {"x": [[1, 2], [3]]})
    with pytest.raises(WrongArgument, match="has no option prio"):
        do("infer", "m", {"x": X}, prio=1)
    assert service.requests == []


def test_errors_have_tritons_text_and_the_services_codes(service: RecordedService, do: Do) -> None:
    service.reply_with(
        Reply(404, {"error": "Request for unknown model: 'm' is not found"}, {"Request-Id": "req_1"}),
        Reply(500, {"error": "it broke"}),
        Reply(
            429, {"error": "full", "code": "model-queue-full", "request_id": "req_2"}, {"Retry-After": "60"}
        ),
    )
    with pytest.raises(Refused, match="unknown model: 'm' is not found") as unknown:
        do("infer", "m", {"x": X})
    assert (unknown.value.code, unknown.value.status, unknown.value.request_id) == ("", 404, "req_1")
    assert unknown.value.retry_after_seconds is None
    with pytest.raises(BrokerError, match="it broke"):
        do("infer", "m", {"x": X})
    with pytest.raises(Refused) as full:  # a minute is more than it would wait
        do("infer", "m", {"x": X})
    assert (full.value.code, full.value.retry_after_seconds) == ("model-queue-full", 60.0)
    assert len(service.requests) == 3


def test_a_request_is_only_retried_if_nothing_was_done(service: RecordedService, do: Do) -> None:
    service.reply_with(
        Reply(503, {"error": "no", "code": "model-not-ready"}, {"Retry-After": "0"}), ECHO, HANG_UP
    )
    assert np.array_equal(do("infer", "m", {"x": X})["y"], X)
    with pytest.raises(Unreachable):
        do("infer", "m", {"x": X})
    assert len(service.requests) == 3


def test_an_idempotent_request_is_retried_after_any_failure(service: RecordedService, do: Do) -> None:
    service.reply_with(HANG_UP, Reply(502, {"error": "it broke off"}), ECHO)
    assert np.array_equal(do("infer", "m", {"x": X}, idempotent=True)["y"], X)
    assert [request.headers["x-idempotent"] for request in service.requests] == ["true"] * 3


def test_a_request_with_a_timeout_is_not_retried(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(503, {"error": "no", "code": "model-queue-timeout"}, {"Retry-After": "0"}))
    with pytest.raises(ModelUnavailable) as late:
        do("infer", "m", {"x": X}, timeout_seconds=0.1)
    assert (late.value.code, late.value.model) == ("model-queue-timeout", "m")
    assert len(service.requests) == 1


def test_an_unavailable_model_is_not_an_unreachable_service(service: RecordedService, do: Do) -> None:
    service.reply_with(
        Reply(503, {"error": "it waits", "code": "model-not-ready"}, {"Retry-After": "60"}),
        a_problem(502, "model-not-loaded", "no such layer"),
    )
    with pytest.raises(ModelUnavailable, match="it waits") as waits:
        do("infer", "m", {"x": X})
    assert (waits.value.model, waits.value.retry_after_seconds) == ("m", 60.0)
    with pytest.raises(ModelUnavailable, match="no such layer") as failed:
        do("load_model", "m")
    assert (failed.value.model, failed.value.retry_after_seconds) == ("m", None)
    assert not isinstance(failed.value, Unreachable)


def test_an_invalid_model_name_is_refused_before_anything_is_sent(service: RecordedService, do: Do) -> None:
    for ask, *more in (("infer", {"x": X}), ("infer_later", {"x": X}), ("load_model",), ("model",)):
        for name in ("", None):
            with pytest.raises(WrongArgument, match=rf"{ask}\(\) needs the name of a model"):
                do(ask, name, *more)
    assert service.requests == []


def test_triton_healthy_is_true_or_false(service: RecordedService, do: Do) -> None:
    service.reply_with(
        Reply(200, b""), a_problem(404, "not-found"), Reply(503, {"error": "away"}), Reply(400, b""), HANG_UP
    )
    assert [do("triton_healthy") for _ in range(4)] == [True, False, False, False]
    with pytest.raises(Unreachable):
        do("triton_healthy")
    assert {request.path for request in service.requests} == {"/v2/health/ready"}


def test_a_decorated_function_asks_the_model_with_what_it_returns(
    service: RecordedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUBROKER_URL", service.url)

    @inference(model_name="m", model_type="vision", priority=95)
    def doubled(values: Any, *, by: int) -> dict[str, Any]:
        """Multiply by a number."""

        def process_outputs(outputs: Mapping[str, Any]) -> Any:
            return (by * outputs["y"]).tolist()

        return {"inputs": {"x": values}, "process_outputs": process_outputs}

    service.reply_with(ECHO)
    assert doubled(X, by=2) == [[2, 4], [6, 8]]
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Multiply by a number.")
    [request] = service.requests
    assert (request.path, request.headers["x-priority"]) == ("/v2/models/m/infer", "95")
    assert request.headers["x-model-type"] == "vision"


def test_without_process_outputs_the_outputs_are_returned(service: RecordedService) -> None:
    with Broker(service.url, "t") as broker:

        @inference(model_name="m", broker=broker)
        def plain() -> dict[str, Any]:
            return {"inputs": {"x": X}}

        service.reply_with(ECHO)
        assert np.array_equal(plain()["y"], X)


def test_a_decorated_coroutine_is_awaited(service: RecordedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBROKER_URL", service.url)

    @inference(model_name="m")
    async def summed(values: Any) -> dict[str, Any]:
        async def process_outputs(outputs: Mapping[str, Any]) -> float:
            return float(outputs["y"].sum())

        return {"inputs": {"x": values}, "process_outputs": process_outputs}

    async def twice() -> Any:
        return await asyncio.gather(summed(X), summed(X))

    service.reply_with(ECHO, ECHO, ECHO)
    assert asyncio.run(twice()) == [10.0, 10.0]
    assert asyncio.run(summed(X)) == 10.0


def test_a_function_that_returns_something_else_is_an_error(service: RecordedService) -> None:
    with Broker(service.url, "t") as broker:

        @inference(model_name="m", broker=broker)
        def arrays() -> dict[str, Any]:
            return {"x": X}

        with pytest.raises(WrongArgument, match=r"arrays should return .*'inputs'.*it returned the keys x"):
            arrays()
    assert service.requests == []


def test_a_function_and_its_broker_must_both_be_sync_or_async(service: RecordedService) -> None:
    async def slow() -> None: ...

    def quick() -> None: ...

    with pytest.raises(WrongArgument, match="slow is an async function and needs an AsyncBroker"):
        inference(model_name="m", broker=Broker(service.url, "t"))(slow)
    with pytest.raises(WrongArgument, match="quick is not an async function and needs a Broker"):
        inference(model_name="m", broker=AsyncBroker(service.url, "t"))(quick)


def test_without_numpy_the_error_says_what_to_install(
    service: RecordedService, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    with pytest.raises(ImportError, match=r"pip install .gpubroker\[inference\]"):
        do("infer", "m", {"x": [1.0]})
    assert service.requests == []
