"""Arrays in the binary form of Triton's protocol.

A body is JSON that describes the tensors, followed by their bytes. numpy is imported when the first array is
sent; the rest of the SDK does not need it.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from gpubroker.errors import BrokerError, WrongArgument
from gpubroker.transport.bodies import Body, FileBody, is_binary_file
from gpubroker.transport.exchange import Answer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

HEAD_BYTES = "inference-header-content-length"
"""The header with the length of the JSON, which is sent if bytes of tensors follow the JSON."""

_DTYPES = {
    "BOOL": "?", "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "<u1",
    "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
_DATATYPES = {dtype.strip("<"): datatype for datatype, dtype in _DTYPES.items()}
_BFLOAT16 = "bfloat16"
"""The name of the type in libraries that add it to numpy."""


def encode(
    inputs: "Mapping[str, ArrayLike]",
    outputs: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[bytes, int]:
    """Return the body of a request, and the length of its JSON. Without `outputs`, all outputs are requested.

    Raises WrongArgument for inputs that cannot be sent.
    """
    check_names(inputs)
    tensors = [tensor_of(name, value) for name, value in inputs.items()]
    request: dict[str, Any] = {"inputs": [tensor for tensor, _ in tensors]}
    if outputs is not None:
        request["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    request["parameters"] = {**(parameters or {}), "binary_data_output": True}
    head = json.dumps(request, allow_nan=False).encode()
    return b"".join([head, *(data for _, data in tensors)]), len(head)


def decode_outputs(answer: Answer) -> "dict[str, NDArray[Any]]":
    """Return the outputs by name, as writable arrays. BYTES become arrays of `bytes`; BF16, which numpy
    lacks, becomes FP32 with the same values.

    Raises BrokerError if the answer is not that of a model.
    """
    content = memoryview(answer.content)
    try:
        offset = int(answer.headers.get(HEAD_BYTES, len(content)))
        arrays: dict[str, NDArray[Any]] = {}
        for output in json.loads(bytes(content[:offset]))["outputs"]:
            size = (output.get("parameters") or {}).get("binary_data_size")
            shape, datatype = output["shape"], output["datatype"]
            if size is None:
                arrays[output["name"]] = _from_json(output["data"], datatype, shape)
            else:
                arrays[output["name"]] = _unpack(content[offset : offset + size], datatype, shape)
                offset += size
    except (ValueError, KeyError, TypeError, struct.error) as fault:
        raise BrokerError(
            f"cannot read the answer of the model: {fault!r}", code="not-a-model", status=answer.status
        ) from fault
    return arrays


def tensor_of(name: str, given: "ArrayLike") -> tuple[dict[str, Any], bytes]:
    """Return the description of an input, and its bytes, which follow the JSON. Raises WrongArgument."""
    datatype, shape, data = _pack(name, given)
    size = {"binary_data_size": len(data)}
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": size}, data


def object_body(
    data: "bytes | bytearray | memoryview | BinaryIO | ArrayLike",
) -> tuple[bytes | Body, dict[str, Any]]:
    """Return the bytes of an object; for an array also its datatype and shape. Raises WrongArgument."""
    if is_binary_file(data):
        return FileBody(data), {}
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data), {}
    datatype, shape, packed = _pack("of the object", cast("ArrayLike", data))
    return packed, {"datatype": datatype, "shape": tuple(shape)}


def check_names(inputs: object) -> None:
    """Check that each array has a name. Raises WrongArgument if not."""
    if not isinstance(inputs, Mapping):
        raise WrongArgument(
            f"inputs is of type {type(inputs).__name__}; pass a mapping from the names of the model's inputs "
            "to arrays, such as {'INPUT0': array}"
        )


def _pack(name: str, given: "ArrayLike") -> tuple[str, list[int], bytes]:
    """Return the datatype, the shape, and the bytes in row-major order."""
    array = _array(name, given)
    datatype, shape = _datatype_of(name, array), list(array.shape)
    if datatype == "BF16":
        return datatype, shape, array.tobytes()
    if datatype == "BYTES":
        return datatype, shape, b"".join(_with_lengths(name, array))
    return datatype, shape, array.astype(_DTYPES[datatype], copy=False).tobytes()


def _array(name: str, given: "ArrayLike") -> "NDArray[Any]":
    numpy = _numpy()
    try:
        try:
            array: NDArray[Any] = numpy.asarray(given)
        except UnicodeDecodeError:  # a mix of str and bytes, which numpy would give one type
            array = numpy.asarray(given, object)
        if array.dtype.kind in "SU" and not isinstance(given, numpy.ndarray):
            # numpy's text types drop NULs at the end, and turn numbers among the text into text.
            array = numpy.asarray(given, object)
    except ValueError as fault:
        raise WrongArgument(f"input {name} is not an array: {fault}") from None
    return array


def _datatype_of(name: str, array: "NDArray[Any]") -> str:
    kind = array.dtype.kind
    if array.dtype.name == _BFLOAT16:
        return "BF16"
    if kind in "OSTU":
        return "BYTES"
    datatype = _DATATYPES.get(f"{kind}{array.dtype.itemsize}" if kind != "b" else "?")
    if datatype is None:
        raise WrongArgument(
            f"input {name} has the dtype {array.dtype}, which Triton does not have; convert it to one of "
            f"{', '.join(_DTYPES)}, or to text for BYTES"
        )
    return datatype


def _with_lengths(name: str, array: "NDArray[Any]") -> Iterable[bytes]:
    for data in _encoded(name, array):
        yield struct.pack("<I", len(data))
        yield data


def _encoded(name: str, array: "NDArray[Any]") -> Iterable[bytes]:
    for element in array.flat:
        data = element.encode() if isinstance(element, str) else element
        if not isinstance(data, bytes):
            raise WrongArgument(
                f"input {name} has an element of type {type(element).__name__}; BYTES need str or bytes, and "
                "numbers an array of one dtype"
            )
        yield data


def _unpack(data: memoryview, datatype: str, shape: Sequence[int]) -> "NDArray[Any]":
    numpy = _numpy()
    if datatype == "BYTES":
        return _objects(_elements(data), shape)
    if datatype == "BF16":  # the upper half of an FP32
        halves = numpy.frombuffer(data, "<u2").astype("<u4")
        wide: NDArray[Any] = (halves << 16).view("<f4").reshape(shape)
        return wide
    array: NDArray[Any] = numpy.frombuffer(data, _dtype(datatype)).reshape(shape).copy()
    return array


def _elements(data: memoryview) -> list[bytes]:
    elements: list[bytes] = []
    offset = 0
    while offset < len(data):
        (size,) = struct.unpack_from("<I", data, offset)
        offset += 4 + size
        elements.append(bytes(data[offset - size : offset]))
    return elements


def _from_json(data: Sequence[Any], datatype: str, shape: Sequence[int]) -> "NDArray[Any]":
    """Return an output that was sent as JSON, such as a classification."""
    if datatype == "BYTES":
        return _objects([element.encode() for element in data], shape)
    array: NDArray[Any] = _numpy().array(data, _dtype(datatype)).reshape(shape)
    return array


def _objects(elements: Sequence[bytes], shape: Sequence[int]) -> "NDArray[np.object_]":
    array = _numpy().empty(len(elements), object)
    array[:] = elements
    reshaped: NDArray[np.object_] = array.reshape(shape)
    return reshaped


def _dtype(datatype: str) -> str:
    if datatype not in _DTYPES:
        raise ValueError(f"unknown datatype {datatype} of an output")
    return _DTYPES[datatype]


def _numpy() -> ModuleType:
    try:
        import numpy
    except ImportError as missing:
        raise ImportError(
            "arrays need numpy, which is not installed; install it with `pip install 'gpubroker[inference]'`"
        ) from missing
    return numpy
