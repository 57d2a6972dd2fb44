"""The data plane over gRPC, on a port of its own: who may call is asked, and messages go through as bytes."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
import structlog

from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import Problem, headers_of
from gpubroker_server.gateway.proxy.again import MOST_TIMES, says_dead, says_gone
from gpubroker_server.gateway.proxy.call_fleet import CallFleet, note
from gpubroker_server.gateway.proxy.calls import (
    CallAim,
    brings_files,
    call_aim_of,
    changes_settings,
    model_in,
    model_named_in,
)
from gpubroker_server.gateway.proxy.fleet import IDEMPOTENT
from gpubroker_server.gateway.proxy.lanes import MODEL_TYPE, NO_WISH, PRIORITY, TIMEOUT, Turn
from gpubroker_server.gateway.proxy.plane import Plane
from gpubroker_server.gateway.proxy.refusals import no_files, no_shared_memory, our_mistake, problem_of
from gpubroker_server.ports.backends import Call, CallAnswer, CallFailed, Metadata

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
"""What a status of HTTP is called there; all others are INTERNAL."""

_WISHES: Final = (PRIORITY, TIMEOUT, MODEL_TYPE)
_TO_US: Final = frozenset({"authorization", "user-agent", IDEMPOTENT, *_WISHES})
"""Of a call's metadata; all else is passed on."""

