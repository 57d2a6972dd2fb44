"""The server's connections with the data plane in front: what is under /v2 never becomes an ASGI request.

Both kinds of requests may come on one connection, one after the other or together; the order of the answers
is that of the requests. See ADR 96 for what this rests on in uvicorn.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.gateway.inference.aims import is_claimed
from service.gateway.inference.exchange import Exchange
from service.gateway.inference.plane import Plane
from service.model_ports import write_together

WRITE_BUFFER_BYTES = 1024 * 1024
"""So much of an answer may wait to be taken by the client before the server of models is held up."""

IDLE_SECONDS = 75
"""Clients of Triton keep connections for later: it never closes one."""


class InferenceConnection(HttpToolsProtocol):
    plane: ClassVar[Plane]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_claimed: bool | None = None
        """The request that comes in is under /v2; None: so little of it is there that nobody knows."""
        self._is_offered = False
        """And would change the protocol if we did."""
        self._incoming: Exchange | None = None
        """Whose request is coming in."""
        self._current: Exchange | None = None
        """Whose turn it is to be answered."""
        self._uncut_bytes = 0
        """Of a body, that are handed on without being parsed."""

    # What the event loop calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._current is not None:
            self._current.on_gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._uncut_bytes:
            self._take_uncut(data)
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except HttpParserUpgrade as offer:
            if self._is_claimed:
                self._decline(data[offer.args[0] :])
            elif self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._unsupported_upgrade_warning()
        incoming = self._incoming
        if incoming is not None:
            incoming.flush()
            self._uncut_bytes = incoming.left_bytes or 0

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._current is not None:
            self._current.hold_answer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._current is not None:
            self._current.go_on_with_answer()

    # What the parser calls.

    def on_message_begin(self) -> None:
        self.url = b""
        self._is_claimed = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_claimed is None:
            self._claim()
        if self._is_claimed:
            self.headers.append((name, value))  # spelled as they came
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_claimed is None:
            self._claim()
        if not self._is_claimed:
            super().on_headers_complete()
            return
        parser = self.parser
        self._is_offered = parser.should_upgrade()
        is_current = parser.get_http_version() != "1.0"
        exchange = Exchange(
            self.plane,
            self,
            parser.get_method(),
            self.url,
            self.headers,
            keep_alive=is_current and parser.should_keep_alive(),
            takes_chunks=is_current,
        )
        before = cast(RequestResponseCycle | None, self.cycle)
        cycle = cast(RequestResponseCycle, exchange)
        self.cycle = cycle
        self._incoming = exchange
        if before is None or before.response_complete:
            self._current = exchange
            exchange.begin()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        if self._incoming is None:
            super().on_body(body)
        else:
            self._incoming.on_request_body(body)

    def on_message_complete(self) -> None:
        incoming = self._incoming
        if incoming is None:
            super().on_message_complete()
        elif not self._is_offered:  # or the body is yet to come, which the parser takes for something else
            self._incoming = None
            incoming.on_request_end()

    # What uvicorn's part of this calls.

    def _start_asgi_task(self, cycle: RequestResponseCycle | Exchange, app: ASGI3Application) -> None:
        """The turn of a request has come, that waited behind another one."""
        if isinstance(cycle, Exchange):
            self._current = cycle
            self.loop.call_soon(self._begin, cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def _begin(self, exchange: Exchange) -> None:
        if not self.transport.is_closing():
            exchange.begin()
            exchange.flush()

    def send_400_response(self, msg: str) -> None:
        if self._current is None:
            super().send_400_response(msg)
        else:
            self.cut_off()  # in the middle of another answer it would be taken for a part of that

    # What exchanges call.

    @property
    def is_full(self) -> bool:
        return self.flow.write_paused

    def write(self, parts: Sequence[bytes]) -> None:
        write_together(self.transport, parts)

    def hold_body(self) -> None:
        self.flow.pause_reading()

    def go_on_with_body(self) -> None:
        self.flow.resume_reading()

    def on_answered(self, exchange: Exchange) -> None:
        self._current = None
        self.timeout_keep_alive = IDLE_SECONDS
        if not exchange.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def cut_off(self) -> None:
        self.transport.abort()

    def _claim(self) -> None:
        """The target is complete. What is not ours begins as it would have begun without us."""
        url = self.url
        self._is_claimed = is_claimed(url)
        if self._is_claimed:
            self.headers = []
        else:
            super().on_message_begin()
            self.url = url

    def _decline(self, rest: bytes) -> None:
        """The protocol stays as it is: what follows the head is the body, and the next request."""
        self._is_offered = False
        incoming = self._incoming
        assert incoming is not None
        if incoming.left_bytes is None:
            self.cut_off()  # chunks would have to be read without the parser; nobody offers that
            return
        self._uncut_bytes = incoming.left_bytes
        self._take_uncut(rest)

    def _take_uncut(self, data: bytes) -> None:
        """The rest of a body of known length, past the parser, which begins anew after it."""
        self._unset_keepalive_if_required()
        incoming = self._incoming
        assert incoming is not None
        rest = data[self._uncut_bytes :]
        mine = data[: self._uncut_bytes] if rest else data
        self._uncut_bytes -= len(mine)
        incoming.on_request_body(mine)
        if self._uncut_bytes:
            incoming.flush()
            return
        self.parser = HttpRequestParser(self)
        self.on_message_complete()
        if rest:
            self.data_received(rest)


def in_front_of(plane: Plane) -> type[InferenceConnection]:
    """What uvicorn makes of each connection."""

    class Connection(InferenceConnection):
        pass

    Connection.plane = plane
    return Connection
