"""Tensors in the form in which they are sent: little-endian, row by row, without padding, as in Triton's
binary form."""

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, repeat, takewhile
from math import isfinite, prod
from typing import Any, Final

from msgspec import Struct

_FORMATS: Final = {
    "BOOL": "?", "INT8": "b", "UINT8": "B", "INT16": "h", "UINT16": "H", "INT32": "i", "UINT32": "I",
    "INT64": "q", "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
_BF16_BYTES: Final = 2

_AT_ONCE: Final = 4096
"""The number of values that are converted at a time, so that other work gets the processor in between."""


class BadTensor(ValueError):
    """Raised for values that are not a tensor of the stated type and shape. The text says why."""


class Tensor(Struct, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    stored: str = ""
    """The digest of the object that has the data instead of `data`; empty if there is none. The object is
    read when the tensor is sent."""
    stored_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.stored_bytes if self.stored else len(self.data)

    @property
    def rows(self) -> int:
        """The size of the first dimension, along which batches are joined; 0 if there is none."""
        return self.shape[0] if self.shape else 0


def tensor_of(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """Return the tensor of values from JSON, which may be nested by rows or flat. Raises BadTensor."""
    flat = list(_flat(values))
    if len(flat) != prod(shape):
        raise BadTensor(f"shape {list(shape)} has {prod(shape)} values, and {len(flat)} are given")
    try:
        return Tensor(name, datatype, tuple(shape), b"".join(_packed(datatype, flat)))
    except (struct.error, OverflowError, TypeError, AttributeError, UnicodeEncodeError) as fault:
        raise BadTensor(f"not all values are {datatype}: {fault}") from None


def values_in_steps(tensor: Tensor) -> Iterator[list[Any]]:
    """Return an iterator over the flat values for JSON, in parts, because all values together take many times
    the memory of their bytes. Bytes that are not UTF-8 are read as Latin-1, NaN and infinities as None.
    Raises BadTensor at once if the length of the data does not match the shape."""
    count, data = prod(tensor.shape), tensor.data
    if tensor.datatype == "BYTES":
        count_found = sum(1 for _ in elements_of(data))
        if count_found != count:
            raise BadTensor(f"{tensor.name} of shape {list(tensor.shape)} came with {count_found} values")
        texts = (_text(element) for element in elements_of(data))
        return takewhile(bool, (list(islice(texts, _AT_ONCE)) for _ in repeat(None)))
    if len(data) != count * size_of(tensor.datatype):
        raise BadTensor(f"{tensor.name} of shape {list(tensor.shape)} came with {len(data)} bytes")
    return _unpacked(tensor.datatype, data)


def checked(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged. Raises BadTensor if its data does not match its datatype and shape."""
    if tensor.stored:
        if tensor.size_bytes != prod(tensor.shape) * size_of(tensor.datatype):
            raise BadTensor(
                f"{tensor.name} of shape {list(tensor.shape)} came with {tensor.size_bytes} bytes"
            )
        return tensor
    _ends(tensor, [prod(tensor.shape)])
    return tensor


def size_of(datatype: str) -> int:
    """Return the number of bytes of one value. Raises BadTensor for an unknown datatype, and for one whose
    values differ in length."""
    if datatype == "BF16":
        return _BF16_BYTES
    if datatype not in _FORMATS:
        raise BadTensor(f"{datatype} is no datatype of fixed size")
    return struct.calcsize(f"<{_FORMATS[datatype]}")


def elements_of(data: bytes) -> Iterator[bytes]:
    """Yield the values of a BYTES tensor, each of which follows its length in the data. Raises BadTensor."""
    offset = 0
    while offset < len(data):
        offset, end = offset + 4, offset + 4 + int.from_bytes(data[offset : offset + 4], "little")
        if end > len(data):
            raise BadTensor("a value of type BYTES is longer than what holds it")
        yield data[offset:end]
        offset = end


def split_rows(tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Split a tensor into tensors with these numbers of rows, in order. Raises BadTensor if the numbers do
    not add up to the rows of the tensor."""
    if tensor.rows != sum(rows):
        raise BadTensor(f"{tensor.name} has shape {list(tensor.shape)}, not {sum(rows)} rows")
    per_row, inner = prod(tensor.shape[1:]), tensor.shape[1:]
    ends = _ends(tensor, [count * per_row for count in rows])
    cuts = zip(rows, [0, *ends], ends, strict=False)
    return [
        Tensor(tensor.name, tensor.datatype, (count, *inner), tensor.data[begin:end])
        for count, begin, end in cuts
    ]


def _ends(tensor: Tensor, counts: Sequence[int]) -> list[int]:
    """Return the offsets in the data at which consecutive groups with these numbers of values end. Raises
    BadTensor if the groups do not fill the data."""
    if tensor.datatype == "BYTES":
        lengths = (4 + len(element) for element in elements_of(tensor.data))
        ends: Sequence[int] = list(accumulate(lengths, initial=0))
    else:
        ends = range(0, len(tensor.data) + 1, size_of(tensor.datatype))
    if len(ends) != sum(counts) + 1 or ends[-1] != len(tensor.data):
        raise BadTensor(f"{tensor.name} of shape {list(tensor.shape)} came with {len(tensor.data)} bytes")
    return [ends[upto] for upto in accumulate(counts)]


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def _packed(datatype: str, values: list[Any]) -> Iterator[bytes]:
    for begin in range(0, len(values), _AT_ONCE):
        chunk = values[begin : begin + _AT_ONCE]
        if datatype == "BYTES":
            encoded = [value.encode() for value in chunk]
            yield b"".join(len(text).to_bytes(4, "little") + text for text in encoded)
            continue
        if any(isinstance(value, bool) is not (datatype == "BOOL") for value in chunk):
            raise BadTensor(f"not all values are {datatype}")
        if datatype == "BF16":
            yield b"".join(_bf16(value) for value in chunk)
        else:
            yield struct.pack(f"<{len(chunk)}{_FORMATS[datatype]}", *chunk)


def _bf16(value: float) -> bytes:
    """Return the upper half of a 32-bit number, rounded to the nearest value, with ties to even."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    return (min(bits + 0x7FFF + (bits >> 16 & 1), 0xFFFFFFFF) >> 16).to_bytes(2, "little")


def _unpacked(datatype: str, data: bytes) -> Iterator[list[Any]]:
    form, step = _FORMATS.get(datatype, "f"), _AT_ONCE * size_of(datatype)
    for begin in range(0, len(data), step):
        part = data[begin : begin + step]
        if datatype == "BF16":
            part = b"".join(b"\0\0" + part[offset : offset + 2] for offset in range(0, len(part), 2))
        values = [value for (value,) in struct.iter_unpack(f"<{form}", part)]
        yield [value if isfinite(value) else None for value in values] if form in "efd" else values


def _text(element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element.decode("latin-1")
