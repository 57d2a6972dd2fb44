"""Requests to models: what goes over the wire, what comes back, and functions that ask."""

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
from tests.client.recorded_service import HANG_UP, Asked, RecordedService, Reply, a_problem

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


def sent(asked: Asked) -> tuple[dict[str, Any], bytes]:
    """The head of its body, and the rest."""
    size = int(asked.headers["inference-header-content-length"])
    return json.loads(asked.body[:size]), asked.body[size:]


def test_arrays_go_as_they_are_and_come_back_as_arrays(service: RecordedService, do: Do) -> None:
    service.told(ECHO)
    found = do("infer", "folder/model", {"x": X})
    assert list(found) == ["y"]
    assert found["y"].dtype == np.float32
    assert np.array_equal(found["y"], X)
    found["y"] += 1  # the caller's own
    [asked] = service.asked
    assert (asked.method, asked.path) == ("POST", "/v2/models/folder%2Fmodel/infer")
    assert asked.headers["authorization"] == "Bearer gpb_secret"
    assert asked.headers["accept-encoding"] == "identity"
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}
    assert sent(asked) == (
        {"inputs": [tensor], "parameters": {"binary_data_output": True}},
        X.tobytes(),
    )
    assert not [name for name in asked.headers if name.startswith("x-")]


def test_what_is_wished_is_said(service: RecordedService, do: Do) -> None:
    service.told(ECHO)
    wishes = {"priority": "critical", "model_type": "llm", "timeout_seconds": 2.5}
    do("infer", "m", {"x": X}, version=3, outputs=["y"], parameters={"temperature": 0.5}, **wishes)
    [asked] = service.asked
    assert asked.path == "/v2/models/m/versions/3/infer"
    told = {name: text for name, text in asked.headers.items() if name.startswith("x-")}
    assert told == {"x-priority": "critical", "x-model-type": "llm", "x-timeout-seconds": "2.5"}
    head, _ = sent(asked)
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
def test_any_array_is_sent_in_rows_and_little_endian(service: RecordedService, case: str) -> None:
    given, (datatype, shape, data) = AS_SENT[case]
    service.told(ECHO)
    with Broker(service.url, "t") as broker:
        broker.infer("m", {"x": given})
    head, rest = sent(service.asked[0])
    [tensor] = head["inputs"]
    assert (tensor["datatype"], tensor["shape"], rest) == (datatype, shape, data)


def test_text_comes_back_as_bytes_and_bfloat16_as_what_holds_it(service: RecordedService, do: Do) -> None:
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    service.told(
        answering(a=("BYTES", [3], COUNTED), b=("BF16", [2], values.tobytes()), c=("BOOL", [0], b""))
    )
    found = do("infer", "m", {})
    assert found["a"].tolist() == [b"ab", b"", "zwöl".encode()]
    assert (found["b"].dtype, found["b"].tolist()) == (np.float32, [1.5, -2.0])
    assert (found["c"].dtype, found["c"].shape) == (np.bool_, (0,))


def test_an_answer_without_bytes_is_read_as_well(service: RecordedService, do: Do) -> None:
    outputs = [
        {"name": "n", "datatype": "INT8", "shape": [1, 2], "data": [1, 2]},
        {"name": "classes", "datatype": "BYTES", "shape": [1], "data": ["0.9:1:cat"]},
    ]
    service.told(Reply(200, {"outputs": outputs}))
    found = do("infer", "m", {"x": X})
    assert (found["n"].dtype, found["n"].tolist()) == (np.int8, [[1, 2]])
    assert found["classes"].tolist() == [b"0.9:1:cat"]


@pytest.mark.parametrize(
    "reply",
    [Reply(200, b"<html>"), Reply(200, {"outputs": [{"name": "y"}]}), answering(y=("FP32", [9], b""))],
)
def test_what_is_no_answer_of_a_model_is_said_to_be_none(service: RecordedService, reply: Reply) -> None:
    service.told(reply)
    with Broker(service.url, "t") as broker, pytest.raises(BrokerError, match="cannot read") as caught:
        broker.infer("m", {"x": X})
    assert caught.value.code == "not-a-model"


def test_what_no_model_takes_is_not_sent(service: RecordedService, do: Do) -> None:
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
    assert service.asked == []


