"""Questions to a Triton over HTTP, in its binary form: their tensors are passed on as they are."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.core.serving.batching import Answer, Question, answer_on_wire, wire_of
from gpubroker_server.core.serving.tensors import BadTensor
from gpubroker_server.ports.backends import Header, RequestHead, ResponseHandler, Trouble
from gpubroker_server.ports.inferences import AskFault, AskRefused, Batching, ModelAsker

_HEAD_LENGTH: Final = b"Inference-Header-Content-Length"
_SHOWN_BYTES: Final = 2000

_NOTHING_SENT: Final = frozenset({Trouble.UNREACHABLE, Trouble.BUSY})
_DEAD: Final = "is not healthy"


class TritonAsker(ModelAsker):
    def __init__(self, server: TritonServer, most_bytes: int) -> None:
        """`most_bytes`: no longer is an answer, which is in memory as a whole before it is stored."""
        self._backend = HttpBackend(server)
        self._most_bytes = most_bytes

    @property
    def name(self) -> str:
        return self._backend.name

    async def ask(self, model: str, question: Question) -> Answer:
        head, data = wire_of(question)
        headers = [(_HEAD_LENGTH, b"%d" % len(head)), (b"Content-Type", b"application/octet-stream")]
        try:
            said = await self._said(
                b"POST", _target(model, question.version, "infer"), headers, [head, *data]
            )
        except AskRefused as refused:
            if refused.fault is AskFault.NOT_THERE and question.version:
                await self._look_for_the_version(model, question.version, str(refused))
            raise
        body = said.body
        try:
            return answer_on_wire(body, said.head_bytes or len(body))
        except BadTensor as fault:
            raise AskRefused(
                AskFault.FAILED, f"{self.name} did not answer in its binary form: {fault}"
            ) from None

    async def batching(self, model: str, version: str) -> Batching:
        said = await self._said(b"GET", _target(model, version, "config"), [], [])
        try:
            config: dict[str, Any] = json.loads(said.body)
            is_plain = not (config.get("sequence_batching") or _is_decoupled(config))
            return Batching(max(1, int(config.get("max_batch_size", 0)))) if is_plain else Batching()
        except (ValueError, TypeError, AttributeError) as fault:
            raise AskRefused(
                AskFault.FAILED, f"{self.name} has no configuration of {model}: {fault}"
            ) from None

    async def _look_for_the_version(self, model: str, version: str, refusal: str) -> None:
        """Raises AskRefused of another kind if the model is there and has other versions alone: to wait for
        it would be in vain."""
        said = await self._said(b"GET", f"/v2/models/{quote(model, safe='')}".encode(), [], [])
        try:
            versions = [str(one) for one in json.loads(said.body)["versions"]]
        except (ValueError, TypeError, KeyError):
            return
        if versions and version not in versions:
            raise AskRefused(AskFault.FAILED, f"{refusal}; it has version {', '.join(versions)}") from None

    async def close(self) -> None:
        await self._backend.close()

    async def _said(
        self, method: bytes, target: bytes, headers: Sequence[Header], body: Sequence[bytes]
    ) -> "_Said":
        said = _Said(asyncio.get_running_loop(), self._most_bytes)
        head = RequestHead(method, target, headers, sum(map(len, body)))
        asking = self._backend.ask(head, said)
        for part in body:
            asking.write(part)
        asking.end()
        try:
            await said.end
        finally:
            asking.cancel()
        if said.status != 200:
            raise _refused(said)
        return said


def _target(model: str, version: str, what: str) -> bytes:
    of_version = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(model, safe='')}{of_version}/{what}".encode()


def _is_decoupled(config: dict[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))


def _refused(said: "_Said") -> AskRefused:
    """By status; a model whose process is gone says so in words alone."""
    text = said.body[:_SHOWN_BYTES].decode("utf-8", "replace")
    try:
        message = str(json.loads(said.body)["error"])[:_SHOWN_BYTES]
    except (ValueError, TypeError, KeyError):
        message = f"status {said.status}: {text}"
    match said.status:
        case 404:
            return AskRefused(AskFault.NOT_THERE, message)
        case 429 | 502 | 503 | 504:
            return AskRefused(AskFault.UNREACHABLE, message)
        case 400 | 413 | 501:
            return AskRefused(AskFault.REFUSED, message)
        case _:
            return AskRefused(AskFault.DEAD if _DEAD in message else AskFault.FAILED, message)


class _Said(ResponseHandler):
    """An answer while it comes in, as a whole in the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most_bytes: int) -> None:
        self.end: asyncio.Future[None] = loop.create_future()
        self._left_bytes = most_bytes
        self._most_bytes = most_bytes
        self.status = 0
        self.head_bytes = 0
        self._parts: list[bytes] = []

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
        if not self.end.done():
            most = f"the answer has more than {self._most_bytes} bytes"
            detail = f"{most}; ask for fewer outputs or rows, or raise limits.result_bytes"
            self.end.set_exception(AskRefused(AskFault.REFUSED, detail))

    def on_end(self) -> None:
        if not self.end.done():
            self.end.set_result(None)

    def on_trouble(self, trouble: Trouble, detail: str) -> None:
        fault = AskFault.UNREACHABLE if trouble in _NOTHING_SENT else AskFault.BROKEN
        if trouble is Trouble.TOO_LARGE:
            fault = AskFault.REFUSED
        if not self.end.done():
            self.end.set_exception(AskRefused(fault, detail))
