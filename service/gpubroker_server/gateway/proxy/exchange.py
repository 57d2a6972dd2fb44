"""One request under /v2 and its answer, on a client's connection.

The server that owns the connection takes it for one of its own cycles: it reads `response_complete`, and
writes `keep_alive` and `disconnected`.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Protocol

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.aims import aim_of
from gpubroker_server.gateway.proxy.lanes import Turn
from gpubroker_server.gateway.proxy.plane import Plane, Told
from gpubroker_server.gateway.proxy.refusals import our_mistake, problem_of, rendered
from gpubroker_server.gateway.proxy.server import Server
from gpubroker_server.ports.backends import Answer, Asking, Header, RequestHead, Trouble

log = structlog.get_logger("gpubroker.inference")

DRAIN_SECONDS: Final = 5.0
DRAIN_BYTES: Final = 64 * 1024 * 1024
DRAIN_STRANGER_BYTES: Final = 1024 * 1024
"""A client that is refused while it still sends would not read why: most send everything first. So much is
taken from it before it is told, and less from one that nobody knows."""

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Client(Protocol):
    """The connection that it is on."""

    @property
    def is_full(self) -> bool:
        """It takes no more for now; `go_on_with_answer` is called when it does."""
        ...

    def write(self, parts: Sequence[bytes]) -> None:
        """Together."""
        ...

    def hold_body(self) -> None: ...

    def go_on_with_body(self) -> None: ...

    def on_answered(self, exchange: "Exchange") -> None:
        """It is over; the connection is closed unless `keep_alive`."""
        ...

    def cut_off(self) -> None: ...


class Exchange(Answer):
    message_event = asyncio.Event()
    """Set when the client has gone; nobody waits for it here."""
    response_complete = False
    disconnected = False

    request_id = ""
    _began = 0.0
    _status = 0
    _seen_bytes = 0
    """Of the body."""
    _is_complete = False
    """All of the request has come."""
    _reads_first = False
    """The body is looked into before anything is sent."""
    _sends_chunks = False
    _asking: Asking | None = None
    turn: Turn | None = None
    """At the model, if it needs one."""
    server: Server | None = None
    """That was asked."""
    _identity: Identity | None = None
    """Whose token it came with; None where nobody is asked for one."""
    _refusal: Problem | None = None
    _giving_up: asyncio.TimerHandle | None = None

    def __init__(
        self,
        plane: Plane,
        client: Client,
        method: bytes,
        target: bytes,
        told: Told,
        *,
        keep_alive: bool,
        takes_chunks: bool,
    ) -> None:
        self.keep_alive = keep_alive
        self._plane = plane
        self._client = client
        self._method = method
        self._target = target
        self._told = told
        self._body_bytes = told.body_bytes
        self._takes_chunks = takes_chunks
        self._aim = aim_of(method, target)
        self._pieces: list[bytes] = []
        """Of the body, before its turn has come."""
        self._out: list[bytes] = []
        """Of the answer, until the end of one reading."""

    @property
    def left_bytes(self) -> int | None:
        """Of the body, that are yet to come; None if nobody knows."""
        return None if self._body_bytes is None else self._body_bytes - self._seen_bytes

    # What the client's connection calls.

    def begin(self) -> None:
        """Its turn has come: what was asked on this connection before is answered."""
        self._began = time.perf_counter()
        self.request_id = self._plane.ids.exchange()
        try:
            self._identity = self._plane.check(self._aim, self._told)
            self._reads_first = self._plane.reads(self._aim)
            if not self._reads_first:
                self._asking = self._ask()
        except Exception as fault:
            self._refuse(self._problem_of(fault))
            return
        if self._waits_for_leave() and not self._is_complete:
            self._client.write([_CONTINUE])
        if self._asking is not None:
            self._send_on(self._asking)
        if self._is_complete:
            self.on_request_end()

    def _ask(self) -> Asking:
        """Raises Problem."""
        head = RequestHead(self._method, self._target, self._told.passed_on, self._body_bytes)
        return self._plane.send(head, self, self._aim, self._told, self._identity)

    def _send_on(self, asking: Asking) -> None:
        for piece in self._pieces:
            asking.write(piece)
        self._pieces.clear()

    def _problem_of(self, fault: Exception) -> Problem:
        if isinstance(fault, Problem):
            return fault
        log.error("request failed", request=self.request_id, path=self._aim.route, exc_info=fault)
        return our_mistake(self.request_id)

    def on_request_body(self, data: bytes) -> None:
        self._seen_bytes += len(data)
        if self._asking is not None:
            self._asking.write(data)
        elif self._refusal is not None:
            self._drain()
        elif not self.response_complete:
            self._pieces.append(data)

    def flush(self) -> None:
        """This was all that has come for now."""
        if self._asking is not None and self._is_short_enough():
            self._asking.flush()
        elif self._reads_first:
            self._is_short_enough()

    def on_request_end(self) -> None:
        self._is_complete = True
        if self._refusal is not None:
            self._say_refusal()
        elif self._reads_first:
            if self._is_short_enough():
                self._read_and_ask()
        elif self._asking is not None and self._is_short_enough():
            self._asking.end()

    def _read_and_ask(self) -> None:
        self._reads_first = False
        try:
            self._plane.check_load(b"".join(self._pieces))
            asking = self._asking = self._ask()
        except Exception as fault:
            self._refuse(self._problem_of(fault))
            return
        self._send_on(asking)
        asking.end()

    def on_gone(self) -> None:
        """The client has closed the connection."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        self._end()

    def hold_answer(self) -> None:
        if self._asking is not None:
            self._asking.hold_answer()

    def go_on_with_answer(self) -> None:
        if self._asking is not None:
            self._asking.go_on_with_answer()

    # What the server of models answers.

    def on_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:
        if body_bytes is None:
            self._sends_chunks = self._takes_chunks
            self.keep_alive = self.keep_alive and self._takes_chunks
        self._write_head(status, headers, body_bytes)
        if self._client.is_full and self._asking is not None:
            self._asking.hold_answer()  # it has not even taken what was answered before

    def on_body(self, data: bytes) -> None:
        if self._method == b"HEAD":
            return
        if self._sends_chunks:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._out.append(data)

    def on_pause(self) -> None:
        if self._out:
            self._client.write(self._out)
            self._out = []

    def on_end(self) -> None:
        self._asking = None
        if self._sends_chunks and self._method != b"HEAD":
            self._out.append(b"0\r\n\r\n")
        self._end()

    def on_trouble(self, trouble: Trouble, detail: str) -> None:
        self._asking = None
        server = "" if self.server is None else self.server.name
        if self.server is not None:
            self.server.http.failed(trouble, detail)
        log.warning("no answer from Triton", request=self.request_id, server=server, fault=detail)
        if self._status:
            self._client.cut_off()  # half an answer; only this tells the client
        else:
            self._refuse(problem_of(trouble, server, detail))

    def on_refused(self, fault: Exception) -> None:
        self._asking = None
        self._refuse(self._problem_of(fault))

    def hold_body(self) -> None:
        self._client.hold_body()

    def go_on_with_body(self) -> None:
        self._client.go_on_with_body()

    def _is_short_enough(self) -> bool:
        """The length of a body in chunks shows only when it comes."""
        if self._body_bytes is not None:
            return True
        try:
            self._plane.check_size(self._aim, self._seen_bytes)
        except Problem as problem:
            if self._asking is not None:
                self._asking.cancel()
            self._asking = None
            self._refuse(problem)
            return False
        return True

    def _waits_for_leave(self) -> bool:
        return self._told.to_us.get(b"expect", b"").lower() == b"100-continue"

    def _refuse(self, problem: Problem) -> None:
        """Say so once the body is there, or as much of it as is waited for."""
        self._refusal = problem
        self._reads_first = False
        if self.turn is not None:
            self.turn.leave()
        self._pieces.clear()
        self._client.go_on_with_body()
        if self._is_complete or (self._waits_for_leave() and not self._seen_bytes):
            self._say_refusal()
            return
        if self._seen_bytes == self._body_bytes:
            return  # its end comes next
        loop = asyncio.get_running_loop()
        self._giving_up = loop.call_later(DRAIN_SECONDS, self._say_refusal)
        self._drain()

    def _drain(self) -> None:
        is_stranger = self._refusal is not None and self._refusal.kind.status in (401, 421)
        if self._seen_bytes > (DRAIN_STRANGER_BYTES if is_stranger else DRAIN_BYTES):
            self._say_refusal()

    def _say_refusal(self) -> None:
        problem = self._refusal
        if problem is None or self.response_complete:
            return
        status, headers, body = rendered(problem, self.request_id)
        self.keep_alive = self.keep_alive and self._is_complete
        self._write_head(status, headers, len(body))
        if self._method != b"HEAD":
            self._out.append(body)
        self._end()

    def _write_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:
        self._status = status
        parts = [STATUS_LINE[status]]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if body_bytes is not None:
            parts.append(b"Content-Length: %d\r\n" % body_bytes)
        elif self._sends_chunks:
            parts.append(b"Transfer-Encoding: chunked\r\n")
        if not self.keep_alive:
            parts.append(b"Connection: close\r\n")
        if self.turn is not None:
            parts += [b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in self.turn.told()]
        parts.append(b"Request-Id: %b\r\n\r\n" % self.request_id.encode())
        self._out = parts

    def _end(self) -> None:
        """Of the answer, or of the client."""
        self.on_pause()
        if self._giving_up is not None:
            self._giving_up.cancel()
        if self.turn is not None:
            self.turn.leave()
        self.response_complete = True
        self._pieces.clear()
        seconds = time.perf_counter() - self._began
        self._plane.on_request(self._method.decode(), self._aim.route, self._status, seconds)
        self._client.on_answered(self)
