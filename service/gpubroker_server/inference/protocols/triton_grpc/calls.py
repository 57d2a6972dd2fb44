"""A call of the data plane over gRPC. Its messages pass as bytes."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final
from urllib.parse import unquote

import grpc
import structlog
from msgspec.structs import replace

from gpubroker_server.core.serving.request_states import RequestMove as Move
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Problem, headers_of
from gpubroker_server.http.proxies import FORWARDED_FOR
from gpubroker_server.inference.operation import FanOut, Target
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.protocols.triton.errors import no_files, says_dead, says_unknown_model
from gpubroker_server.inference.protocols.triton.fan_out import FAN_OUT_SECONDS, ask_all
from gpubroker_server.inference.protocols.triton.loads import reads_load
from gpubroker_server.inference.protocols.triton.operations import TritonOperation
from gpubroker_server.inference.protocols.triton_grpc.messages import (
    brings_files,
    changes_settings,
    merged_replies,
    target_of,
)
from gpubroker_server.inference.proxied_request import ProxiedRequest
from gpubroker_server.inference.refusals import our_mistake, problem_of
from gpubroker_server.inference.servers import Endpoint, Server
from gpubroker_server.ports.backends import (
    CallBackend,
    CallFailed,
    CallReply,
    Metadata,
    Trouble,
    UpstreamRequest,
)

log = structlog.get_logger("gpubroker.inference")

_STATUSES: Final = {status.value[0]: status for status in grpc.StatusCode}

_STATUS_OF: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""HTTP status -> gRPC status. All other HTTP statuses become INTERNAL."""

_UNAVAILABLE: Final = 14
"""The code of UNAVAILABLE: the server has answered with this code, or its connection was lost."""
_OF_THE_CLIENT: Final = frozenset({1, 4})
"""The codes of CANCELLED and DEADLINE_EXCEEDED, which say nothing about the server."""


_STRANGER: Final = frozenset({7, 16})
"""PERMISSION_DENIED and UNAUTHENTICATED: the server does not accept the service's credentials."""


def unauthorized(server: Server, failed: CallFailed) -> Problem | None:
    """Return the problem for the client if the server refused the service's own credentials, and note the
    refusal; None for any other failure."""
    if failed.trouble is not None or failed.code not in _STRANGER:
        return None
    why = f"it answered {_STATUSES[failed.code].name}: {failed.detail[:200]}"
    server.grpc.refused(why)
    return problem_of(Trouble.UNAUTHORIZED, server.name, why)


def trouble_of(failed: CallFailed) -> Trouble | None:
    """Return the trouble after which another server may be asked; None if the failure is the server's
    answer."""
    if failed.trouble is not None:
        return failed.trouble
    if failed.code in _STRANGER:
        return Trouble.UNAUTHORIZED
    return Trouble.BROKEN if failed.code == _UNAVAILABLE else None


def note_failure(endpoint: Endpoint, failed: CallFailed) -> None:
    """Tell the endpoint about a failed call. Over gRPC an error may be the answer of a healthy server."""
    if failed.trouble is not None:
        endpoint.failed(failed.trouble, failed.detail)
    elif failed.code == _UNAVAILABLE:
        endpoint.check_wanted.set()
    elif failed.code not in _OF_THE_CLIENT:
        endpoint.answered()


