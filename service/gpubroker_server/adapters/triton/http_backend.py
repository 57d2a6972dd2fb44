"""A model server over HTTP, with a pool of connections and the requests that wait for a connection."""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Final

from gpubroker_server.adapters.triton.http_connection import HttpRequest, ServerConnection
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.backends import (
    Fetched,
    Header,
    ModelBackend,
    NotFetched,
    RequestHead,
    ResponseHandler,
    Trouble,
    UpstreamRequest,
)
from gpubroker_server.settings.triton import ServerConnections

HEAD_BYTES: Final = 8000
"""The longest head of a request. Triton closes the connection without an answer if a head is much longer."""

IDLE_SECONDS: Final = Seconds(30.0)
"""The time after which an unused connection is closed. It is shorter than the usual limit of proxies, which
might close the connection while a request is on its way."""

WAITING_PER_CONNECTION: Final = 16
"""The number of requests that may wait for each connection. Further ones are refused as BUSY."""


class TritonServer(ServerConnections, frozen=True):
    """The address of a server over HTTP, and how to connect to it."""

    name: str
    host: str
    port: int
    authority: bytes
    """The value of the Host header."""
    headers: tuple[Header, ...] = ()
    """The headers with credentials, which only this server receives."""
    tls: ssl.SSLContext | None = None


class HttpBackend(ModelBackend):
    """Sends requests to a server. Connections are opened when they are needed and reused. No request is sent
    twice."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._idle: deque[ServerConnection] = deque()
        """The idle connections, the one that was used most recently last."""
        self._connections: set[ServerConnection] = set()
        self._waiting: deque[HttpRequest] = deque()
        self._checks: deque[HttpRequest] = deque()
        """Checks that wait for a connection. For these, a connection is opened beyond the limit."""
        self._opening: set[asyncio.Task[None]] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._sweep_seconds = min(1.0, server.silence_seconds / 4)
        headers = [(b"Host", server.authority), *server.headers]
        self._own = b"".join(b"%b: %b\r\n" % header for header in headers)
        self._replaced = {name.lower() for name, _ in headers}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def name(self) -> str:
        return self._server.name

    def ask(self, head: RequestHead, handler: ResponseHandler, *, is_check: bool = False) -> UpstreamRequest:
        loop = self._loop = self._loop or asyncio.get_running_loop()
        is_chunked = head.body_bytes is None
        written = self._written(head)
        request = HttpRequest(self, written, handler, is_head=head.method == b"HEAD", is_chunked=is_chunked)
        if len(written) > HEAD_BYTES:
            detail = f"the head of the request has {len(written)} bytes, of which Triton takes {HEAD_BYTES}"
            loop.call_soon(request.fail, Trouble.TOO_LARGE, detail)
            return request
        if (connection := self._idle_connection()) is not None:
            request.connection = connection
            connection.begin(request)
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

    async def fetch(
        self, head: RequestHead, body: bytes = b"", within_seconds: float = 10.0, *, is_check: bool = False
    ) -> Fetched:
        whole = WholeResponse()
        request = self.ask(head._replace(body_bytes=len(body)), whole, is_check=is_check)
        try:
            request.write(body)
            request.end()
            async with asyncio.timeout(within_seconds):
                return await whole.fetched
        except TimeoutError:
            raise NotFetched(Trouble.SILENT, f"nothing came for {within_seconds:g} s") from None
        finally:
            request.cancel()

    async def close(self) -> None:
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for task in self._opening:
            task.cancel()
        for connection in list(self._connections):
            connection.give_up(Trouble.BROKEN, "the service ends")
        for waiting in (self._checks, self._waiting):
            while waiting:
                waiting.popleft().fail(Trouble.UNREACHABLE, "the service ends")

    # Connections and requests call these methods.

    def on_free(self, connection: ServerConnection) -> None:
        if self._checks:
            self._checks.popleft().begin_on(connection)
        elif len(self._connections) > self._server.connections:
            connection.close()
        elif self._waiting:
            self._waiting.popleft().begin_on(connection)
        else:
            self._idle.append(connection)

    def on_lost(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
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

    def _idle_connection(self) -> ServerConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing():
                return connection
        return None

    def _open_more(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open a connection for each waiting request, up to the limit, and for each waiting check, beyond
        the limit too."""
        most = max(0, self._server.connections - len(self._connections))
        while len(self._opening) < min(len(self._waiting), most) + len(self._checks):
            task = loop.create_task(self._open(loop))
            self._opening.add(task)
            task.add_done_callback(self._on_opened)
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(self._sweep_seconds, self._sweep, loop)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        server = self._server
        try:
            async with asyncio.timeout(server.connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: ServerConnection(self, loop), server.host, server.port, ssl=server.tls
                )
        except (OSError, TimeoutError) as fault:
            detail = str(fault) or f"no connection within {server.connect_seconds:g} s"
            if waiting := self._checks or self._waiting:
                waiting.popleft().fail(Trouble.UNREACHABLE, detail)
            return
        self._connections.add(connection)
        self.on_free(connection)

    def _on_opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if (self._waiting or self._checks) and not task.cancelled():
            self._open_more(task.get_loop())

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close unused connections, and those on which the server is silent. This is repeated while there
        are connections."""
        now = loop.time()
        silence_seconds = self._server.silence_seconds
        silent = [
            connection for connection in self._connections if connection.is_silent(now - silence_seconds)
        ]
        for connection in silent:
            connection.give_up(Trouble.SILENT, f"nothing came for {silence_seconds:g} s")
        while self._idle and self._idle[0].moved_at < now - IDLE_SECONDS:
            self._idle.popleft().close()
        busy = self._connections or self._opening
        self._sweep_timer = loop.call_later(self._sweep_seconds, self._sweep, loop) if busy else None


class WholeResponse(ResponseHandler):
    """Collects the whole answer to a request that the service makes itself."""

    def __init__(self) -> None:
        self.fetched: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._headers: Sequence[Header] = ()
        self._body: list[bytes] = []

    def on_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:  # noqa: ARG002  # it is counted as it comes
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_end(self) -> None:
        if not self.fetched.done():
            self.fetched.set_result(Fetched(self._status, self._headers, b"".join(self._body)))

    def on_trouble(self, trouble: Trouble, detail: str) -> None:
        if not self.fetched.done():
            self.fetched.set_exception(NotFetched(trouble, detail))
