"""One HTTP/1.1 connection to a model server, and the request that uses it.

Heads are parsed; a body of known length is counted and passed on unchanged. Requests are never pipelined: of
several requests that come together, Triton answers only the first one.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gpubroker_server.core.serving.pieces import joined
from gpubroker_server.ports.backends import Header, ResponseHandler, Trouble, UpstreamRequest

OF_THE_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
"""The headers that concern only one connection and are not passed on (RFC 9110, 7.6.1)."""

WRITE_BUFFER_BYTES = 1024 * 1024
"""The bytes waiting to be sent to the server beyond which the client is paused."""

WAITING_BYTES = 64 * 1024
"""The bytes of a request waiting for a connection beyond which the client is paused."""

_BODYLESS = frozenset({204, 304})


class ConnectionPool(Protocol):
    """The pool from which requests get connections."""

    def on_free(self, connection: "ServerConnection") -> None: ...

    def on_lost(self, connection: "ServerConnection") -> None: ...

    def forget(self, request: "HttpRequest") -> None:
        """Note that the request no longer waits for a connection."""


class HttpRequest(UpstreamRequest):
    """A request, from its beginning to the end of its answer. It may first wait for a connection."""

    __slots__ = (
        "_body",
        "_held",
        "_held_bytes",
        "_is_chunked",
        "_pool",
        "connection",
        "handler",
        "is_head",
        "is_over",
        "is_sent",
    )

    def __init__(
        self, pool: ConnectionPool, head: bytes, handler: ResponseHandler, *, is_head: bool, is_chunked: bool
    ) -> None:
        self._pool = pool
        self._is_chunked = is_chunked
        self.handler = handler
        self.is_head = is_head
        self.is_sent = False
        self.is_over = False
        self.connection: ServerConnection | None = None
        self._held = [head]
        """The bytes that are written together next."""
        self._held_bytes = 0
        self._body: list[bytes] = []
        """The parts of the next chunk."""

    def write(self, data: bytes) -> None:
        if self._is_chunked:
            self._body.append(data)
        else:
            self._held.append(data)
            self._held_bytes += len(data)

    def flush(self) -> None:
        if self._body:
            self._hold_chunk()
        if self.connection is not None:
            self._send(self.connection)
        elif self._held_bytes > WAITING_BYTES and not self.is_over:
            self.handler.pause_body()

    def end(self) -> None:
        if self._is_chunked:
            self._hold_chunk()
            self._held.append(b"0\r\n\r\n")
        self.is_sent = True
        self.flush()

    def cancel(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        connection, self.connection = self.connection, None
        if connection is None:
            self._pool.forget(self)
        else:
            connection.abandon()

    def pause_answer(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume_answer(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    def begin_on(self, connection: "ServerConnection") -> None:
        """Begin a waiting request on this connection, and send its bytes so far."""
        self.connection = connection
        connection.begin(self)
        was_paused = self._held_bytes > WAITING_BYTES
        self._send(connection)
        if was_paused:
            self.handler.resume_body()

    def fail(self, trouble: Trouble, detail: str) -> None:
        if not self.is_over:
            self.is_over = True
            self.connection = None
            self.handler.on_trouble(trouble, detail)

    def _hold_chunk(self) -> None:
        if data := b"".join(self._body):
            self._body.clear()
            self._held += (b"%x\r\n" % len(data), data, b"\r\n")
            self._held_bytes += len(data)

    def _send(self, connection: "ServerConnection") -> None:
        held = self._held
        if held:
            connection.write(held)
            self._held = []
            self._held_bytes = 0


class ServerConnection(asyncio.Protocol):
    def __init__(self, pool: ConnectionPool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = HttpResponseParser(self)
        self._request: HttpRequest | None = None
        self._is_paused = False
        """True while the client takes no more bytes."""
        self._is_full = False
        """True while the server takes no more bytes."""
        self._headers: list[Header] = []
        self._length: int | None = None
        self.moved_at = loop.time()
        """The time when bytes last went over the connection, in either direction."""
        self._begin_answer()

    def begin(self, request: HttpRequest) -> None:
        self._request = request
        self.moved_at = self._loop.time()

    def write(self, parts: Sequence[bytes]) -> None:
        self.moved_at = self._loop.time()
        self._transport.writelines(joined(parts))

    def pause(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.moved_at = self._loop.time()
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Close the connection at once. This tells the server that the answer is no longer wanted."""
        self._request = None
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def is_silent(self, since: float) -> bool:
        """Return True if the server owes an answer or takes no bytes, and no byte has gone over the
        connection since `since`."""
        request = self._request
        if request is None or self._is_paused or self.moved_at >= since:
            return False
        return request.is_sent or self._is_full  # otherwise the client is slow

    def give_up(self, trouble: Trouble, detail: str) -> None:
        request = self._request
        self.abandon()
        if request is not None:
            request.fail(trouble, detail)

    # The event loop calls these methods.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not inherit from it
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        self.moved_at = self._loop.time()
        request = self._request
        if request is None:
            self.abandon()  # no request waits for these bytes
            return
        if self._left_bytes:
            self._take_unparsed(request, data)
        else:
            self._parse(data)
        if not request.is_over:
            request.handler.on_pause()

    def connection_lost(self, error: Exception | None) -> None:
        request, self._request = self._request, None
        self._is_paused = False
        self._pool.on_lost(self)
        if request is None:
            return
        if self._ends_with_connection and error is None:
            self._finish(request)
        else:
            cause = error or "the server closed the connection before its answer had ended"
            request.fail(Trouble.BROKEN, str(cause))

    def pause_writing(self) -> None:
        self._is_full = True
        if self._request is not None:
            self._request.handler.pause_body()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._request is not None:
            self._request.handler.resume_body()

    # The parser calls these methods.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._is_interim = True
            self._headers = []
            return
        assert self._request is not None
        length: int | None = None
        is_chunked = False
        headers: list[Header] = []
        for header in self._headers:
            name = header[0].lower()
            if name == b"content-length":
                length = int(header[1])
            elif name not in OF_THE_CONNECTION:
                headers.append(header)
            elif name == b"transfer-encoding":
                is_chunked = True
        if status in _BODYLESS:
            length = 0
        self._has_head = True
        self._length = length
        self._ends_with_connection = length is None and not is_chunked
        self._keeps_alive = self._parser.should_keep_alive()
        self._request.handler.on_head(status, headers, length)

    def on_body(self, data: bytes) -> None:
        self._seen_bytes += len(data)
        if self._request is not None:
            self._request.handler.on_body(data)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
        elif self._request is not None:
            request, self._request = self._request, None
            self._finish(request)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as fault:
            self.give_up(Trouble.BROKEN, f"what came is no answer in HTTP/1.1: {fault}")
            return
        request = self._request
        if request is None or not self._has_head:
            return
        if request.is_head:  # the answer has the length of a body, but no body
            self._request = None
            self._keeps_alive = False
            self._finish(request)
        elif self._length is not None:
            self._left_bytes = self._length - self._seen_bytes
            self._parser = HttpResponseParser(self)

    def _take_unparsed(self, request: HttpRequest, data: bytes) -> None:
        """Pass on the rest of a body of known length without parsing it."""
        self._left_bytes -= len(data)
        if self._left_bytes > 0:
            request.handler.on_body(data)
        elif self._left_bytes == 0:
            request.handler.on_body(data)
            self._request = None
            self._finish(request)
        else:
            self.give_up(Trouble.BROKEN, "the body was longer than its head had said")

    def _finish(self, request: HttpRequest) -> None:
        """End a request whose answer is complete. The connection is used again only if the whole request was
        sent, because not every server reads the rest."""
        request.is_over = True
        request.connection = None
        is_free = self._keeps_alive and request.is_sent and not self._transport.is_closing()
        self._begin_answer()
        if self._is_paused:
            self.resume()
        if is_free:
            self._pool.on_free(self)
        else:
            self._transport.abort()
        request.handler.on_end()

    def _begin_answer(self) -> None:
        self._headers = []
        self._has_head = False
        self._length = None
        self._seen_bytes = 0
        self._left_bytes = 0
        self._is_interim = False
        self._ends_with_connection = False
        self._keeps_alive = False
