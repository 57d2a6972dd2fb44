"""One HTTP request under /v2 and its answer, on a client's connection.

The uvicorn server that owns the connection takes the exchange for one of its own cycles: it reads
`response_complete`, and writes `keep_alive` and `disconnected`.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gpubroker_server.core.serving.request_states import ENDS
from gpubroker_server.core.serving.request_states import RequestMove as Move
from gpubroker_server.core.serving.request_states import RequestState as State
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.proxies import FORWARDED_FOR
from gpubroker_server.inference.operation import FanOut
from gpubroker_server.inference.plane import Plane, idempotent_in
from gpubroker_server.inference.protocols.triton.errors import (
    ERROR_EVENT,
    no_files,
    rendered,
    says_dead,
    says_unknown_model,
)
from gpubroker_server.inference.protocols.triton.fan_out import FAN_OUT_SECONDS, ask_all, merged_response
from gpubroker_server.inference.protocols.triton.loads import brings_files, check_size, reads_load
from gpubroker_server.inference.protocols.triton_http.heads import ClientHead, identified
from gpubroker_server.inference.protocols.triton_http.inflation import Inflation
from gpubroker_server.inference.proxied_request import ProxiedRequest
from gpubroker_server.inference.refusals import our_mistake, problem_of
from gpubroker_server.inference.servers import Server
from gpubroker_server.ports.backends import (
    UNAUTHORIZED_STATUSES,
    Fetched,
    Header,
    NotFetched,
    RequestHead,
    ResponseHandler,
    Trouble,
    UpstreamRequest,
)

log = structlog.get_logger("gpubroker.inference")

DRAIN_SECONDS: Final = 5.0
DRAIN_BYTES: Final = 64 * 1024 * 1024
DRAIN_STRANGER_BYTES: Final = 1024 * 1024
"""Bounds on what is read from a refused client that still sends, before it is answered: most clients send
everything before they read, so an earlier answer would not reach them. Less is read from a client without a
valid token."""

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_OK: Final = 200
_EVENTS: Final = b"text/event-stream"
_UNKNOWN_MODEL: Final = (404, 503)
"""Statuses with which Triton denies a model that it does not have; 503 if the request names a version."""

_LONGEST_MESSAGE_BYTES: Final = 4096
"""The longest error message of Triton that is read, in bytes."""

_NOT_FOR_MERGING: Final = frozenset({b"accept-encoding", b"if-none-match", b"if-modified-since", b"range"})
"""Headers of clients that are dropped from a request to several servers: with them, answers could not be
merged."""


class Client(Protocol):
    """The client's connection."""

    client: tuple[str, int] | None
    """Address and port of the client, or of the proxy in between."""

    @property
    def is_full(self) -> bool:
        """True if the client takes no more bytes for now. `resume_answer` is called once it takes more."""
        ...

    def write(self, parts: Sequence[bytes]) -> None:
        """Write all parts together."""
        ...

    def pause_body(self) -> None: ...

    def resume_body(self) -> None: ...

    def on_answered(self, exchange: "HttpExchange") -> None:
        """End the exchange, and close the connection unless the exchange has `keep_alive`."""
        ...

    def cut_off(self) -> None: ...


