"""Inferences as they are stored and sent, joined into batches and cut again."""

import json
from typing import Any

import pytest
from gpubroker_server.core.serving.batching import (
    InferenceRequest,
    InferenceResponse,
    batches,
    decoded_response,
    encoded_request,
    joined,
    packed,
    request_in,
    response_in,
    split,
)
from gpubroker_server.core.serving.tensors import BadTensor, Tensor, checked, tensor_of
from msgspec.structs import replace

from tests.tensor_values import values_of


def rows(*values: int, name: str = "x") -> Tensor:
    return tensor_of(name, "INT32", [len(values), 1], list(values))


def a_request(*values: int, **fields: Any) -> InferenceRequest:
    return InferenceRequest((rows(*values),), **fields)


def test_stored_requests_and_responses_are_read_back_unchanged() -> None:
    request = a_request(1, 2, version="3", outputs=("y",), parameters={"k": 0.5}, id="mine")
    answer = InferenceResponse(
        "m", "3", (rows(7, name="y"), tensor_of("t", "BYTES", [1], ["ü"])), {"k": 1}, "mine"
    )
    assert request_in(packed(request)) == request
    assert response_in(packed(answer)) == answer


@pytest.mark.parametrize("stored", [b"", b"\xff\0\0\0{}", b"\x02\0\0\0{}", packed(a_request(1))[:-1]])
def test_damaged_stored_bytes_raise(stored: bytes) -> None:
    with pytest.raises(BadTensor):
        request_in(stored)


def test_a_request_has_triton_s_binary_form() -> None:
    head, data = encoded_request(a_request(5, outputs=("y",), parameters={"k": "v"}, id="mine"))
    assert json.loads(head) == {
        "id": "mine",
        "inputs": [
            {"name": "x", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        "parameters": {"k": "v", "binary_data_output": True},
    }
    assert [tensor.data for tensor in data] == [b"\x05\0\0\0"]
    assert json.loads(encoded_request(a_request(5))[0]).keys() == {"inputs", "parameters"}


def test_a_request_keeps_the_names_of_objects_that_have_its_data() -> None:
    stored = Tensor("x", "FP32", (2, 2), b"", "d1", 16)
    request = InferenceRequest((stored, Tensor("y", "INT8", (2,), b"ab")))
    assert request_in(packed(request)) == request
    assert not request.may_be_joined
    head, tensors = encoded_request(request)
    sizes = [one["parameters"]["binary_data_size"] for one in json.loads(head)["inputs"]]
    assert (sizes, tensors) == ([16, 2], request.inputs)
    assert checked(stored) == stored
    with pytest.raises(BadTensor, match="came with 15 bytes"):
        checked(replace(stored, stored_bytes=15))


def test_a_response_in_that_form_is_read() -> None:
    head = json.dumps(
        {
            "model_name": "m",
            "model_version": "1",
            "outputs": [
                {"name": "y", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
            ],
        }
    ).encode()
    assert decoded_response(head + b"\x09\0\0\0", len(head)) == InferenceResponse(
        "m", "1", (rows(9, name="y"),)
    )


ODD = {"name": "y", "datatype": "FP32", "shape": ["?"], "parameters": {"binary_data_size": 0}}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"model_name": "m"}',
        b'{"outputs": [{"name": "y"}]}',
        json.dumps({"model_name": "m", "model_version": "1", "outputs": [ODD]}).encode(),
        b'{"model_name": "m", "model_version": "1", "outputs": [], "parameters": 5}',
    ],
)
def test_a_body_that_is_no_response_raises(body: bytes) -> None:
    with pytest.raises(BadTensor, match="cannot be read"):
        decoded_response(body, len(body))


def test_requests_that_differ_only_in_their_rows_share_a_batch() -> None:
    asked = [
        a_request(1), a_request(2, 3), a_request(4, version="2"), a_request(5, outputs=("y",)),
        a_request(6, parameters={"k": 1}), a_request(7, id="mine"),
        InferenceRequest((rows(8, name="other"),)),
    ]  # fmt: skip
    assert batches(asked, 8) == [[0, 1, 5], [2], [3], [4], [6]]


def test_a_batch_has_no_more_rows_than_its_model_takes() -> None:
    asked = [a_request(1), a_request(2, 3), a_request(4), a_request(5, 6, 7, 8, 9)]
    assert batches(asked, 3) == [[0, 1], [2], [3]]
    assert batches(asked, 1) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "alone",
    [
        a_request(1, parameters={"sequence_id": 7}),
        InferenceRequest((rows(1), rows(1, 2, name="z"))),
        InferenceRequest((tensor_of("x", "INT32", [], [1]),)),
        InferenceRequest(()),
    ],
)
def test_request_without_rows_or_of_a_sequence_is_not_batched(
    alone: InferenceRequest,
) -> None:
    assert batches([alone, alone], 8) == [[0], [1]]


def test_batch_has_all_rows_and_each_request_gets_its_part_of_the_response() -> None:
    asked = [a_request(1, id="a"), a_request(2, 3, id="b")]
    whole = joined(asked)
    assert (whole.id, values_of(whole.inputs[0])) == ("", [1, 2, 3])
    texts = tensor_of("t", "BYTES", [3, 1], ["one", "two", "three"])
    parts = split(InferenceResponse("m", "1", (rows(10, 20, 30, name="y"), texts)), asked)
    assert [(part.id, values_of(part.outputs[0]), values_of(part.outputs[1])) for part in parts] == [
        ("a", [10], ["one"]),
        ("b", [20, 30], ["two", "three"]),
    ]
    assert joined(asked[:1]) == asked[0]


def test_a_response_that_is_not_by_rows_cannot_be_split() -> None:
    asked = [a_request(1), a_request(2)]
    with pytest.raises(BadTensor, match="not 2 rows"):
        split(InferenceResponse("m", "1", (rows(1, name="y"),)), asked)
    odd = replace(rows(1, 2, name="y"), data=b"\0")
    with pytest.raises(BadTensor):
        split(InferenceResponse("m", "1", (odd,)), asked)
