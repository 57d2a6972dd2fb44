"""A minimal HTTP/1.1 client, so that the server is the bottleneck: one request at a time per connection."""

import asyncio
import time
from collections.abc import Mapping
from typing import cast

from msgspec import Struct, field


class Target(Struct, frozen=True):
    """One request."""

    port: int
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    zeros: int = 0
    """The number of zero bytes to append to the body, as the values of a tensor."""

    def encoded(self) -> bytes:
        body = self.body.encode() + bytes(self.zeros)
        headers = {"Host": f"127.0.0.1:{self.port}", **self.headers, "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{self.method} {self.path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Connection(asyncio.Protocol):
    """Calls `on_answer` with the status and the latency of each answer. `ended` raises an error if the
    connection is lost."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = bytearray()
        self._left = 0
        """The bytes of the body that have not arrived yet."""
        self._status = ""
        self._sent_at = 0.0

    def on_answer(self, status: str, ms: float, /) -> None:
        raise NotImplementedError

    def send(self, request: bytes) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def close(self) -> None:
        """Close without an error. No request may be in flight."""
        if not self.ended.done():
            self.ended.set_result(None)
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left -= len(data)
        else:
            self._head += data
            if not self._read_head():
                return
        if not self._left:
            self.on_answer(self._status, 1000 * (time.perf_counter() - self._sent_at))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the server closed a keep-alive connection"))

    def _read_head(self) -> bool:
        """Read the head of an answer. Return False if it is not complete yet."""
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._head[: end + 2]).lower()
        self._status = head[9:12].decode()
        _, named, rest = head.partition(b"\r\ncontent-length:")
        length = int(rest[: rest.index(b"\r\n")]) if named else 0
        self._left = end + 4 + length - len(self._head)
        self._head.clear()
        return True