def test_tritons_words_are_told_and_the_service_s_codes(service: RecordedService, do: Do) -> None:
    service.told(
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
    assert len(service.asked) == 3


def test_it_is_sent_again_only_if_nothing_was_done(service: RecordedService, do: Do) -> None:
    service.told(Reply(503, {"error": "no", "code": "model-not-ready"}, {"Retry-After": "0"}), ECHO, HANG_UP)
    assert np.array_equal(do("infer", "m", {"x": X})["y"], X)
    with pytest.raises(Unreachable):
        do("infer", "m", {"x": X})
    assert len(service.asked) == 3


def test_what_does_no_harm_twice_is_sent_again_whatever_became_of_it(
    service: RecordedService, do: Do
) -> None:
    service.told(HANG_UP, Reply(502, {"error": "it broke off"}), ECHO)
    assert np.array_equal(do("infer", "m", {"x": X}, idempotent=True)["y"], X)
    assert [asked.headers["x-idempotent"] for asked in service.asked] == ["true"] * 3


def test_who_says_how_long_it_may_wait_is_not_kept_longer(service: RecordedService, do: Do) -> None:
    service.told(Reply(503, {"error": "no", "code": "model-queue-timeout"}, {"Retry-After": "0"}))
    with pytest.raises(ModelUnavailable) as late:
        do("infer", "m", {"x": X}, timeout_seconds=0.1)
    assert (late.value.code, late.value.model) == ("model-queue-timeout", "m")
    assert len(service.asked) == 1


def test_a_model_that_is_not_there_is_no_service_that_is_away(service: RecordedService, do: Do) -> None:
    service.told(
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


def test_what_is_no_name_of_a_model_is_said_before_anything_is_sent(service: RecordedService, do: Do) -> None:
    for ask, *more in (("infer", {"x": X}), ("infer_later", {"x": X}), ("load_model",), ("model",)):
        for name in ("", None):
            with pytest.raises(WrongArgument, match=rf"{ask}\(\) needs the name of a model"):
                do(ask, name, *more)
    assert service.asked == []


def test_whether_models_can_be_asked_is_yes_or_no(service: RecordedService, do: Do) -> None:
    service.told(
        Reply(200, b""), a_problem(404, "not-found"), Reply(503, {"error": "away"}), Reply(400, b""), HANG_UP
    )
    assert [do("triton_healthy") for _ in range(4)] == [True, False, False, False]
    with pytest.raises(Unreachable):
        do("triton_healthy")
    assert {asked.path for asked in service.asked} == {"/v2/health/ready"}


def test_a_function_asks_what_it_returns(service: RecordedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBROKER_URL", service.url)

    @inference(model_name="m", model_type="vision", priority=95)
    def doubled(values: Any, *, by: int) -> dict[str, Any]:
        """As often as it is told."""

        def process_outputs(outputs: Mapping[str, Any]) -> Any:
            return (by * outputs["y"]).tolist()

        return {"inputs": {"x": values}, "process_outputs": process_outputs}

    service.told(ECHO)
    assert doubled(X, by=2) == [[2, 4], [6, 8]]
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "As often as it is told.")
    [asked] = service.asked
    assert (asked.path, asked.headers["x-priority"]) == ("/v2/models/m/infer", "95")
    assert asked.headers["x-model-type"] == "vision"


def test_a_function_without_more_gets_the_outputs(service: RecordedService) -> None:
    with Broker(service.url, "t") as broker:

        @inference(model_name="m", broker=broker)
        def plain() -> dict[str, Any]:
            return {"inputs": {"x": X}}

        service.told(ECHO)
        assert np.array_equal(plain()["y"], X)


def test_a_coroutine_asks_by_waiting(service: RecordedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBROKER_URL", service.url)

    @inference(model_name="m")
    async def summed(values: Any) -> dict[str, Any]:
        async def process_outputs(outputs: Mapping[str, Any]) -> float:
            return float(outputs["y"].sum())

        return {"inputs": {"x": values}, "process_outputs": process_outputs}

    async def twice() -> Any:
        return await asyncio.gather(summed(X), summed(X))

    service.told(ECHO, ECHO, ECHO)
    assert asyncio.run(twice()) == [10.0, 10.0]
    assert asyncio.run(summed(X)) == 10.0


def test_a_function_that_says_something_else_is_told_what_to_say(service: RecordedService) -> None:
    with Broker(service.url, "t") as broker:

        @inference(model_name="m", broker=broker)
        def arrays() -> dict[str, Any]:
            return {"x": X}

        with pytest.raises(WrongArgument, match=r"arrays should return .*'inputs'.*it returned the keys x"):
            arrays()
    assert service.asked == []


def test_a_function_and_its_broker_are_of_one_sort(service: RecordedService) -> None:
    async def slow() -> None: ...

    def quick() -> None: ...

    with pytest.raises(WrongArgument, match="slow is an async function and needs an AsyncBroker"):
        inference(model_name="m", broker=Broker(service.url, "t"))(slow)
    with pytest.raises(WrongArgument, match="quick is not an async function and needs a Broker"):
        inference(model_name="m", broker=AsyncBroker(service.url, "t"))(quick)


def test_without_numpy_it_says_what_to_install(
    service: RecordedService, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    with pytest.raises(ImportError, match=r"pip install .gpubroker\[inference\]"):
        do("infer", "m", {"x": [1.0]})
    assert service.asked == []
