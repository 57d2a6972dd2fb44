"""A server of models over HTTP: one pool of connections, and requests that wait for one of them."""

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Final

import structlog

from gpubroker_server.adapters.triton.http_connection import HttpRequest, ServerConnection
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.backends import (
    Header,
    ModelBackend,
    RequestHead,
    ResponseHandler,
    Trouble,
    UpstreamRequest,
)

log = structlog.get_logger("gpubroker.triton")

HEAD_BYTES: Final = 8000
"""Triton closes the connection without a word when a head is longer than about this."""

IDLE_SECONDS: Final = Seconds(30.0)
"""A line that nobody has used for so long is closed: sooner than proxies in between usually do, who would do
it in the moment in which a request is on its way."""

WAITING_PER_CONNECTION: Final = 16
"""So many requests may wait for each connection; more are told to come again."""


@dataclass(frozen=True, slots=True)
class TritonServer:
    """Where a server is, and how it is spoken to."""

    name: str
    host: str
    port: int
    authority: bytes
    """What it is called in the Host header."""
    headers: tuple[Header, ...] = ()
    """Credentials, which only this server gets."""
    tls: ssl.SSLContext | None = None
    connections: int = 128
    connect_seconds: Seconds = Seconds(5.0)
    silence_seconds: Seconds = Seconds(300.0)


class HttpBackend(ModelBackend):
    """It opens connections as they are needed, and keeps them. What was sent is never sent again."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._idle: deque[ServerConnection] = deque()
        """Used last, last: those at the beginning grow old."""
        self._lines: set[ServerConnection] = set()
        self._waiting: deque[HttpRequest] = deque()
        self._checks: deque[HttpRequest] = deque()
        """Of those that wait, the ones for which a connection is opened beyond the limit."""
        self._opening: set[asyncio.Task[None]] = set()
        self._look: asyncio.TimerHandle | None = None
        self._look_seconds = min(1.0, server.silence_seconds / 4)
        own = [(b"Host", server.authority), *server.headers]
        self._own = b"".join(b"%b: %b\r\n" % header for header in own)
        self._replaced = {name.lower() for name, _ in own}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def name(self) -> str:
        return self._server.name

    def ask(self, head: RequestHead, answer: ResponseHandler, *, is_check: bool = False) -> UpstreamRequest:
        loop = self._loop = self._loop or asyncio.get_running_loop()
        is_chunked = head.body_bytes is None
        written = self._written(head)
        request = HttpRequest(self, written, answer, is_head=head.method == b"HEAD", is_chunked=is_chunked)
        if len(written) > HEAD_BYTES:
            detail = f"the head of the request has {len(written)} bytes, of which Triton takes {HEAD_BYTES}"
            loop.call_soon(request.fail, Trouble.TOO_LARGE, detail)
            return request
        if (line := self._idle_line()) is not None:
            request.line = line
            line.carry(request)
        elif is_check:
            self._checks.append(request)
            self._open_more(loop)
        elif len(self._waiting) >= WAITING_PER_CONNECTION * self._server.connections:
            detail = f"{len(self._waiting)} requests wait for one of {self._server.connections} connections"
            loop.call_soon(request.fail, Trouble.BUSY, detail)
        else:
            self._waiting.append(request)
            self._open_more(loop)
        return request

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        for task in self._opening:
            task.cancel()
        for line in list(self._lines):
            line.give_up(Trouble.BROKEN, "the service ends")
        for waiting in (self._checks, self._waiting):
            while waiting:
                waiting.popleft().fail(Trouble.UNREACHABLE, "the service ends")

    # What lines and requests call.

    def on_free(self, line: ServerConnection) -> None:
        if self._checks:
            self._checks.popleft().begin_on(line)
        elif len(self._lines) > self._server.connections:
            line.close()
        elif self._waiting:
            self._waiting.popleft().begin_on(line)
        else:
            self._idle.append(line)

    def on_lost(self, line: ServerConnection) -> None:
        self._lines.discard(line)
        if line in self._idle:
            self._idle.remove(line)
        if (self._waiting or self._checks) and self._loop is not None:
            self._open_more(self._loop)

    def forget(self, request: HttpRequest) -> None:
        for waiting in (self._checks, self._waiting):
            if request in waiting:
                waiting.remove(request)

    def _written(self, head: RequestHead) -> bytes:
        parts = [head.method, b" ", head.target, b" HTTP/1.1\r\n", self._own]
        for name, value in head.headers:
            if name.lower() not in self._replaced:
                parts += (name, b": ", value, b"\r\n")
        if head.body_bytes is None:
            parts.append(b"Transfer-Encoding: chunked\r\n\r\n")
        elif head.body_bytes or head.method == b"POST":
            parts.append(b"Content-Length: %d\r\n\r\n" % head.body_bytes)
        else:
            parts.append(b"\r\n")
        return b"".join(parts)

    def _idle_line(self) -> ServerConnection | None:
        while self._idle:
            line = self._idle.pop()
            if not line.is_closing():
                return line
        return None

    def _open_more(self, loop: asyncio.AbstractEventLoop) -> None:
        """As many as are waited for, within the limit; for checks beyond it."""
        most = max(0, self._server.connections - len(self._lines))
        while len(self._opening) < min(len(self._waiting), most) + len(self._checks):
            task = loop.create_task(self._open(loop))
            self._opening.add(task)
            task.add_done_callback(self._on_opened)
        if self._look is None:
            self._look = loop.call_later(self._look_seconds, self._look_around, loop)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        server = self._server
        try:
            async with asyncio.timeout(server.connect_seconds):
                _, line = await loop.create_connection(
                    lambda: ServerConnection(self, loop), server.host, server.port, ssl=server.tls
                )
        except (OSError, TimeoutError) as fault:
            why = str(fault) or f"no connection within {server.connect_seconds:g} s"
            if waiting := self._checks or self._waiting:
                waiting.popleft().fail(Trouble.UNREACHABLE, why)
            return
        self._lines.add(line)
        self.on_free(line)

    def _on_opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if (self._waiting or self._checks) and not task.cancelled():
            self._open_more(task.get_loop())

    def _look_around(self, loop: asyncio.AbstractEventLoop) -> None:
        """Again and again while there are lines: for servers that say nothing, and for lines not used."""
        now = loop.time()
        silence_seconds = self._server.silence_seconds
        for line in [line for line in self._lines if line.is_silent(now - silence_seconds)]:
            line.give_up(Trouble.SILENT, f"nothing came for {silence_seconds:g} s")
        while self._idle and self._idle[0].moved_at < now - IDLE_SECONDS:
            self._idle.popleft().close()
        busy = self._lines or self._opening
        self._look = loop.call_later(self._look_seconds, self._look_around, loop) if busy else None
