"""The SDK asks a real Triton through the service, without tritonclient."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from gpubroker import AsyncBroker, BrokerError, Refused, WrongArgument, inference

from tests.e2e.service_process import ROOT, ServiceProcess, environment
from tests.patience import PATIENCE_SECONDS

Infer = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def infer(request: pytest.FixtureRequest, service: ServiceProcess) -> Infer:
    """Of `Broker` and of `AsyncBroker`."""

    async def infer_async(*args: Any, **options: Any) -> Any:
        async with AsyncBroker(service.url, service.token) as broker:
            return await broker.infer(*args, **options)

    if request.param == "sync":
        return service.broker.infer
    return lambda *args, **options: asyncio.run(infer_async(*args, **options))


OF_EACH_TYPE: Mapping[str, Any] = {
    "BOOL": np.array([True, False]),
    **{f"{sign}INT{bits}": np.array([0, 1, 100], f"{sign.lower()}int{bits}")
       for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FP16": np.array([1.5, -2, np.inf], np.float16),
    "FP32": np.arange(10, dtype=np.float32)[::3],
    "FP64": np.array([0.1], ">f8"),
    "STRING": np.array(["", "zwölf", b"\xff\x00"], object),
}  # fmt: skip


def test_arrays_of_every_type_come_back_as_they_were(infer: Infer) -> None:
    found = infer("any_type", {f"IN_{name}": array for name, array in OF_EACH_TYPE.items()})
    for name, array in OF_EACH_TYPE.items():
        expected = array if name != "STRING" else np.array([b"", "zwölf".encode(), b"\xff\x00"], object)
        assert found[f"OUT_{name}"].dtype.kind == expected.dtype.kind
        assert found[f"OUT_{name}"].dtype.itemsize == expected.dtype.itemsize
        assert np.array_equal(found[f"OUT_{name}"], expected), name


def test_arrays_with_nothing_in_them_come_back_as_such(infer: Infer) -> None:
    nothing = {"IN_FP32": np.zeros(0, np.float32), "IN_STRING": np.array([], object)}
    found = infer("any_type", nothing, outputs=["OUT_FP32", "OUT_STRING"])
    assert {name: (array.shape, array.dtype.kind) for name, array in found.items()} == {
        "OUT_FP32": ((0,), "f"),
        "OUT_STRING": ((0,), "O"),
    }


def test_rows_and_columns_keep_their_places(infer: Infer) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for given in (rows, np.asfortranarray(rows), rows.T):
        assert np.array_equal(infer("identity_fp32", {"INPUT0": given})["OUTPUT0"], given)


def test_a_model_is_asked_by_its_version_and_for_some_outputs(infer: Infer) -> None:
    rows = np.ones((1, 2), np.float32)
    found = infer("identity_fp32", {"INPUT0": rows}, version=1, outputs=["OUTPUT0"], priority="critical")
    assert list(found) == ["OUTPUT0"]
    with pytest.raises(Refused, match="'identity_fp32' version 9 is not found") as unknown:
        infer("identity_fp32", {"INPUT0": rows}, version=9)
    assert (unknown.value.status, unknown.value.code) == (404, "")


def test_input_that_a_model_refuses_is_an_error_in_tritons_words(infer: Infer) -> None:
    with pytest.raises(Refused, match="unexpected inference input 'NOPE'") as wrong:
        infer("identity_fp32", {"NOPE": np.ones((1, 2), np.float32)})
    assert wrong.value.status == 400
    assert wrong.value.request_id
    with pytest.raises(Refused, match="data-type is 'INT64'"):
        infer("identity_fp32", {"INPUT0": np.ones((1, 2), np.int64)})
    with pytest.raises(Refused, match=r"unexpected shape for input 'INPUT0'|expected 2 dimensions"):
        infer("identity_fp32", {"INPUT0": np.float32(1)})


def test_a_wish_that_is_none_and_a_token_that_may_not_have_their_codes(
    infer: Infer, service: ServiceProcess
) -> None:
    rows = {"INPUT0": np.ones((1, 2), np.float32)}
    with pytest.raises(Refused) as wrong:
        infer("identity_fp32", rows, priority="soon")
    assert wrong.value.code == "header-invalid"
    with pytest.raises(Refused) as forbidden:
        service.of("tenant-without-models").infer("identity_fp32", rows)
    assert (forbidden.value.status, forbidden.value.code) == (403, "forbidden")


def test_a_function_runs_an_inference_and_converts_the_result(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUBROKER_URL", service.url)
    monkeypatch.setenv("GPUBROKER_TOKEN", service.token)

    @inference(model_name="echo_bytes", model_type="llm", priority="interactive")
    async def said(*words: str) -> dict[str, Any]:
        def process_outputs(outputs: Mapping[str, Any]) -> str:
            return b" ".join(outputs["text_output"]).decode()

        return {"inputs": {"text_input": list(words)}, "process_outputs": process_outputs}

    assert asyncio.run(said("how", "are", "you")) == "woh era uoy", "the model says it backwards"


def test_the_example_asks_a_model(service: ServiceProcess) -> None:
    known = {"GPUBROKER_URL": service.url, "GPUBROKER_TOKEN": service.token}
    asked = [sys.executable, "-m", "examples.ask_model", "how are you"]
    ran = subprocess.run(
        asked, env=environment(**known), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (ran.stdout, ran.stderr) == ("woh era uoy\n", "")


def test_whether_triton_can_be_asked(service: ServiceProcess) -> None:
    assert service.broker.triton_healthy()


@pytest.fixture(params=["sync", "async"])
def streamed(request: pytest.FixtureRequest, service: ServiceProcess) -> Infer:
    """What comes, as a list."""

    async def all_of(*args: Any, **options: Any) -> list[Any]:
        async with AsyncBroker(service.url, service.token) as broker:
            return [piece async for piece in broker.infer_stream(*args, **options)]

    if request.param == "sync":
        return lambda *args, **options: list(service.broker.infer_stream(*args, **options))
    return lambda *args, **options: asyncio.run(all_of(*args, **options))


def test_a_decoupled_model_answers_piece_by_piece(streamed: Infer) -> None:
    pieces = streamed("stream_n", {"text_input": "zwölf", "N": 3}, priority="critical")
    assert [(piece["text_output"], piece["index"]) for piece in pieces] == [
        ("zwölf 0", 0),
        ("zwölf 1", 1),
        ("zwölf 2", 2),
    ]
    assert streamed("stream_n", {"text_input": "a", "N": 0}) == []


def test_what_goes_wrong_in_a_stream_is_told_as_elsewhere(streamed: Infer, service: ServiceProcess) -> None:
    for inputs in ({"text_input": "a", "FAIL_AT": 0}, {"text_input": "a", "N": 3, "FAIL_AT": 2}):
        with pytest.raises(BrokerError, match="told to fail"):
            streamed("stream_n", inputs)
    with pytest.raises(Refused, match="unknown model"):
        streamed("nope", {"text_input": "a"})
    with pytest.raises(WrongArgument, match="cannot be written as JSON"):
        streamed("stream_n", {"text_input": b"bytes"})
    with pytest.raises(WrongArgument, match="has no option outputs"):
        streamed("stream_n", {"text_input": "a"}, outputs=["text_output"])
    pieces = service.broker.infer_stream("stream_n", {"text_input": "a", "N": 2})
    assert next(pieces)["index"] == 0, "it does not wait for the last one"
