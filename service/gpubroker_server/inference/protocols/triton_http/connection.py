"""The connections of the HTTP server. A request under /v2 goes to the data plane and never becomes an ASGI
request.

Requests of both kinds may come on one connection and are answered in the order in which they came. ADR 96
lists the parts of uvicorn that this relies on.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gpubroker_server.core.serving.pieces import joined
from gpubroker_server.http.connections import Connections, LimitedConnection
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.protocols.triton.operations import is_triton_path
from gpubroker_server.inference.protocols.triton_http.exchange import HttpExchange
from gpubroker_server.inference.protocols.triton_http.heads import ClientHead, client_head

WRITE_BUFFER_BYTES = 1024 * 1024
"""The most bytes of an answer that may wait for the client before the model server is paused."""


class ParsedText(NamedTuple):
    """The bytes of a head, and the head that was parsed from them. Most clients send the same bytes again and
    again."""

    text: bytes
    head: ClientHead


class InferenceConnection(LimitedConnection):
    plane: ClassVar[Plane]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_ours: bool | None = None
        """True if the incoming request is under /v2; None if too little of it has come to tell."""
        self._offers_upgrade = False
        """True if the incoming request is under /v2 and offers to change the protocol."""
        self._incoming: HttpExchange | None = None
        """The request under /v2 that is coming in."""
        self._current: HttpExchange | None = None
        """The request under /v2 that is being answered."""
        self._unparsed_bytes = 0
        """The number of bytes of a body that are yet to come and are passed on without being parsed."""
        self._heads = 0
        """Number of heads that were parsed in one reading."""
        self._parsed: ClientHead | None = None
        """The head that was parsed last, if an equal head may skip the parser."""
        self._known: ParsedText | None = None
        """The head that skips the parser when it comes again."""

    # Methods for the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._current is not None:
            self._current.on_gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while True:  # One reading may hold thousands of requests.
            if self._unparsed_bytes:
                data = self._take_unparsed(data)
            elif self._known is not None and self._is_between and data.startswith(self._known.text):
                data = self._take_known(self._known, data)
            else:
                data = self.take_parsed(data)
            if not data or self.transport.is_closing():
                break
        if self._incoming is not None:
            self._incoming.flush()

    def parse(self, data: bytes) -> bytes:
        self._unset_keepalive_if_required()
        is_first, self._heads = self._is_between, 0
        rest = b""
        try:
            self.parser.feed_data(data)
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except HttpParserUpgrade as offer:
            if self._refusal is not None:
                pass
            elif self._is_ours:
                rest = data[offer.args[0] :]
                self._decline()
            elif self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._unsupported_upgrade_warning()
        if self._incoming is not None:
            self._unparsed_bytes = self._incoming.left_bytes or 0
        elif is_first and self._heads == 1 and self._is_between:
            self._remember(data)
        return rest

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._current is not None:
            self._current.pause_answer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._current is not None:
            self._current.resume_answer()

    # Methods for the parser.

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._is_ours = None
        self._is_between = self._is_in_body = False
        self._advanced = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_ours is None:
            self._decide()
        if not self._is_ours:
            super().on_header(name, value)
        elif not self._is_in_body:
            # Names keep their spelling, because the headers are passed on as they came.
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_ours is None:
            self._decide()
        if not self._is_ours:
            super().on_headers_complete()
            return
        if not self.may_begin():
            return
        parser = self.parser
        self._heads += 1
        self._offers_upgrade = parser.should_upgrade()
        is_current = parser.get_http_version() != "1.0"
        keep_alive = is_current and parser.should_keep_alive()
        head = client_head(parser.get_method(), self.url, self.headers)
        may_skip = (
            self.is_authenticated and keep_alive and head.body_bytes is not None and not self._offers_upgrade
        )
        self._parsed = head if may_skip else None
        self._begin_request(head, keep_alive, is_current)

    def _begin_request(self, head: ClientHead, keep_alive: bool, takes_chunks: bool) -> None:
        exchange = HttpExchange(self.plane, self, head, keep_alive=keep_alive, takes_chunks=takes_chunks)
        before = cast(RequestResponseCycle | None, self.cycle)
        cycle = cast(RequestResponseCycle, exchange)
        self.cycle = cycle
        self._incoming = exchange
        if before is None or before.response_complete:
            self._current = exchange
            exchange.begin()
        else:
            # The request waits for the answers before it, and its body waits with it.
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        if self._incoming is None:
            super().on_body(body)
        else:
            self._advanced = True
            self._incoming.on_request_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return  # The parser does not count what follows an offer as the body, which is yet to come.
        incoming = self._incoming
        if incoming is None:
            super().on_message_complete()
        else:
            self.on_whole_request()
            self._incoming = None
            incoming.on_request_end()

    # Methods for uvicorn's part of the connection.

    def _start_asgi_task(self, cycle: RequestResponseCycle | HttpExchange, app: ASGI3Application) -> None:
        """Start a request that waited behind another one, and whose turn has come."""
        if isinstance(cycle, HttpExchange):
            self._current = cycle
            self.loop.call_soon(self._begin, cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def _begin(self, exchange: HttpExchange) -> None:
        if not self.transport.is_closing():
            exchange.begin()
            exchange.flush()

    def send_400_response(self, msg: str) -> None:
        if self._current is None:
            super().send_400_response(msg)
        else:
            # In the middle of another answer, a client would take the error for a part of that answer.
            self.cut_off()

    # Methods for exchanges.

    @property
    def is_full(self) -> bool:
        return self.flow.write_paused

    def write(self, parts: Sequence[bytes]) -> None:
        self.transport.writelines(joined(parts))

    def pause_body(self) -> None:
        self.flow.pause_reading()

    def resume_body(self) -> None:
        self.flow.resume_reading()

    def on_answered(self, exchange: HttpExchange) -> None:
        self._current = None
        self.timeout_keep_alive = self.port.limits.idle_seconds
        if not exchange.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def cut_off(self) -> None:
        self.transport.abort()

    def _decide(self) -> None:
        """Decide by the path, which is complete, whether the request is under /v2. If it is not, uvicorn gets
        the request from its beginning."""
        url = self.url
        self._is_ours = is_triton_path(url)
        if not self._is_ours:
            super().on_message_begin()
            self.url = url

    def _decline(self) -> None:
        """Decline the offer to change the protocol. As in every request, the body follows the head, and the
        next request follows the body."""
        self._offers_upgrade = False
        incoming = self._incoming
        assert incoming is not None
        if incoming.left_bytes is None:
            # Chunks would have to be read without the parser. No known client sends them with an offer.
            self.cut_off()
        elif not incoming.left_bytes:
            self._end_unparsed()

    def _take_unparsed(self, data: bytes) -> bytes:
        """Pass on the bytes of a body of known length without the parser. Returns the bytes behind the
        body."""
        self._unset_keepalive_if_required()
        incoming = self._incoming
        assert incoming is not None
        rest = data[self._unparsed_bytes :]
        body = data[: self._unparsed_bytes] if rest else data
        self._unparsed_bytes -= len(body)
        incoming.on_request_body(body)
        if not self._unparsed_bytes:
            self._end_unparsed()
        return rest

    def _end_unparsed(self) -> None:
        """End a body that was passed on without the parser."""
        # A parser that has seen the head still waits for the body, so a new one begins after it.
        if not self._is_between:
            self.parser = HttpRequestParser(self)
        self.on_message_complete()

    def _remember(self, data: bytes) -> None:
        """Remember the head of the request in `data`, if `data` is exactly one request."""
        parsed = self._parsed
        if parsed is not None:
            # A head whose lines do not end in CR LF fails this comparison and is not kept.
            end = data.find(b"\r\n\r\n") + 4
            if len(data) == end + (parsed.body_bytes or 0):
                self._known = ParsedText(data[:end], parsed)

    def _take_known(self, parsed: ParsedText, data: bytes) -> bytes:
        """Begin a request whose head was parsed before. The parser gets nothing of the request, and still
        expects a new one. Returns the bytes that follow the head."""
        self._unset_keepalive_if_required()
        self._begin_request(parsed.head, True, True)
        self._unparsed_bytes = parsed.head.body_bytes or 0
        if not self._unparsed_bytes:
            self.on_message_complete()
        return data[len(parsed.text) :]


def in_front_of(plane: Plane, port: Connections) -> type[InferenceConnection]:
    """Return the class that uvicorn instantiates for each connection."""

    class Connection(InferenceConnection):
        pass

    Connection.plane, Connection.port = plane, port
    return Connection