class HttpExchange(ProxiedRequest, ResponseHandler):
    over_grpc = False

    message_event = asyncio.Event()
    """The event that uvicorn sets when the client has gone. Nothing waits for it here."""
    response_complete = False
    disconnected = False

    request_id = ""
    _began = 0.0
    """The time at which the turn of the request came on its connection; 0 before that."""
    _status = 0
    _seen_bytes = 0
    """The number of bytes of the body that have come."""
    _sends_chunks = False
    _error_begins: bytes | None = None
    """The bytes with which an error in the body of the answer begins, which may say that the model's process
    is gone; None if the body has no error."""
    _held_head: tuple[int, Sequence[Header], int | None] | None = None
    """The head of an answer that may say that the model has left. The head is held back until its body has
    come."""
    _held_body = b""
    _unauthorized = 0
    """The status with which the server refuses the service's own credentials; 0 if it does not. This answer
    is not passed on."""
    _refusal: Problem | None = None
    """The problem with which the request will be answered."""
    _giving_up: asyncio.TimerHandle | None = None
    """The timer that ends the reading of a refused request."""
    _inflation: Inflation | None = None
    """The check of a compressed body; None for other bodies."""

    def __init__(
        self,
        plane: Plane,
        client: Client,
        head: ClientHead,
        *,
        keep_alive: bool,
        takes_chunks: bool,
    ) -> None:
        super().__init__(plane, head.target)
        self.keep_alive = keep_alive
        self._client = client
        self._head = head
        self._method = head.passed_on.method
        self._takes_chunks = takes_chunks
        self._out: list[bytes] = []
        """The parts of the answer that are written together once the server's bytes have been read."""
        if head.encoding:
            self._inflation = Inflation(self, head.encoding, plane.most_body_bytes)

    @property
    def left_bytes(self) -> int | None:
        """Bytes of the body that are yet to come; None if the body comes in chunks."""
        length = self._head.body_bytes
        return None if length is None else length - self._seen_bytes

    def origin(self) -> tuple[str, Iterable[bytes]]:
        headers = self._head.passed_on.headers
        forwarded = (value for name, value in headers if name.lower() == FORWARDED_FOR)
        return ("" if self._client.client is None else self._client.client[0]), forwarded

    # Methods for the client's connection.

    def begin(self) -> None:
        """Start the exchange. Called once all earlier requests on this connection are answered."""
        self._began = time.perf_counter()
        self.request_id = self.plane.ids.exchange()
        try:
            self._admit()
            self.start()
        except Exception as fault:
            self.refuse(fault)
            return
        if self._head.expects_continue and not self.is_complete:
            self._client.write([_CONTINUE])

    def _admit(self) -> None:
        """Check the client's token, and read the headers that ask for something. Raises Problem."""
        plane, head, operation = self.plane, self._head, self.target.operation
        self.identity = identified(plane, head)
        if head.body_bytes is None:
            self._check_chunks()
        if self.identity is not None and (operation.needs_model or operation.unloads):
            self.wish = plane.lanes.wish_in(self.identity, *head.queue)
        if head.idempotent is not None:
            self.is_idempotent = idempotent_in(head.idempotent.decode("latin-1"))

    def on_request_body(self, data: bytes) -> None:
        self._seen_bytes += len(data)
        if self._refusal is not None:
            self._drain()
            return
        if self._head.body_bytes is None and self._began:
            try:
                self._check_chunks()
            except Problem as problem:
                self.refuse(problem)
                return
        if self._inflation is None:
            self.write(data)
        else:
            self._client.pause_body()
            self._inflation.add(data)

    def _check_chunks(self) -> None:
        """Check the size of a body in chunks, whose length is known only once it has come. Raises Problem."""
        check_size(self.plane, self.target.operation, self._seen_bytes)

    def on_request_end(self) -> None:
        if self._refusal is not None:
            self.is_complete = True
            self._send_refusal()
        elif self._inflation is None or self._inflation.end():
            self.end()

    def on_gone(self) -> None:
        """End the exchange: the client has closed the connection."""
        self._end(Move.ABANDON)

    def pause_answer(self) -> None:
        if self._upstream is not None:
            self._upstream.pause_answer()

    def resume_answer(self) -> None:
        if self._upstream is not None:
            self._upstream.resume_answer()

    # Methods for the state machine.

    def _ask(self, server: Server) -> UpstreamRequest:
        return server.backend.ask(self._head.passed_on, self)

    def _must_see_body(self) -> bool:
        return reads_load(self.plane, self.target.operation)

    def _check_body(self) -> None:
        if self._must_see_body() and brings_files(b"".join(self._body.pieces)):
            raise no_files()

    def _pause_client(self) -> None:
        self._client.pause_body()

    def _resume_client(self) -> None:
        if self._inflation is None or not self._inflation.is_busy:
            self._client.resume_body()

    # Methods for the check of a compressed body.

    @property
    def is_over(self) -> bool:
        return self.state in ENDS

    def check_inflated(self, body_bytes: int) -> None:
        check_size(self.plane, self.target.operation, body_bytes)

    def on_inflated(self, fault: Problem | None) -> None:
        assert self._inflation is not None
        if fault is not None:
            self.refuse(fault)
        elif self._inflation.has_ended:
            self.end()
        elif not self._is_paused:
            self._client.resume_body()

    # Answers of the server.

    def on_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:
        if status in UNAUTHORIZED_STATUSES:
            self._unauthorized = status
            return
        is_short = (body_bytes or 0) <= _LONGEST_MESSAGE_BYTES
        if status in _UNKNOWN_MODEL and is_short and self._may_ask_again():
            self._held_head = status, headers, body_bytes
            return
        self._pass_head(status, headers, body_bytes)

    def _pass_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:
        if self._was_there and status != _OK:
            self._error_begins = b""
        elif self._was_there and any(
            name.lower() == b"content-type" and value == _EVENTS for name, value in headers
        ):
            self._error_begins = ERROR_EVENT
        self._begin_answer(status == _OK)
        # A client of HTTP/1.0 reads no chunks: only the end of the connection ends a body without a length.
        if body_bytes is None:
            self._sends_chunks = self._takes_chunks
            self.keep_alive = self.keep_alive and self._takes_chunks
        self._write_head(status, headers, body_bytes)
        if self._client.is_full:
            self.pause_answer()  # The client has not even taken earlier answers.

    def on_body(self, data: bytes) -> None:
        if self._unauthorized:
            return
        if self._held_head is not None:
            self._held_body += data
            if len(self._held_body) > _LONGEST_MESSAGE_BYTES:
                self._let_through()
            return
        if self._error_begins is not None:
            at = data.find(self._error_begins)
            error = b"" if at < 0 else data[at : at + _LONGEST_MESSAGE_BYTES]
            if says_dead(error.decode("utf-8", "replace")):
                self._report_dead()
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
        if self._unauthorized:
            self._on_unauthorized()
            return
        if self._held_head is not None:
            if says_unknown_model(_error_in(self._held_body)) and self._ask_again():
                self._held_head, self._held_body = None, b""
                return
            self._let_through()
        self._upstream = None
        if self._sends_chunks and self._method != b"HEAD":
            self._out.append(b"0\r\n\r\n")
        self._end(Move.FINISH)

    def _on_unauthorized(self) -> None:
        """Retry or refuse a request for which the server did not accept the service's own credentials. The
        server's answer is not passed on, because the client would take it for a verdict on its own token."""
        server, why = self.server, f"it answered {self._unauthorized}"
        self._unauthorized = 0
        assert server is not None
        server.http.answered()
        server.http.refused(why)
        if not self._retry(Trouble.UNAUTHORIZED):
            self.refuse(problem_of(Trouble.UNAUTHORIZED, server.name, why))

    def _let_through(self) -> None:
        """Pass on the answer that was held back."""
        assert self._held_head is not None
        head, body = self._held_head, self._held_body
        self._held_head, self._held_body = None, b""
        self._pass_head(*head)
        if body:
            self.on_body(body)

    def on_trouble(self, trouble: Trouble, detail: str) -> None:
        server = self.server
        self._held_head, self._held_body, self._unauthorized = None, b"", 0
        assert server is not None
        server.http.failed(trouble, detail)
        if self._retry(trouble):
            return
        log.debug("no answer from Triton", request=self.request_id, server=server.name, fault=detail)
        if self.state is State.ANSWERING:
            self._cut_off()
        else:
            self.refuse(problem_of(trouble, server.name, detail))

    # Requests to several servers.

    async def _fan_out(self, servers: Sequence[Server], how: FanOut) -> None:
        head, body = self._head.passed_on, b"".join(self._body.pieces)
        mergeable = [header for header in head.headers if header[0].lower() not in _NOT_FOR_MERGING]
        head = head._replace(headers=mergeable)
        answers = await ask_all(servers, how, lambda server: self._fetch(server, head, body))
        answer = merged_response(how, answers, servers)
        headers = [header for header in answer.headers if header[0].lower() != b"content-length"]
        self.on_head(answer.status, headers, len(answer.body))
        self.on_body(answer.body)
        self.on_end()

    async def _fetch(self, server: Server, head: RequestHead, body: bytes) -> Fetched:
        """Ask one server for a whole answer, and note whether it answered. Raises Problem."""
        try:
            answer = await server.backend.fetch(head, body, FAN_OUT_SECONDS)
        except NotFetched as failed:
            # A silent server may be healthy, because all its connections may be in use.
            if failed.trouble is not Trouble.SILENT:
                server.http.failed(failed.trouble, str(failed))
            raise problem_of(failed.trouble, server.name, str(failed)) from None
        server.http.answered()
        if answer.status in UNAUTHORIZED_STATUSES:
            why = f"it answered {answer.status}"
            server.http.refused(why)
            raise problem_of(Trouble.UNAUTHORIZED, server.name, why)
        if self.target.operation.unloads and answer.status == _OK:
            server.note_unload(self.target.model)
        return answer

    # Refusals, and the end of the exchange.

    def refuse(self, fault: Exception) -> None:
        """Answer with the fault once the body has come, or DRAIN_BYTES of it."""
        if self.state is State.ANSWERING:
            self._cut_off()
            return
        self._refusal = self._problem_of(fault)
        self.is_complete |= self._inflation is not None and self._inflation.has_ended
        self.close(Move.FAIL)
        self._client.resume_body()
        if self.is_complete or (self._head.expects_continue and not self._seen_bytes):
            self._send_refusal()
            return
        if self._seen_bytes == self._head.body_bytes:
            return  # The end of the body comes next, and sends the refusal.
        loop = asyncio.get_running_loop()
        self._giving_up = loop.call_later(DRAIN_SECONDS, self._send_refusal)
        self._drain()

    def _cut_off(self) -> None:
        """Close the connection in the middle of an answer, which is the only way to tell the client of the
        failure."""
        self.close(Move.FAIL)
        self._client.cut_off()

    def _problem_of(self, fault: Exception) -> Problem:
        if isinstance(fault, Problem):
            return fault
        log.error("request failed", request=self.request_id, path=self.target.operation.name, exc_info=fault)
        return our_mistake(self.request_id)

    def _drain(self) -> None:
        is_stranger = self._refusal is not None and self._refusal.kind.status in (401, 421)
        if self._seen_bytes > (DRAIN_STRANGER_BYTES if is_stranger else DRAIN_BYTES):
            self._send_refusal()

    def _send_refusal(self) -> None:
        problem = self._refusal
        if problem is None or self.response_complete:
            return
        status, headers, body = rendered(problem, self.request_id)
        # The rest of a body would be taken for the next request.
        self.keep_alive = self.keep_alive and self.is_complete
        self._write_head(status, headers, len(body))
        if self._method != b"HEAD":
            self._out.append(body)
        self._end(Move.FAIL)

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
        if self.lane_entry is not None:
            parts += [
                b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in self.lane_entry.headers()
            ]
        parts.append(b"Request-Id: %b\r\n\r\n" % self.request_id.encode())
        self._out = parts

    def _end(self, move: Move) -> None:
        """End the exchange: the answer is complete, or the client has gone."""
        self.on_pause()
        if self._giving_up is not None:
            self._giving_up.cancel()
        self.close(move)
        self.response_complete = True
        seconds = time.perf_counter() - self._began
        self.plane.answered(self, self._method.decode(), self._status, seconds)
        self._client.on_answered(self)


def _error_in(body: bytes) -> str:
    """Return the message of an error of Triton; empty for any other body. Triton writes errors as JSON,
    whatever the content type says."""
    head, tail = b'{"error":"', b'"}'
    if not (body.startswith(head) and body.endswith(tail)):
        return ""
    return body[len(head) : -len(tail)].decode("utf-8", "replace")