Behaviour = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class Rpcs(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc says nothing of its types
    """Told of each call before any message of it is read: who may not come in sends nothing but its head."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._servers = CallFleet(plane.fleet)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        metadata = [(name, value) for name, value in details.invocation_metadata if name not in _TO_US]
        sent = {name: value for name, value in details.invocation_metadata if name in _TO_US}
        aim = call_aim_of(details.method)
        rpc = Rpc(self._plane, self._servers, aim, details.method, metadata)
        try:
            if aim.scope is not None:
                token = sent.get("authorization")
                # perf_analyzer sends the space behind the colon, which HTTP/1.1 would have taken away
                given = None if token is None else token.strip().encode("latin-1", "replace")
                rpc.identity = self._plane.authorize(aim.scope, aim.name, given)
                rpc.wish = self._plane.lanes.wish_in(rpc.identity, *map(sent.get, _WISHES))
                rpc.is_idempotent = sent.get(IDEMPOTENT, "").lower() == "true"
            if aim.shares_memory:
                raise no_shared_memory()
        except Problem as problem:
            return grpc.stream_stream_rpc_method_handler(rpc.refusing(problem))
        if aim.is_stream:
            return grpc.stream_stream_rpc_method_handler(rpc.stream)
        return grpc.unary_unary_rpc_method_handler(rpc.unary)


class Rpc:
    """One call, and what comes of it."""

    __slots__ = (
        "_aim",
        "_began",
        "_metadata",
        "_method",
        "_plane",
        "_request_id",
        "_servers",
        "_turn",
        "identity",
        "is_idempotent",
        "wish",
    )

    def __init__(
        self, plane: Plane, servers: CallFleet, aim: CallAim, method: str, metadata: Metadata
    ) -> None:
        self._plane = plane
        self._servers = servers
        self._aim = aim
        self._method = method
        self._metadata = metadata
        self._began = time.perf_counter()
        self._request_id = plane.ids.exchange()
        self._turn: Turn | None = None
        """At the model, if it needs one."""
        self.identity: Identity | None = None
        """None: whoever it is, it may."""
        self.wish = NO_WISH
        self.is_idempotent = False

    async def unary(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            self._look_into(message)
            is_known = await self._wait_for_model(message)
            if self._aim.takes_slot and self.identity is not None:
                answer = await self._ask_in_turn(self.identity, message, context, is_known=is_known)
            else:
                answer = await self._ask(message, context)
        except Exception as fault:
            await self._fail(fault, context)
            raise AssertionError from None  # it has raised
        except asyncio.CancelledError:
            self._count(grpc.StatusCode.CANCELLED)
            raise
        finally:
            if self._turn is not None:
                self._turn.leave()
        if answer.first:
            await context.send_initial_metadata(answer.first)
        context.set_trailing_metadata(self._signed(answer.last))
        self._count(grpc.StatusCode.OK)
        return answer.message

    async def stream(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """It goes where its first message belongs, once the model of that is there."""
        first: list[bytes] = []
        try:
            if self._aim.model_at and (self._servers.has_choice or self._plane.holds_models):
                async for message in messages:
                    first.append(message)
                    break
                await self._wait_for_model(b"".join(first))
            await self._pass_on(first, messages, context)
            self._count(grpc.StatusCode.OK)
        except Exception as fault:
            await self._fail(fault, context)
        except asyncio.CancelledError:
            self._count(grpc.StatusCode.CANCELLED)
            raise

    async def _pass_on(
        self, first: Sequence[bytes], messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Raises CallFailed."""
        seconds, named = _seconds_left(context), b"".join(first)
        server, call = self._servers.open(self._aim, self._method, named, self._metadata, seconds)
        sending = asyncio.create_task(_send_all(first, messages, call))
        server.in_flight += 1
        try:
            with self._plane.lanes.streaming(model_named_in(named, self._aim.model_at)):
                await context.send_initial_metadata(await call.first())
                while (answer := await call.read()) is not None:
                    await context.write(answer)
                context.set_trailing_metadata(self._signed(await call.last()))
        except CallFailed as failed:
            note(server, failed)
            raise
        finally:
            server.in_flight -= 1
            sending.cancel()
            call.cancel()

    def refusing(self, problem: Problem) -> Behaviour:
        async def refuse(_messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            await self._fail(problem, context)

        return refuse

    async def _ask(self, message: bytes, context: grpc.aio.ServicerContext) -> CallAnswer:
        """Raises CallFailed."""
        seconds = _seconds_left(context)
        return await self._servers.ask(
            self._aim, self._method, message, self._metadata, seconds, is_idempotent=self.is_idempotent
        )

    async def _ask_in_turn(
        self, identity: Identity, message: bytes, context: grpc.aio.ServicerContext, *, is_known: bool
    ) -> CallAnswer:
        """Again, if its model is not there though it should be. Raises Problem, CallFailed."""
        plane, model, times = self._plane, model_named_in(message, self._aim.model_at), 0
        while True:
            self._turn = turn = plane.lanes.enter(model_in(message), identity, self.wish)
            if turn.waits:
                await plane.room.hold(len(message), identity.tenant, turn.granted())
            if is_known and (there := plane.coming(model, self.wish.priority)) is not None:
                turn.leave()
                is_known = await plane.room.hold(len(message), identity.tenant, there)
                continue
            was_there = plane.is_there(model)
            try:
                return await self._ask(message, context)
            except CallFailed as failed:
                if was_there and says_dead(failed.detail):
                    plane.doubt(model, failed.server)
                is_gone = was_there and failed.trouble is None and says_gone(failed.detail)
                if not is_gone or times == MOST_TIMES:
                    raise
                server = failed.server
            turn.leave()
            times += 1
            back = plane.back(model, self.wish.priority, server)
            is_known = await plane.room.hold(len(message), identity.tenant, back)

    def _look_into(self, message: bytes) -> None:
        """Where what it needs depends on what is in it. Raises Problem."""
        aim = self._aim
        if aim.sets and changes_settings(message) and self.identity is not None:
            self._plane.check_scope(self.identity, Scope.MODELS_MANAGE, f"{aim.name} with settings")
        if aim.loads and not self._plane.takes_files and brings_files(message):
            raise no_files()

    async def _wait_for_model(self, message: bytes) -> bool:
        """False if there is none of which its server would not tell itself. Raises Problem."""
        if not self._aim.needs_model or not (model := model_named_in(message, self._aim.model_at)):
            return False
        waiting = self._plane.wait_for(model, self.wish.priority, unloads=self._aim.unloads)
        tenant = "" if self.identity is None else self.identity.tenant
        return waiting is None or await self._plane.room.hold(len(message), tenant, waiting)

    async def _fail(self, fault: Exception, context: grpc.aio.ServicerContext) -> None:
        """Say how the call ends. Raises, always."""
        status, detail, metadata = self._ending(fault)
        self._count(status)
        await context.abort(status, detail, self._signed(metadata))

    def _ending(self, fault: Exception) -> tuple[grpc.StatusCode, str, Metadata]:
        if isinstance(fault, CallFailed) and fault.trouble is None:
            return _STATUSES[fault.code], fault.detail, fault.metadata
        problem = self._problem_of(fault)
        headers = headers_of(problem)
        told = [("code", problem.code), *((name.lower(), value) for name, value in headers.items())]
        return _STATUS_OF.get(problem.kind.status, grpc.StatusCode.INTERNAL), problem.detail, told

    def _problem_of(self, fault: Exception) -> Problem:
        if isinstance(fault, Problem):
            return fault
        if isinstance(fault, CallFailed) and fault.trouble is not None:
            log.warning(
                "no answer from Triton", request=self._request_id, server=fault.server, fault=fault.detail
            )
            return problem_of(fault.trouble, fault.server, fault.detail)
        log.error("request failed", request=self._request_id, path=self._aim.name, exc_info=fault)
        return our_mistake(self._request_id)

    def _signed(self, metadata: Metadata) -> Metadata:
        told = () if self._turn is None else self._turn.told()
        return (*metadata, *told, ("request-id", self._request_id))

    def _count(self, status: grpc.StatusCode) -> None:
        self._plane.on_call(self._aim.name, status.name, time.perf_counter() - self._began)


class RpcDoor:
    """The port. Raises OSError if it cannot be had."""

    def __init__(self, rpcs: Rpcs, host: str, port: int, most_calls: int, most_message_bytes: int) -> None:
        """`most_message_bytes`: a longer one is refused before it is read, with RESOURCE_EXHAUSTED."""
        limit = ("grpc.max_receive_message_length", min(most_message_bytes, _MOST_MESSAGE_BYTES))
        self._server = grpc.aio.server(options=(limit, *_OPTIONS), maximum_concurrent_rpcs=most_calls)
        self._server.add_generic_rpc_handlers((rpcs,))
        address = f"[{host}]" if ":" in host else host
        try:
            self.port: int = self._server.add_insecure_port(f"{address}:{port}")
        except RuntimeError as fault:
            raise OSError(str(fault)) from None

    async def begin(self) -> None:
        await self._server.start()

    async def close(self, most_seconds: float) -> None:
        """Take no more calls; those under way may go on so long."""
        await self._server.stop(most_seconds)


_MOST_MESSAGE_BYTES: Final = 2**31 - 1
"""Its library counts in 32 bits."""

_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # or a port in use would be taken for a free one
)


async def _send_all(first: Sequence[bytes], messages: AsyncIterator[bytes], call: Call) -> None:
    for message in first:
        await call.write(message)
    async for message in messages:
        await call.write(message)
    await call.end()


def _seconds_left(context: grpc.aio.ServicerContext) -> float | None:
    """Until the client's own deadline."""
    left: float | None = context.time_remaining()
    return left
