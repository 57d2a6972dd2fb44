"""One HTTP/1.1 connection to a server of models, and the request that is on it.

Heads are parsed, bodies are not: what has a stated length is counted and handed on as it came. Nothing is
ever pipelined: Triton answers the first of several requests that come together, and forgets the others.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gpubroker_server.ports.backends import Header, ResponseHandler, Trouble, UpstreamRequest, write_together

OF_THE_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
"""Headers that concern this connection alone (RFC 9110, 7.6.1)."""

WRITE_BUFFER_BYTES = 1024 * 1024
"""So much may wait to be taken by the server before the client is held up."""

HELD_BYTES = 64 * 1024
"""The same of a request that waits for a connection."""

_BODYLESS = frozenset({204, 304})


class Pool(Protocol):
    """Where lines come from and go to."""

    def on_free(self, line: "ServerConnection") -> None: ...

    def on_lost(self, line: "ServerConnection") -> None: ...

    def forget(self, request: "HttpRequest") -> None:
        """It no longer waits for a line."""
        ...


class HttpRequest(UpstreamRequest):
    """From the moment it is asked for until its answer has ended, whichever line it is on."""

    __slots__ = (
        "_body",
        "_held",
        "_held_bytes",
        "_is_chunked",
        "_pool",
        "answer",
        "is_head",
        "is_over",
        "is_sent",
        "line",
    )

    def __init__(
        self, pool: Pool, head: bytes, answer: ResponseHandler, *, is_head: bool, is_chunked: bool
    ) -> None:
        self._pool = pool
        self._is_chunked = is_chunked
        self.answer = answer
        self.is_head = is_head
        self.is_sent = False
        self.is_over = False
        self.line: ServerConnection | None = None
        self._held = [head]
        """What goes out next, in one writing."""
        self._held_bytes = 0
        self._body: list[bytes] = []
        """The next chunk."""

    def write(self, data: bytes) -> None:
        if self._is_chunked:
            self._body.append(data)
        else:
            self._held.append(data)
            self._held_bytes += len(data)

    def flush(self) -> None:
        if self._body:
            self._hold_chunk()
        if self.line is not None:
            self._send(self.line)
        elif self._held_bytes > HELD_BYTES and not self.is_over:
            self.answer.pause_body()

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
        line, self.line = self.line, None
        if line is None:
            self._pool.forget(self)
        else:
            line.abandon()

    def pause_answer(self) -> None:
        if self.line is not None:
            self.line.hold()

    def resume_answer(self) -> None:
        if self.line is not None:
            self.line.go_on()

    def begin_on(self, line: "ServerConnection") -> None:
        """Of those that waited, send what has been held."""
        self.line = line
        line.carry(self)
        was_held_up = self._held_bytes > HELD_BYTES
        self._send(line)
        if was_held_up:
            self.answer.resume_body()

    def fail(self, trouble: Trouble, detail: str) -> None:
        if not self.is_over:
            self.is_over = True
            self.line = None
            self.answer.on_trouble(trouble, detail)

    def _hold_chunk(self) -> None:
        if data := b"".join(self._body):
            self._body.clear()
            self._held += (b"%x\r\n" % len(data), data, b"\r\n")
            self._held_bytes += len(data)

    def _send(self, line: "ServerConnection") -> None:
        held = self._held
        if held:
            line.write(held)
            self._held = []
            self._held_bytes = 0


class ServerConnection(asyncio.Protocol):
    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = HttpResponseParser(self)
        self._request: HttpRequest | None = None
        self._is_held = False
        """The client takes no more."""
        self._is_full = False
        """The server takes no more."""
        self._headers: list[Header] = []
        self._length: int | None = None
        self.moved_at = loop.time()
        """When bytes went over it last, either way."""
        self._begin_answer()

    def carry(self, request: HttpRequest) -> None:
        self._request = request
        self.moved_at = self._loop.time()

    def write(self, parts: Sequence[bytes]) -> None:
        self.moved_at = self._loop.time()
        write_together(self._transport, parts)

    def hold(self) -> None:
        self._is_held = True
        self._transport.pause_reading()

    def go_on(self) -> None:
        if self._is_held:
            self._is_held = False
            self.moved_at = self._loop.time()
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Close it with all that is on its way: so the server hears that nobody waits any more."""
        self._request = None
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def is_silent(self, since: float) -> bool:
        """Somebody waits for its server, and nothing has gone over it since then."""
        request = self._request
        if request is None or self._is_held or self.moved_at >= since:
            return False
        return request.is_sent or self._is_full  # else it is the client who is slow

    def give_up(self, trouble: Trouble, detail: str) -> None:
        request = self._request
        self.abandon()
        if request is not None:
            request.fail(trouble, detail)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not inherit from it
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        self.moved_at = self._loop.time()
        request = self._request
        if request is None:
            self.abandon()  # nobody has asked for anything
            return
        if self._left_bytes:
            self._take_uncut(request, data)
        else:
            self._parse(data)
        if not request.is_over:
            request.answer.on_pause()

    def connection_lost(self, error: Exception | None) -> None:
        request, self._request = self._request, None
        self._is_held = False
        self._pool.on_lost(self)
        if request is None:
            return
        if self._ends_with_connection and error is None:
            self._finish(request)
        else:
            why = error or "the server closed the connection before its answer had ended"
            request.fail(Trouble.BROKEN, str(why))

    def pause_writing(self) -> None:
        self._is_full = True
        if self._request is not None:
            self._request.answer.pause_body()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._request is not None:
            self._request.answer.resume_body()

    # What the parser calls.

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
        self._request.answer.on_head(status, headers, length)

    def on_body(self, data: bytes) -> None:
        self._seen_bytes += len(data)
        if self._request is not None:
            self._request.answer.on_body(data)

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
        if request.is_head:  # whose answer says how long a body would be, and has none
            self._request = None
            self._keeps_alive = False
            self._finish(request)
        elif self._length is not None:
            self._left_bytes = self._length - self._seen_bytes
            self._parser = HttpResponseParser(self)

    def _take_uncut(self, request: HttpRequest, data: bytes) -> None:
        """The rest of a body of known length, past the parser."""
        self._left_bytes -= len(data)
        if self._left_bytes > 0:
            request.answer.on_body(data)
        elif self._left_bytes == 0:
            request.answer.on_body(data)
            self._request = None
            self._finish(request)
        else:
            self.give_up(Trouble.BROKEN, "the body was longer than its head had said")

    def _finish(self, request: HttpRequest) -> None:
        """The answer is complete. What was not asked to the end is not answered to the end by everybody, so
        that only a line on which all was sent is used again."""
        request.is_over = True
        request.line = None
        is_free = self._keeps_alive and request.is_sent and not self._transport.is_closing()
        self._begin_answer()
        if self._is_held:
            self.go_on()
        if is_free:
            self._pool.on_free(self)
        else:
            self._transport.abort()
        request.answer.on_end()

    def _begin_answer(self) -> None:
        self._headers = []
        self._has_head = False
        self._length = None
        self._seen_bytes = 0
        self._left_bytes = 0
        self._is_interim = False
        self._ends_with_connection = False
        self._keeps_alive = False
