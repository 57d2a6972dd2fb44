"""Tensors between JSON and bytes, and cut by rows."""

import json
from typing import Any

import pytest
from gpubroker_server.core.serving.tensors import (
    BadTensor,
    Tensor,
    checked,
    elements_of,
    size_of,
    split_rows,
    tensor_of,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.tensor_values import values_of

WHOLE = {"INT8": 8, "INT16": 16, "INT32": 32, "INT64": 64}


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False, True]),
        ("UINT8", [0, 255, 7]),
        ("INT64", [-(2**63), 2**63 - 1, 0]),
        ("FP16", [0.5, -2.0, 65504.0]),
        ("BF16", [1.0, -0.5, 256.0]),
        ("FP32", [0.5, -1.25, 3]),
        ("FP64", [0.1, 1e300, -1]),
        ("BYTES", ["", "two words", "ü"]),
    ],
)
def test_values_come_back_as_they_were(datatype: str, values: list[Any]) -> None:
    tensor = tensor_of("x", datatype, [3], values)
    assert values_of(tensor) == values
    assert checked(tensor) == tensor


def test_numbers_are_little_endian_and_strings_follow_their_lengths() -> None:
    assert tensor_of("x", "INT32", [2], [1, -1]).data == b"\x01\0\0\0\xff\xff\xff\xff"
    assert tensor_of("x", "BYTES", [1], ["ab"]).data == b"\x02\0\0\0ab"
    assert tensor_of("x", "BF16", [1], [1.0]).data == b"\x80\x3f"


def test_a_bf16_is_rounded_to_the_nearest_and_ties_go_to_even() -> None:
    close = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16, 3.4e38]
    assert values_of(tensor_of("x", "BF16", [4], close))[:3] == [1.0, 1 + 4 * 2**-8, 1 + 2 * 2**-8]


def test_rows_may_be_nested_or_flat() -> None:
    assert tensor_of("x", "FP32", [2, 2], [[1, 2], [3, 4]]) == tensor_of("x", "FP32", [2, 2], [1, 2, 3, 4])


def test_numbers_that_json_does_not_have_are_null() -> None:
    tensor = Tensor("x", "FP32", (3,), b"\0\0\xc0\x7f" + b"\0\0\x80\x7f" + b"\0\0\x80\x3f")
    assert json.dumps(values_of(tensor)) == "[null, null, 1.0]"


def test_bytes_that_are_no_utf_8_are_read_as_latin_1() -> None:
    assert values_of(Tensor("x", "BYTES", (1,), b"\x01\0\0\0\xff")) == ["ÿ"]


@pytest.mark.parametrize(
    ("datatype", "shape", "values", "says"),
    [
        ("FP32", [2, 2], [1, 2, 3], "has 4 values, and 3 are given"),
        ("INT8", [1], [128], "not all values are INT8"),
        ("INT8", [1], [1.5], "not all values are INT8"),
        ("FP16", [1], [1e6], "not all values are FP16"),
        ("FP32", [1], ["1"], "not all values are FP32"),
        ("FP32", [1], [True], "not all values are FP32"),
        ("BOOL", [1], [1], "not all values are BOOL"),
        ("BF16", [1], [None], "not all values are BF16"),
        ("BYTES", [1], [1], "not all values are BYTES"),
        ("BYTES", [1], ["\ud800"], "not all values are BYTES"),
    ],
)
def test_values_that_do_not_fit_type_and_shape_are_refused(
    datatype: str, shape: list[int], values: list[Any], says: str
) -> None:
    with pytest.raises(BadTensor, match=says):
        tensor_of("x", datatype, shape, values)


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", "FP32", (2,), b"\0" * 7),
        Tensor("x", "FP99", (1,), b"\0"),
        Tensor("x", "BYTES", (2,), b"\x01\0\0\0a"),
        Tensor("x", "BYTES", (1,), b"\x09\0\0\0a"),
    ],
)
def test_data_whose_length_does_not_fit_its_shape_is_refused(tensor: Tensor) -> None:
    with pytest.raises(BadTensor):
        values_of(tensor)
    with pytest.raises(BadTensor):
        checked(tensor)
    with pytest.raises(BadTensor):
        split_rows(tensor, [1, tensor.shape[0] - 1])


def test_the_parts_have_as_many_rows_as_the_tensor() -> None:
    with pytest.raises(BadTensor, match="not 3 rows"):
        split_rows(tensor_of("x", "FP32", [2], [1, 2]), [1, 2])
    assert Tensor("x", "FP32", (), b"\0\0\0\0").rows == 0


@given(
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    datatype=st.sampled_from([*WHOLE, "BYTES"]),
    data=st.data(),
)
def test_joined_rows_split_into_the_same_parts(rows: list[int], datatype: str, data: st.DataObject) -> None:
    bits = WHOLE.get(datatype, 8)
    value = (
        st.text(max_size=4) if datatype == "BYTES" else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    )
    parts = [
        tensor_of(
            "x", datatype, [count, 2], data.draw(st.lists(value, min_size=2 * count, max_size=2 * count))
        )
        for count in rows
    ]
    whole = Tensor("x", datatype, (sum(rows), 2), b"".join(part.data for part in parts))
    assert split_rows(whole, rows) == parts


def test_sizes_and_elements_are_those_of_triton_s_binary_form() -> None:
    assert [size_of(name) for name in ("BOOL", "FP16", "BF16", "FP32", "INT64")] == [1, 2, 2, 4, 8]
    assert list(elements_of(b"\x01\0\0\0a\0\0\0\0")) == [b"a", b""]