class GrpcCall(ProxiedRequest):
    over_grpc = True
    _context: grpc.aio.ServicerContext
    """Set once the call begins."""
    _opened: "_UnaryCall | None" = None
    """The call to a server that is to be carried out next."""
    _reply: CallReply | None = None
    _fault: Exception | None = None
    _moved: asyncio.Future[None] | None = None
    """Completed when there is a call, a reply or a fault. Set while `_carry_out` waits for one of them."""

    def __init__(self, plane: Plane, operation: TritonOperation, method: str, metadata: Metadata) -> None:
        super().__init__(plane, Target(operation))
        self._operation = operation
        self._method = method
        self._metadata = metadata
        self._began = time.perf_counter()
        self.request_id = plane.ids.exchange()

    async def unary(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self._context = context
        try:
            self.target = target_of(self._operation, message)
            self._look_into(message)
            self.write(message)
            self.is_complete = True
            self.start()
            reply = await self._carry_out()
        except Exception as fault:
            self.close(Move.FAIL)
            await self._fail(fault, context)
            raise AssertionError from None  # `_fail` always raises.
        except asyncio.CancelledError:
            self.close(Move.ABANDON)
            self._count(grpc.StatusCode.CANCELLED)
            raise
        self.close(Move.FINISH)
        if reply.first:
            await context.send_initial_metadata(reply.first)
        context.set_trailing_metadata(self._signed(reply.last))
        self._count(grpc.StatusCode.OK)
        return reply.message

    async def unread(self, _stream: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Answer a call that needs no token, without reading its message: the library would keep a message of
        any size in memory. Messages of health checks are empty, or name a service, which Triton ignores."""
        await context.write(await self.unary(b"", context))

    async def refused(
        self, problem: Problem, _stream: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        self._context = context
        await self._fail(problem, context)

    def origin(self) -> tuple[str, Iterable[bytes]]:
        """Return the address of the client and the values of X-Forwarded-For. The library writes an address
        as `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
        peer = unquote(self._context.peer()).partition(":")[2].rpartition(":")[0].strip("[]")
        metadata = self._context.invocation_metadata() or ()
        forwarded = (value for name, value in metadata if name == FORWARDED_FOR.decode())
        return peer, (value.encode() if isinstance(value, str) else value for value in forwarded)

    async def unknown(self, _stream: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Answer that there is no such method, whoever asks: clients try whether a server has a service, such
        as reflection, before they have a token."""
        status = grpc.StatusCode.UNIMPLEMENTED
        self._count(status)
        detail = f"there is no method {self._method[:200]}; those of inference.GRPCInferenceService are known"
        await context.abort(status, detail, self._signed(()))

    def _look_into(self, message: bytes) -> None:
        """Check the rights that depend on the contents of the message. Raises Problem."""
        operation = self._operation
        if operation.sets and not changes_settings(message):
            self.target = self.target._replace(operation=replace(operation, fan_out=None))
        elif operation.sets and self.identity is not None:
            what = f"{operation.name} with settings"
            self.identity.require(Scope.MODELS_MANAGE, what)
        if reads_load(self.plane, operation) and brings_files(message):
            raise no_files()

    # Methods for the state machine.

    def _ask(self, server: Server) -> UpstreamRequest:
        assert server.calls is not None
        return _UnaryCall(self, server.calls)

    async def ask(self, backend: CallBackend, message: bytes, seconds: float | None) -> CallReply:
        """Ask the server at `backend` for a whole answer. Raises CallFailed."""
        return await backend.ask(self._method, message, self._metadata, seconds)

    def _report_if_dead(self, message: str) -> None:
        """Have the leader check the model if a server says that the model's process is gone."""
        if self._was_there and says_dead(message):
            self._report_dead()

    def seconds_left(self) -> float | None:
        """Return the seconds until the client's own deadline; None if the client has set none."""
        seconds: float | None = self._context.time_remaining()
        return seconds

    def _must_see_body(self) -> bool:
        return False  # The message comes as a whole, and `_look_into` has checked it.

    def _check_body(self) -> None:
        """Do nothing: `_look_into` has checked the message."""

    def refuse(self, fault: Exception) -> None:
        self._fault = fault
        self._move()

    async def _carry_out(self) -> CallReply:
        """Carry out the calls that the state machine opens, until there is a reply. The calls run in the task
        of the client's call, because one more task for each costs noticeable time. Raises Problem,
        CallFailed."""
        while self._reply is None:
            if self._fault is not None:
                raise self._fault
            if self._opened is not None:
                opened, self._opened = self._opened, None
                await opened.carry_out()
            else:
                self._moved = asyncio.get_running_loop().create_future()
                await self._moved
        return self._reply

    def open(self, call: "_UnaryCall") -> None:
        self._opened = call
        self._move()

    def _move(self) -> None:
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    # Answers of the server.

    def on_reply(self, reply: CallReply) -> None:
        self._upstream = None
        self._begin_answer(is_success=True)
        self._reply = reply
        self._move()

    def on_failed(self, failed: CallFailed) -> None:
        assert self.server is not None
        note_failure(self.server.grpc, failed)
        if (refused := unauthorized(self.server, failed)) is not None:
            if not self._retry(Trouble.UNAUTHORIZED):
                self._upstream = None
                self.refuse(refused)
            return
        self._report_if_dead(failed.detail)
        is_servers_answer = failed.trouble is None
        is_unknown = is_servers_answer and says_unknown_model(failed.detail)
        if is_unknown and self._may_ask_again() and self._ask_again():
            return
        trouble = trouble_of(failed)
        if trouble is None or not self._retry(trouble):
            self._upstream = None
            self.refuse(failed)

    async def _fan_out(self, servers: Sequence[Server], how: FanOut) -> None:
        message, seconds = b"".join(self._body.pieces), self.seconds_left()
        if how is not FanOut.EACH:
            seconds = FAN_OUT_SECONDS if seconds is None else min(seconds, FAN_OUT_SECONDS)
        replies = await ask_all(servers, how, lambda server: self._ask_one(server, message, seconds))
        merged = merged_replies(how, [reply.message for reply in replies])
        self.on_reply(replies[0]._replace(message=merged))

    async def _ask_one(self, server: Server, message: bytes, seconds: float | None) -> CallReply:
        """Ask one server, and note whether it answered. Raises CallFailed, Problem."""
        assert server.calls is not None
        server.in_flight += 1
        try:
            reply = await self.ask(server.calls, message, seconds)
        except CallFailed as failed:
            note_failure(server.grpc, failed)
            if (refused := unauthorized(server, failed)) is not None:
                raise refused from None
            raise
        finally:
            server.in_flight -= 1
        server.grpc.answered()
        if self.target.operation.unloads:
            server.note_unload(self.target.model)
        return reply

    # The end.

    async def _fail(self, fault: Exception, context: grpc.aio.ServicerContext) -> None:
        """End the call with the fault. Always raises."""
        status, detail, metadata = self._ending(fault)
        self._count(status)
        await context.abort(status, detail, self._signed(metadata))

    def _ending(self, fault: Exception) -> tuple[grpc.StatusCode, str, Metadata]:
        if isinstance(fault, CallFailed) and fault.trouble is None:
            return _STATUSES[fault.code], fault.detail, fault.metadata
        problem = self._problem_of(fault)
        headers = [(name.lower(), value) for name, value in headers_of(problem).items()]
        status = _STATUS_OF.get(problem.kind.status, grpc.StatusCode.INTERNAL)
        return status, problem.detail, [("code", problem.code), *headers]

    def _problem_of(self, fault: Exception) -> Problem:
        if isinstance(fault, Problem):
            return fault
        if isinstance(fault, CallFailed) and fault.trouble is not None:
            log.debug(
                "no answer from Triton", request=self.request_id, server=fault.server, fault=fault.detail
            )
            return problem_of(fault.trouble, fault.server, fault.detail)
        log.error("request failed", request=self.request_id, path=self.target.operation.name, exc_info=fault)
        return our_mistake(self.request_id)

    def _signed(self, metadata: Metadata) -> Metadata:
        queued = () if self.lane_entry is None else self.lane_entry.headers()
        return (*metadata, *queued, ("request-id", self.request_id))

    def _count(self, status: grpc.StatusCode) -> None:
        seconds = time.perf_counter() - self._began
        self.plane.called(self, status.name, seconds)


class _UnaryCall(UpstreamRequest):
    """A call to one server. Its message comes as a whole."""

    __slots__ = ("_backend", "_call", "_message")

    def __init__(self, call: GrpcCall, backend: CallBackend) -> None:
        self._call = call
        self._backend = backend
        self._message = b""

    def write(self, data: bytes) -> None:
        self._message = data

    def end(self) -> None:
        self._call.open(self)

    def cancel(self) -> None:
        """Do nothing: the call runs in the task of the client's call and is cancelled with it."""

    async def carry_out(self) -> None:
        call = self._call
        try:
            reply = await call.ask(self._backend, self._message, call.seconds_left())
        except CallFailed as failed:
            call.on_failed(failed)
        else:
            call.on_reply(reply)
