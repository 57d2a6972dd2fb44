"""Sends queued inferences to a Triton over HTTP in its binary format, so that tensors are passed on
unchanged."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.core.serving.batching import (
    InferenceRequest,
    InferenceResponse,
    decoded_response,
    encoded_request,
)
from gpubroker_server.core.serving.tensors import BadTensor, Tensor
from gpubroker_server.ports.backends import Header, RequestHead, ResponseHandler, Trouble
from gpubroker_server.ports.inferences import (
    Batching,
    InferenceClient,
    InferenceFailed,
    InferenceFault,
    ReadObject,
)

_HEAD_LENGTH: Final = b"Inference-Header-Content-Length"
_SHOWN_BYTES: Final = 2000

_NOTHING_SENT: Final = frozenset({Trouble.UNREACHABLE, Trouble.BUSY})
_DEAD: Final = "is not healthy"


class TritonInferenceClient(InferenceClient):
    def __init__(self, server: TritonServer, most_bytes: int) -> None:
        """`most_bytes` is the most bytes of a response. A response is in memory as a whole before it is
        stored."""
        self._backend = HttpBackend(server)
        self._most_bytes = most_bytes

    @property
    def name(self) -> str:
        return self._backend.name

    async def infer(
        self, model: str, request: InferenceRequest, read: ReadObject | None = None
    ) -> InferenceResponse:
        head, tensors = encoded_request(request)
        headers = [(_HEAD_LENGTH, b"%d" % len(head)), (b"Content-Type", b"application/octet-stream")]
        path = _path(model, request.version, "infer")
        try:
            response = await self._ask(b"POST", path, headers, head, tensors, read)
        except InferenceFailed as failed:
            if failed.fault is InferenceFault.NOT_THERE and request.version:
                await self._check_version(model, request.version, str(failed))
            raise
        body = response.body
        try:
            return decoded_response(body, response.head_bytes or len(body))
        except BadTensor as fault:
            detail = f"{self.name} did not answer in its binary form: {fault}"
            raise InferenceFailed(InferenceFault.FAILED, detail) from None

    async def batching(self, model: str, version: str) -> Batching:
        response = await self._ask(b"GET", _path(model, version, "config"))
        try:
            config: dict[str, Any] = json.loads(response.body)
            is_decoupled = config.get("model_transaction_policy", {}).get("decoupled")
            is_plain = not (config.get("sequence_batching") or is_decoupled)
            return Batching(max(1, int(config.get("max_batch_size", 0)))) if is_plain else Batching()
        except (ValueError, TypeError, AttributeError) as fault:
            detail = f"{self.name} has no configuration of {model}: {fault}"
            raise InferenceFailed(InferenceFault.FAILED, detail) from None

    async def _check_version(self, model: str, version: str, refusal: str) -> None:
        """Check that the version may still become available. Raises InferenceFailed FAILED if the model is
        loaded with other versions only."""
        response = await self._ask(b"GET", f"/v2/models/{quote(model, safe='')}".encode())
        try:
            versions = [str(version_name) for version_name in json.loads(response.body)["versions"]]
        except (ValueError, TypeError, KeyError):
            return
        if versions and version not in versions:
            detail = f"{refusal}; it has version {', '.join(versions)}"
            raise InferenceFailed(InferenceFault.FAILED, detail) from None

    async def close(self) -> None:
        await self._backend.close()

    async def _ask(
        self,
        method: bytes,
        path: bytes,
        headers: Sequence[Header] = (),
        begin: bytes = b"",
        tensors: Sequence[Tensor] = (),
        read: ReadObject | None = None,
    ) -> "_Response":
        response = _Response(asyncio.get_running_loop(), self._most_bytes)
        body_bytes = len(begin) + sum(tensor.size_bytes for tensor in tensors)
        request = self._backend.ask(RequestHead(method, path, headers, body_bytes), response)
        try:
            request.write(begin)
            for tensor in tensors:
                if not tensor.stored:
                    request.write(tensor.data)
                    continue
                assert read is not None, "only requests of the queue name objects"
                async for part in read(tensor.stored, tensor.stored_bytes):
                    request.write(part)
                    request.flush()
                    await response.until_writable()
                    if response.end.done():
                        break
            request.end()
            await response.end
        finally:
            request.cancel()
        if response.status != 200:
            raise _failure(response)
        return response


def _path(model: str, version: str, path: str) -> bytes:
    of_version = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(model, safe='')}{of_version}/{path}".encode()


def _failure(response: "_Response") -> InferenceFailed:
    """Return the failure for a response's status. That a model's process is gone is shown only by the
    message."""
    text = response.body[:_SHOWN_BYTES].decode("utf-8", "replace")
    try:
        message = str(json.loads(response.body)["error"])[:_SHOWN_BYTES]
    except (ValueError, TypeError, KeyError):
        message = f"status {response.status}: {text}"
    match response.status:
        case 404:
            fault = InferenceFault.NOT_THERE
        case 429 | 502 | 503 | 504:
            fault = InferenceFault.UNREACHABLE
        case 400 | 413 | 501:
            fault = InferenceFault.REFUSED
        case _:
            fault = InferenceFault.DEAD if _DEAD in message else InferenceFault.FAILED
    return InferenceFailed(fault, message)


class _Response(ResponseHandler):
    """Collects a response up to a limit of bytes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most_bytes: int) -> None:
        self.end: asyncio.Future[None] = loop.create_future()
        self._left_bytes = most_bytes
        self._most_bytes = most_bytes
        self._writable = asyncio.Event()
        self._writable.set()
        self.status = 0
        self.head_bytes = 0
        self._parts: list[bytes] = []

    async def until_writable(self) -> None:
        """Wait until the server takes more bytes of the request, or has answered without them."""
        await self._writable.wait()

    def pause_body(self) -> None:
        if not self.end.done():
            self._writable.clear()

    def resume_body(self) -> None:
        self._writable.set()

    @property
    def body(self) -> bytes:
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0] if self._parts else b""

    def on_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:  # noqa: ARG002  # of the port
        self.status = status
        for name, value in headers:
            if name.lower() == _HEAD_LENGTH.lower() and value.isdigit():
                self.head_bytes = int(value)

    def on_body(self, data: bytes) -> None:
        self._left_bytes -= len(data)
        if self._left_bytes >= 0:
            self._parts.append(data)
            return
        self._parts.clear()
        excess = f"the answer has more than {self._most_bytes} bytes"
        detail = f"{excess}; ask for fewer outputs or rows, or raise limits.result_bytes"
        self._fail(InferenceFault.REFUSED, detail)

    def on_end(self) -> None:
        if not self.end.done():
            self.end.set_result(None)
        self._writable.set()

    def on_trouble(self, trouble: Trouble, detail: str) -> None:
        if trouble is Trouble.TOO_LARGE:
            self._fail(InferenceFault.REFUSED, detail)
        else:
            is_unsent = trouble in _NOTHING_SENT
            self._fail(InferenceFault.UNREACHABLE if is_unsent else InferenceFault.BROKEN, detail)

    def _fail(self, fault: InferenceFault, detail: str) -> None:
        if not self.end.done():
            self.end.set_exception(InferenceFailed(fault, detail))
        self._writable.set()
