"""Objects as arguments: how a call names one, how a value is written as one, and how a run opens it.

A run reads an object in memory that all runs of the node share. Therefore opened objects are read-only, and
arrays are not copied.
"""

import ast
import json
import pickle
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from io import BytesIO
from typing import Any

import cloudpickle

ARRAY_MARK = b"\x93NUMPY"
"""The beginning of a .npy file."""
PICKLE_MARK = b"\x93GPUBROKER1\n"
JSON_MARK = b"\x93GPUBROKERJ\n"
_PYTHON_BYTES = 8
_NUMBER_BYTES = 8
_ALIGNED_TO = 64
"""Buffers begin at multiples of this number of bytes, for vector instructions."""

_ID = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """The name of a stored object. A task's function that has it as an argument gets the object itself."""

    id: str
    size_bytes: int = field(default=0, compare=False)


class SharedBytes:
    """Bytes that other processes of the node get as a read-only view of the same memory."""

    def __init__(self, view: Any) -> None:
        self.view = memoryview(view)

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        return SharedBytes, (pickle.PickleBuffer(self.view),)


class UnreadableObject(ValueError):
    """The bytes of an object cannot be opened here; the text says why."""


def named_object(value: Any) -> str | None:
    """Return the id of the object that this argument names: an ObjectRef, or `{"object": id}`. None if it
    names none."""
    if isinstance(value, ObjectRef):
        return value.id
    if type(value) is dict and len(value) == 1 and type(id := value.get("object")) is str:
        return id if _ID.fullmatch(id) else None
    return None


def object_buffers(value: Any) -> Sequence[bytes | memoryview]:
    """Return the buffers of a value: bytes as they are, a numpy array as a .npy file, anything else pickled,
    with its arrays in buffers of their own.

    Large values are not copied. Raises what pickling raises.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return [value if isinstance(value, bytes) else bytes(value)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject:
        try:
            return _array_buffers(numpy, value)
        except ValueError:
            pass  # the names of its fields do not fit into the header
    return pickled_buffers(value)


def _array_buffers(numpy: Any, array: Any) -> Sequence[bytes | memoryview]:
    file, form = BytesIO(), numpy.lib.format
    if not array.flags.forc:
        array = numpy.ascontiguousarray(array)
    form.write_array_header_1_0(file, form.header_data_from_array_1_0(array))
    return [file.getvalue(), memoryview(array.ravel(order="K").view(numpy.uint8))]


def pickled_buffers(value: Any, *, beside: bool = True) -> Sequence[bytes | memoryview]:
    """Return the mark, the Python minor version, the number of parts, the length of each part, and the parts:
    first the pickle, then its buffers. Each part is aligned.

    With `beside`, buffers such as those of arrays are parts of their own, which are read-only where the
    object is opened.
    """
    buffers: list[pickle.PickleBuffer] = []
    packed = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append if beside else None)
    parts: list[bytes | memoryview] = [packed, *(buffer.raw() for buffer in buffers)]
    numbers = b"".join(len(part).to_bytes(_NUMBER_BYTES, "little") for part in parts)
    count = len(parts).to_bytes(_NUMBER_BYTES, "little")
    written: list[bytes | memoryview] = [PICKLE_MARK, _python().encode().ljust(_PYTHON_BYTES), count, numbers]
    size = sum(map(len, written))
    for part in parts:
        space = bytes(-size % _ALIGNED_TO)
        written += [space, part]
        size += len(space) + len(part)
    return written


def opened_object(view: memoryview, *, unpickles: bool) -> Any:
    """Return a read-only array, the value that was pickled or is JSON, or the bytes as a read-only view.

    `unpickles` allows to unpickle, which lets the submitter run code of its own. Raises UnreadableObject.
    """
    view = view.toreadonly()
    if view[: len(ARRAY_MARK)] == ARRAY_MARK:
        return _array(view)
    if view[: len(PICKLE_MARK)] == PICKLE_MARK:
        if not unpickles:
            raise UnreadableObject(
                "it is a pickled value, which only a task that is a function opens; give an entrypoint "
                "numpy arrays or bytes"
            )
        return _unpickled(view)
    if view[: len(JSON_MARK)] == JSON_MARK:
        return _json_value(view)
    return view


def _json_value(view: memoryview) -> Any:
    try:
        return json.loads(bytes(view[len(JSON_MARK) :]))
    except ValueError as fault:
        raise UnreadableObject(f"it begins as a value in JSON, and is none: {fault}") from None


def _array(view: memoryview) -> Any:
    try:
        numpy = import_module("numpy")
    except ImportError:
        raise UnreadableObject("it is a numpy array, and this node has no numpy; install it there") from None
    try:
        width = 2 if view[6] == 1 else 4  # of the length, by the version of the format
        begin = 8 + width
        end = begin + int.from_bytes(view[8:begin], "little")
        head = ast.literal_eval(bytes(view[begin:end]).decode("utf-8" if view[6] >= 3 else "latin-1"))
        kind = numpy.lib.format.descr_to_dtype(head["descr"])
        if kind.hasobject:
            raise ValueError("its elements are Python objects")
        order: Any = "F" if head["fortran_order"] else "C"
        count = 1
        for length in head["shape"]:
            count *= length
        flat = numpy.frombuffer(view, kind, count, end) if count else numpy.empty(0, kind)
        return flat.reshape(head["shape"], order=order)
    except Exception as fault:
        raise UnreadableObject(f"it begins as a numpy array, and is none: {fault}") from None


def _unpickled(view: memoryview) -> Any:
    offset = len(PICKLE_MARK)
    python = bytes(view[offset : offset + _PYTHON_BYTES]).decode(errors="replace").strip()
    if python != _python():
        raise UnreadableObject(
            f"Python {python} pickled it and this node runs {_python()}; store it from Python {_python()}, "
            "or store arrays or bytes"
        )
    try:
        packed, *buffers = _parts(view, offset + _PYTHON_BYTES)
        return cloudpickle.loads(packed, buffers=buffers)
    except Exception as fault:
        raise UnreadableObject(f"its pickle cannot be opened: {type(fault).__name__}: {fault}") from None


def _parts(view: memoryview, offset: int) -> Sequence[memoryview]:
    def number() -> int:
        nonlocal offset
        offset += _NUMBER_BYTES
        return int.from_bytes(view[offset - _NUMBER_BYTES : offset], "little")

    count = number()
    lengths = [number() for _ in range(min(count, len(view) // _NUMBER_BYTES))]
    parts = []
    for length in lengths:
        offset += -offset % _ALIGNED_TO
        parts.append(view[offset : offset + length])
        offset += length
    return parts


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
