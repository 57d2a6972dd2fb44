"""Inferences as they are stored and sent, joined into batches and cut again."""

import json
from dataclasses import replace
from typing import Any

import pytest
from gpubroker_server.core.serving.batching import (
    Answer,
    Question,
    answer_in,
    answer_on_wire,
    batches,
    cut,
    joined,
    packed,
    question_in,
    wire_of,
)
from gpubroker_server.core.serving.tensors import BadTensor, Tensor, tensor_of, values_of


def rows(*values: int, name: str = "x") -> Tensor:
    return tensor_of(name, "INT32", [len(values), 1], list(values))


def a_question(*values: int, **fields: Any) -> Question:
    return Question((rows(*values),), **fields)


def test_what_is_stored_is_read_as_it_was() -> None:
    question = a_question(1, 2, version="3", outputs=("y",), parameters={"k": 0.5}, id="mine")
    answer = Answer("m", "3", (rows(7, name="y"), tensor_of("t", "BYTES", [1], ["ü"])), {"k": 1}, "mine")
    assert question_in(packed(question)) == question
    assert answer_in(packed(answer)) == answer


@pytest.mark.parametrize("stored", [b"", b"\xff\0\0\0{}", b"\x02\0\0\0{}", packed(a_question(1))[:-1]])
def test_what_was_stored_and_is_damaged_is_told(stored: bytes) -> None:
    with pytest.raises(BadTensor):
        question_in(stored)


def test_a_request_has_triton_s_binary_form() -> None:
    head, data = wire_of(a_question(5, outputs=("y",), parameters={"k": "v"}, id="mine"))
    assert json.loads(head) == {
        "id": "mine",
        "inputs": [
            {"name": "x", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        "parameters": {"k": "v", "binary_data_output": True},
    }
    assert data == [b"\x05\0\0\0"]
    assert json.loads(wire_of(a_question(5))[0]).keys() == {"inputs", "parameters"}


def test_an_answer_in_that_form_is_read() -> None:
    head = json.dumps(
        {
            "model_name": "m",
            "model_version": "1",
            "outputs": [
                {"name": "y", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
            ],
        }
    ).encode()
    assert answer_on_wire(head + b"\x09\0\0\0", len(head)) == Answer("m", "1", (rows(9, name="y"),))


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
def test_an_answer_that_is_none_is_told(body: bytes) -> None:
    with pytest.raises(BadTensor, match="cannot be read"):
        answer_on_wire(body, len(body))


def test_those_that_differ_in_their_rows_alone_share_a_batch() -> None:
    asked = [
        a_question(1), a_question(2, 3), a_question(4, version="2"), a_question(5, outputs=("y",)),
        a_question(6, parameters={"k": 1}), a_question(7, id="mine"), Question((rows(8, name="other"),)),
    ]  # fmt: skip
    assert batches(asked, 8) == [[0, 1, 5], [2], [3], [4], [6]]


def test_a_batch_has_no_more_rows_than_its_model_takes() -> None:
    asked = [a_question(1), a_question(2, 3), a_question(4), a_question(5, 6, 7, 8, 9)]
    assert batches(asked, 3) == [[0, 1], [2], [3]]
    assert batches(asked, 1) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "alone",
    [
        a_question(1, parameters={"sequence_id": 7}),
        Question((rows(1), rows(1, 2, name="z"))),
        Question((tensor_of("x", "INT32", [], [1]),)),
        Question(()),
    ],
)
def test_one_that_has_no_rows_of_its_own_or_is_one_of_a_sequence_is_asked_alone(alone: Question) -> None:
    assert batches([alone, alone], 8) == [[0], [1]]


def test_a_batch_has_the_rows_of_all_and_each_gets_its_own_part_of_the_answer() -> None:
    asked = [a_question(1, id="a"), a_question(2, 3, id="b")]
    whole = joined(asked)
    assert (whole.id, values_of(whole.inputs[0])) == ("", [1, 2, 3])
    texts = tensor_of("t", "BYTES", [3, 1], ["one", "two", "three"])
    parts = cut(Answer("m", "1", (rows(10, 20, 30, name="y"), texts)), asked)
    assert [(part.id, values_of(part.outputs[0]), values_of(part.outputs[1])) for part in parts] == [
        ("a", [10], ["one"]),
        ("b", [20, 30], ["two", "three"]),
    ]
    assert joined(asked[:1]) == asked[0]


def test_an_answer_that_is_not_by_rows_cannot_be_cut() -> None:
    asked = [a_question(1), a_question(2)]
    with pytest.raises(BadTensor, match="not 2 rows"):
        cut(Answer("m", "1", (rows(1, name="y"),)), asked)
    odd = replace(rows(1, 2, name="y"), data=b"\0")
    with pytest.raises(BadTensor):
        cut(Answer("m", "1", (odd,)), asked)
