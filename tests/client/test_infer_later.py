"""Queued inferences through the SDK; every test runs with `Broker` and with `AsyncBroker`."""

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from gpubroker import StoredObject, WrongArgument
from gpubroker.transport.decoding import decode

from tests.client.conftest import Do
from tests.client.recorded_service import RecordedService, Reply, a_task

TENSOR = {"datatype": "FP32", "shape": [1, 2], "data": [0.5, 1]}


def test_an_inference_is_sent_with_a_key_and_its_options(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(202, a_task("task_a")))
    at = datetime(2026, 11, 21, 22, tzinfo=UTC)
    options = {"priority": "critical", "outputs": ["y"], "labels": {"team": "vision"}, "not_before": at}
    assert do("infer_later", "resnet", {"x": TENSOR}, **options).id == "task_a"
    [request] = service.requests
    assert (request.method, request.path) == ("POST", "/inferences")
    assert request.body == {
        "model": "resnet",
        "inputs": [{"name": "x", **TENSOR}],
        "priority": "critical",
        "outputs": [{"name": "y"}],
        "labels": {"team": "vision"},
        "not_before": "2026-11-21T22:00:00+00:00",
    }
    assert request.headers["idempotency-key"]


def test_arrays_follow_the_json_as_bytes(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(202, a_task()))
    arrays = {"x": np.array([[0.5], [1.0]], np.float32), "t": np.array([b"two"], object), "given": TENSOR}
    do("infer_later", "resnet", arrays, idempotency_key="mine")
    [request] = service.requests
    size = int(request.headers["inference-header-content-length"])
    head, data = json.loads(request.body[:size]), request.body[size:]
    assert head["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [2, 1], "parameters": {"binary_data_size": 8}},
        {"name": "t", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 7}},
        {"name": "given", **TENSOR},
    ]
    assert data == arrays["x"].tobytes() + b"\x03\0\0\0two"  # type: ignore[attr-defined]
    assert request.headers["idempotency-key"] == '"mine"'


def test_an_uploaded_array_is_an_input_of_inferences(service: RecordedService, do: Do) -> None:
    answer = {"id": "abc", "size_bytes": 8, "expires_at": "2026-11-21T22:00:00Z"}
    service.reply_with(Reply(201, answer), Reply(202, a_task()), Reply(201, answer))
    pixels = np.array([[0.5], [1.0]], np.float32)
    stored = do("upload", pixels)
    assert (stored.id, stored.datatype, stored.shape, stored.size_bytes) == ("abc", "FP32", (2, 1), 8)
    assert stored.expires_at == datetime(2026, 11, 21, 22, tzinfo=UTC)
    do("infer_later", "resnet", {"x": stored, "y": TENSOR})
    assert do("upload", pixels.tobytes()).datatype == ""
    first, request, again = service.requests
    assert (first.method, first.path, first.body) == ("POST", "/objects", pixels.tobytes())
    assert again.body == first.body
    named = {"name": "x", "datatype": "FP32", "shape": [2, 1], "object": "abc"}
    assert request.body["inputs"] == [named, {"name": "y", **TENSOR}]


def test_large_arrays_go_as_objects_and_small_ones_with_the_request(service: RecordedService, do: Do) -> None:
    answer = {"id": "abc", "size_bytes": 8, "expires_at": "2026-11-21T22:00:00Z"}
    service.reply_with(Reply(201, answer), Reply(202, a_task()))
    large, small = np.zeros(2**20 + 1, np.float32), np.array([0.5], np.float32)
    do("infer_later", "resnet", {"x": large, "y": small})
    upload, request = service.requests
    assert (upload.path, upload.body) == ("/objects", large.tobytes())
    size = int(request.headers["inference-header-content-length"])
    assert json.loads(request.body[:size])["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [2**20 + 1], "object": "abc"},
        {"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
    ]
    assert request.body[size:] == small.tobytes()


@pytest.mark.parametrize(
    ("inputs", "options", "expected"),
    [
        ({"x": decode(StoredObject, {"id": "abc", "size_bytes": 8})}, {}, "uploaded as bytes; describe it"),
        ({"x": np.array([1j])}, {}, "has the dtype complex128"),
        ({"x": np.array([object()])}, {}, "an element of type object"),
        (np.array([1.0]), {}, "inputs is of type ndarray; pass a mapping"),
        ({"x": {**TENSOR, "data": [object()]}}, {}, "cannot be written as JSON"),
        ({"x": TENSOR}, {"gpus": 1}, "has no option gpus"),
    ],
)
def test_invalid_inferences_are_refused_before_anything_is_sent(
    service: RecordedService, do: Do, inputs: Any, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(WrongArgument, match=expected):
        do("infer_later", "resnet", inputs, **options)
    assert service.requests == []
