"""Limits on clients' connections, in particular on those that have not sent a valid token. ADR 125 says why.

The head of a request is parsed in pieces of at most `head_bytes`, so a head that never ends takes less than
twice that many bytes of memory. A connection without a token has `head_seconds` for each whole request, and
the oldest one of an address is closed when the address has too many.
"""

import asyncio
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address
from typing import Any, ClassVar, Final

from gpubroker.wire.answered import encode
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.http.identity import Callers
from gpubroker_server.http.ids import Ids
from gpubroker_server.http.problems import MEDIA_TYPE, Problem, headers_of, problem_document

MAX_HEADERS: Final = 128
"""The largest number of headers of a request. A header costs far more memory than its bytes."""

LINGER_SECONDS: Final = 1.0
"""The time that a connection stays open after a refusal, without being read. If it were closed while the
client sends, the client would lose the answer."""

_LINE_BYTES: Final = len(b": \r\n")
_REQUEST_LINE_BYTES: Final = len(b"  HTTP/1.1\r\n\r\n")


class Connections:
    """The open connections of a port."""

    def __init__(self, limits: ServiceLimits, callers: Callers, ids: Ids) -> None:
        self.limits = limits
        self.ids = ids
        self._callers = callers
        self._open: set[LimitedConnection] = set()
        self._unauthenticated: OrderedDict[LimitedConnection, str] = OrderedDict()
        """Connection without a token -> its address, the oldest connection first."""
        self._by_address: dict[str, OrderedDict[LimitedConnection, None]] = {}
        """Address -> its connections without a token, the oldest connection first."""

    def enter(self, connection: "LimitedConnection", address: str) -> "LimitedConnection | None":
        """Add a connection, and return the connection that must be closed for it; None if there is room for
        both. Returns `connection` itself if there is no room for it."""
        limits = self.limits
        of_address = self._by_address.get(address, ())
        victim: LimitedConnection | None = None
        if len(of_address) >= limits.unauthenticated_connections:
            victim = next(iter(of_address))
        elif len(self._open) >= limits.connections:
            victim = next(iter(self._unauthenticated), connection)
        if victim is not None:
            self.leave(victim)
        if victim is not connection:
            self._open.add(connection)
            self._unauthenticated[connection] = address
            self._by_address.setdefault(address, OrderedDict())[connection] = None
        return victim

    def authenticate(self, connection: "LimitedConnection", authorization: bytes) -> bool:
        """Return True if the header has a valid token. The limits on connections without a token then no
        longer apply to the connection."""
        try:
            self._callers.identify(authorization)
        except Problem:
            return False
        self._forget(connection)
        return True

    def leave(self, connection: "LimitedConnection") -> None:
        """Remove a connection. Removing it again does nothing."""
        self._open.discard(connection)
        self._forget(connection)

    def _forget(self, connection: "LimitedConnection") -> None:
        address = self._unauthenticated.pop(connection, None)
        if address is None:
            return
        of_address = self._by_address[address]
        del of_address[connection]
        if not of_address:
            del self._by_address[address]


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with the limits of its port."""

    port: ClassVar[Connections]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_authenticated = False
        """True once the client has sent a valid token."""
        self._is_between = True
        """True between requests, when everything received so far belongs to complete requests."""
        self._is_in_body = False
        """True once the head of the incoming request is complete."""
        self._advanced = False
        """True if the current piece began or ended a head, or contained a part of a body."""
        self._stalled_bytes = 0
        """The number of bytes in the last pieces that neither began nor ended a head, nor had part of a
        body."""
        self._refusal: Problem | None = None
        """The problem that answers the incoming request, which is not passed on; None if it is not
        refused."""
        self._is_turned_away = False
        self._head_timer: asyncio.TimerHandle | None = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        victim = self.port.enter(self, "" if self.client is None else network_of(self.client[0]))
        if victim is self:
            self._turn_away(Problem("too-many-connections", most=self.port.limits.connections))
            return
        if victim is not None:
            victim.transport.abort()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.port.leave(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data:
            data = self.take_parsed(data)

    def take_parsed(self, data: bytes) -> bytes:
        """Parse the next piece of the data, and return the rest, which is empty if the connection is
        closing."""
        if self._is_turned_away:
            return b""
        limit, rest = self.port.limits.head_bytes, b""
        if len(data) > limit and not (self._is_in_body and self.is_authenticated):
            data, rest = data[:limit], data[limit:]
        self._advanced = False
        rest = self.parse(data) + rest
        self._check_progress(len(data))
        return b"" if self.transport.is_closing() else rest

    def parse(self, data: bytes) -> bytes:
        """Parse the data, and return the rest that the parser does not take."""
        super().data_received(data)
        return b""

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._is_between = self._is_in_body = False
        self._advanced = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_body:  # Trailers are dropped.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.may_begin():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self.on_whole_request()
        if self._refusal is None:
            super().on_message_complete()

    def may_begin(self) -> bool:
        """Return True if the incoming request is not refused. Call it when the head is complete."""
        self._is_in_body = True
        self._advanced = True
        if self._refusal is not None:
            return False
        headers = self.headers
        if not self.is_authenticated:
            for name, value in headers:
                if name.lower() == b"authorization" and self.port.authenticate(self, value):
                    self.is_authenticated = True
                    break
        is_cut = self._head_timer is not None
        if is_cut and self.is_authenticated:
            self._stop_timer()
        if len(headers) > MAX_HEADERS or (is_cut and self._size_of_head() > self.port.limits.head_bytes):
            self._refusal = self._too_large()
        elif not self.is_authenticated and self._is_answering():
            self._refusal = Problem("unauthenticated", found="no token was sent before requests in a row")
        return self._refusal is None

    def on_whole_request(self) -> None:
        self._is_between = True
        self._is_in_body = False
        if self._head_timer is not None:
            self._stop_timer()
            if not self.is_authenticated:
                self._expect_head()

    # Limits.

    def _check_progress(self, piece_bytes: int) -> None:
        """Check the progress of the incoming request, and refuse it if it stalls. Call it after each parsed
        piece."""
        if self._refusal is not None:
            self._turn_away(self._refusal)
            return
        if self._is_between:
            return
        self._stalled_bytes = 0 if self._advanced else self._stalled_bytes + piece_bytes
        is_too_long = self._stalled_bytes >= self.port.limits.head_bytes
        if self._is_in_body:
            if is_too_long:
                # These bytes are trailers or chunk extensions, so the request might never be complete.
                self.transport.abort()
        elif is_too_long or len(self.headers) > MAX_HEADERS:
            self._turn_away(self._too_large())
        elif self._head_timer is None:
            self._expect_head()

    def _size_of_head(self) -> int:
        fields = sum(len(name) + len(value) + _LINE_BYTES for name, value in self.headers)
        return len(self.parser.get_method()) + len(self.url) + _REQUEST_LINE_BYTES + fields

    def _too_large(self) -> Problem:
        return Problem(
            "headers-too-large",
            f"the head of a request may have {self.port.limits.head_bytes} bytes and {MAX_HEADERS} headers; "
            "send fewer or shorter ones, or have the operator raise limits.head_bytes",
        )

    def _expect_head(self) -> None:
        """Start the timer of a head, in two halves. If the process was paused, the first half ends late, and
        the bytes that the client has sent meanwhile are read in the second."""
        self._stop_timer()
        half = self.port.limits.head_seconds / 2
        self._head_timer = self.loop.call_later(half, self._expect_head_at_last, half)

    def _expect_head_at_last(self, seconds: float) -> None:
        self._head_timer = self.loop.call_later(seconds, self._on_late)

    def _on_late(self) -> None:
        self._head_timer = None
        if self._is_in_body or self.transport.is_closing():
            self.transport.abort()  # The client does not send its body, or does not take its answer.
        elif self._is_answering() or self.flow.read_paused:
            self._expect_head()  # The client waits for an answer, or its bytes are not being read.
        elif self._is_between:
            self.transport.close()
        else:
            self._turn_away(Problem("request-timeout", seconds=f"{self.port.limits.head_seconds:g}"))

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    # Refusals.

    def _turn_away(self, problem: Problem) -> None:
        """Answer with the problem and close the connection. If another answer is being sent, close after that
        answer without sending the problem."""
        self._stop_timer()
        self._is_turned_away = True
        self.flow.pause_reading()
        if self._is_answering():
            self.cycle.keep_alive = False
            return
        self.transport.write(self._rendered(problem))
        if problem.code == "headers-too-large":
            self.transport.write_eof()
            self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()

    def _rendered(self, problem: Problem) -> bytes:
        request_id = self.port.ids.exchange()
        state = {"request_id": request_id}
        # The path is left empty: it may not have been received whole.
        body = encode(problem_document(problem, {"path": "", "state": state}))
        headers = {
            "Content-Type": MEDIA_TYPE,
            "Content-Length": str(len(body)),
            "Connection": "close",
            "Request-Id": request_id,
            **headers_of(problem),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return STATUS_LINE[problem.kind.status] + lines.encode("latin-1") + b"\r\n" + body


def limited_by(port: Connections) -> type[LimitedConnection]:
    """Return the protocol class of a port, which uvicorn instantiates for each connection."""

    class Connection(LimitedConnection):
        pass

    Connection.port = port
    return Connection


def network_of(host: str) -> str:
    """Return the address by which connections are counted. Of an IPv6 address these are the first 64 bits,
    because a client usually has at least such a network."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
    return host
