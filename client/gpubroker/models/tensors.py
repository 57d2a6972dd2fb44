"""Arrays in the form of Triton's protocol: requests to models, and their answers.

A body is JSON that describes the tensors, and then their bytes, one after the other. numpy is loaded when the
first array is sent, since all else of this SDK goes without.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpubroker.errors import BrokerError, WrongArgument
from gpubroker.transport.exchange import Answer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

HEAD_BYTES = "inference-header-content-length"
"""The header that says how long the JSON is, where bytes of tensors follow it."""

_DTYPES = {
    "BOOL": "?", "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "<u1",
    "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
_DATATYPES = {dtype.strip("<"): datatype for datatype, dtype in _DTYPES.items()}
_BFLOAT16 = "bfloat16"
"""What libraries that add this type to numpy, which has none, call it."""


def written(
    inputs: "Mapping[str, ArrayLike]",
    outputs: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[bytes, int]:
    """The body of a request, and the length of its head. Without `outputs`: for all that the model has.

    Raises WrongArgument.
    """
    told = [described(name, given) for name, given in named(inputs).items()]
    parts = [b"", *(data for _, data in told)]
    asked: dict[str, Any] = {"inputs": [tensor for tensor, _ in told]}
    if outputs is not None:
        asked["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    asked["parameters"] = {**(parameters or {}), "binary_data_output": True}
    parts[0] = json.dumps(asked, allow_nan=False).encode()
    return b"".join(parts), len(parts[0])


def read(answer: Answer) -> "dict[str, NDArray[Any]]":
    """The outputs by name, each with memory of its own that may be written to. BYTES are arrays of `bytes`,
    and BF16, which numpy does not know, are FP32 of the same values.

    Raises BrokerError if it is no answer of a model.
    """
    content = memoryview(answer.content)
    try:
        at = int(answer.headers.get(HEAD_BYTES, len(content)))
        found: dict[str, NDArray[Any]] = {}
        for output in json.loads(bytes(content[:at]))["outputs"]:
            size = (output.get("parameters") or {}).get("binary_data_size")
            shape, datatype = output["shape"], output["datatype"]
            if size is None:
                found[output["name"]] = _listed(output["data"], datatype, shape)
            else:
                found[output["name"]] = _unpacked(content[at : at + size], datatype, shape)
                at += size
    except (ValueError, KeyError, TypeError, struct.error) as fault:
        raise BrokerError(
            f"the answer of the model cannot be read: {fault!r}", code="not-a-model", status=answer.status
        ) from fault
    return found


def described(name: str, given: "ArrayLike") -> tuple[dict[str, Any], bytes]:
    """An input, and its bytes, which follow the JSON. Raises WrongArgument."""
    datatype, shape, data = _packed(name, given)
    size = {"binary_data_size": len(data)}
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": size}, data


def named(inputs: "Mapping[str, ArrayLike]") -> "Mapping[str, ArrayLike]":
    """The same. Raises WrongArgument where there is an array without a name."""
    if not isinstance(inputs, Mapping):
        raise WrongArgument(
            f"inputs is of type {type(inputs).__name__}; give a mapping of arrays by the names of the "
            "model's inputs, such as {'INPUT0': array}"
        )
    return inputs


def _packed(name: str, given: "ArrayLike") -> tuple[str, list[int], bytes]:
    """Its datatype, shape and bytes, in rows."""
    array = _array(name, given)
    datatype, shape = _datatype_of(name, array), list(array.shape)
    if datatype == "BF16":
        return datatype, shape, array.tobytes()
    if datatype == "BYTES":
        return datatype, shape, b"".join(_counted(name, array))
    return datatype, shape, array.astype(_DTYPES[datatype], copy=False).tobytes()


def _array(name: str, given: "ArrayLike") -> "NDArray[Any]":
    numpy = _numpy()
    try:
        try:
            array: NDArray[Any] = numpy.asarray(given)
        except UnicodeDecodeError:  # str and bytes, of which numpy would make one type
            array = numpy.asarray(given, object)
        if array.dtype.kind in "SU" and not isinstance(given, numpy.ndarray):
            # Of numpy's own types of text all lose the NULs at their end, and numbers among them become text.
            array = numpy.asarray(given, object)
    except ValueError as fault:
        raise WrongArgument(f"input {name} is no array: {fault}") from None
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
            f"input {name} has the dtype {array.dtype}, for which Triton has no datatype; "
            f"convert it to one of {', '.join(_DTYPES)}, or to text for BYTES"
        )
    return datatype


def _counted(name: str, array: "NDArray[Any]") -> Iterable[bytes]:
    for data in _encoded(name, array):
        yield struct.pack("<I", len(data))
        yield data


def _encoded(name: str, array: "NDArray[Any]") -> Iterable[bytes]:
    for element in array.flat:
        data = element.encode() if isinstance(element, str) else element
        if not isinstance(data, bytes):
            raise WrongArgument(
                f"input {name} has an element of type {type(element).__name__}; BYTES are made of str and "
                "bytes, and numbers need an array of one dtype"
            )
        yield data


def _unpacked(data: memoryview, datatype: str, shape: Sequence[int]) -> "NDArray[Any]":
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
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        at += 4 + size
        elements.append(bytes(data[at - size : at]))
    return elements


def _listed(data: Sequence[Any], datatype: str, shape: Sequence[int]) -> "NDArray[Any]":
    """Of an output that came as JSON, such as a classification."""
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
        raise ValueError(f"an output has the datatype {datatype}, which this SDK does not know")
    return _DTYPES[datatype]


def _numpy() -> ModuleType:
    try:
        import numpy
    except ImportError as missing:
        raise ImportError(
            "models are asked with arrays of numpy, which is not installed here; "
            "`pip install 'gpubroker[inference]'` installs it"
        ) from missing
    return numpy
