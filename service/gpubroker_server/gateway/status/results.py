"""The result of a task as JSON text that goes into an answer as it is; a large value is never built here."""

import asyncio
import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

from gpubroker_server.core.serving.batching import FORMAT as TENSORS
from gpubroker_server.core.serving.batching import response_in
from gpubroker_server.core.serving.tensors import BadTensor, values_in_steps
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing, BlobStore, StoredResult

NO_RESULT = b'"result":null'

_INLINE_BYTES = 64 * 1024
"""Larger results are prepared on a thread, so that other requests go on."""
_BASE64_STEP = 3 * 2**18


async def result_member(blobs: BlobStore, stored: StoredResult | None) -> bytes:
    """`"result":...` or `"data_base64":"..."`, whichever the bytes are. Raises Problem result-damaged."""
    data = None if stored is None else await _bytes_of(blobs, stored)
    if stored is None or data is None:
        return NO_RESULT
    if len(data) <= _INLINE_BYTES:
        return _member(data, stored.format)
    return await asyncio.to_thread(_member, data, stored.format)


def shown_format(form: str) -> str:
    """The answer of a model is shown as JSON."""
    return "json" if form == TENSORS else form


def _member(data: bytes, form: str) -> bytes:
    if form == "json" and _is_json(data):
        return b'"result":' + data
    if form == TENSORS and (inference := _inference_json(data)) is not None:
        return b'"result":' + inference
    return b'"data_base64":"' + _base64(data) + b'"'


def _inference_json(data: bytes) -> bytes | None:
    """A model's answer as Triton's protocol writes it in JSON. None if the bytes are not an answer."""
    try:
        answer = response_in(data)
        outputs = [(tensor, values_in_steps(tensor)) for tensor in answer.outputs]
    except BadTensor:
        return None
    head = {"model_name": answer.model, "model_version": answer.version}
    if answer.id:
        head["id"] = answer.id
    parts = [json.dumps(head).encode()[:-1], b',"parameters":', json.dumps(answer.parameters).encode()]
    for at, (tensor, steps) in enumerate(outputs):
        described = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        parts += [b"," if at else b',"outputs":[', json.dumps(described).encode()[:-1], b',"data":[']
        parts += _listed(steps)
        parts.append(b"]}")
    return b"".join((*parts, b"]}"))


def _listed(steps: Iterable[list[Any]]) -> Iterator[bytes]:
    """In steps, between which other threads run."""
    for at, values in enumerate(steps):
        yield b"," if at else b""
        yield json.dumps(values, separators=(",", ":")).encode()[1:-1]


def _is_json(data: bytes) -> bool:
    """A process that runs user code wrote it. What only claims to be JSON is passed on as bytes."""
    try:
        _CHECK.decode(data.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _let_others_run(_found: object) -> None:
    """Called for each number and object: without a call into Python the parser lets no other thread run.

    With 60 MB of numbers or objects the event loop is then held up for 30 ms instead of 300 to 600 ms.
    """


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_CHECK = json.JSONDecoder(
    parse_float=_let_others_run,
    parse_int=_let_others_run,
    object_pairs_hook=_let_others_run,
    parse_constant=_refuse,
)


def _base64(data: bytes) -> bytes:
    """In steps, for the same reason."""
    starts = range(0, len(data), _BASE64_STEP)
    return b"".join(base64.b64encode(data[at : at + _BASE64_STEP]) for at in starts)


async def _bytes_of(blobs: BlobStore, stored: StoredResult) -> bytes | None:
    if stored.digest is None:
        return stored.data
    try:
        return await blobs.get(stored.digest)
    except (BlobMissing, BlobCorrupt):
        raise Problem(
            "result-damaged",
            f"the result was stored as object {stored.digest}, whose bytes are missing or damaged; "
            "run the task again, and check the disk that holds the blobs",
        ) from None
