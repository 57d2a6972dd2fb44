"""Streams over gRPC: a slot of the model while an answer is owed, and none while nothing passes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import grpc

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.request_states import NEXT
from gpubroker_server.core.serving.request_states import RequestMove as Move
from gpubroker_server.core.serving.request_states import RequestState as State
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.protocols.triton.operations import TritonOperation
from gpubroker_server.inference.protocols.triton_grpc.calls import GrpcCall, note_failure, unauthorized
from gpubroker_server.inference.protocols.triton_grpc.messages import target_of
from gpubroker_server.inference.servers import Server
from gpubroker_server.ports.backends import CallFailed, CallStream, Metadata

TOKEN_SECONDS: Final = 1.0
"""How often a stream looks whether its token is still valid."""

IDLE_SECONDS: Final = Seconds(5.0)


class GrpcStream(GrpcCall):
    """A client's stream is several streams to servers, one after the other.

    Each begins with a message, at the server where that belongs, when the model is there and has a slot. It
    ends when nothing has passed for a while and each message has an answer: it is closed on our side, and the
    slot is given back once the server has closed its own. So a decoupled model, which alone knows what it
    still works at, keeps the slot until it is done. Nothing is ever sent again.
    """

    _turn: "_Turn | None" = None
    """While there is a stream to a server."""
    _sending: "asyncio.Task[None]"
    _has_begun = _has_head = False
    """A server was asked; and the client has what comes before the first answer."""
    _last: Metadata = ()
    """From the server, for the end."""

    def __init__(
        self,
        plane: Plane,
        operation: TritonOperation,
        method: str,
        metadata: Metadata,
        authorization: bytes | None,
        idle_seconds: Seconds,
    ) -> None:
        """`authorization`: the header with the client's token."""
        super().__init__(plane, operation, method, metadata)
        self._authorization = authorization
        self._idle_seconds = idle_seconds

    async def stream(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """It lasts no longer than its token."""
        self._context = context
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch())
                self._sending = tasks.create_task(self._send_all(messages, tasks))
                await asyncio.wait({self._sending})
                if self._turn is not None:
                    await asyncio.wait({self._turn.reading})
                watching.cancel()
            self.close(Move.FINISH)
            context.set_trailing_metadata(self._signed(self._last))
            self._count(grpc.StatusCode.OK)
        except ExceptionGroup as group:
            self._end_turn()
            self.close(Move.FAIL)
            await self._fail(group.exceptions[0], context)
        except asyncio.CancelledError:
            self._count(grpc.StatusCode.CANCELLED)
            raise
        finally:
            self._end_turn()
            self.close(Move.ABANDON)

    async def _send_all(self, messages: AsyncIterator[bytes], tasks: asyncio.TaskGroup) -> None:
        """Pass the client's messages on, a turn for each spell of use. Raises Problem if one is refused."""
        if not self._operation.model_field:
            self.plane.requests.enter(self._tenant, self)
            self._begin(tasks)
        async for message in messages:
            self._authorize()  # whichever model it names, as a call of its own
            if self._turn is not None and self._turn.is_ending:
                await asyncio.wait({self._turn.reading})
            if self._turn is None:
                await self._take_slot(message)
                self._begin(tasks)
            assert self._turn is not None
            await self._turn.write(message)
        if not self._has_begun:
            self._begin(tasks)  # a server may answer a stream without a message
        if self._turn is not None:
            await self._turn.call.end()

    async def _take_slot(self, message: bytes) -> None:
        """Wait until the model of the message is there and has a slot. Raises Problem."""
        self.plane.requests.enter(self._tenant, self)
        self.target = target_of(self._operation, message)
        self.lane_entry = None
        bring, must_wait = self._reserve()
        if must_wait:
            self._begin_waiting(bring, len(message))
            await self._until_ready(bring)
            self._body.release()

    def _begin(self, tasks: asyncio.TaskGroup) -> None:
        self._has_begun = True
        self.state = NEXT[self.state][Move.SEND]
        # A sequence of a stateful model stays where it is.
        server = self.server = self.plane.fleet.pick(self.target, over_grpc=True, before=self.server)
        assert server is not None  # none was tried
        assert server.calls is not None
        call = server.calls.open(self._method, self._metadata, self.seconds_left())
        turn = self._turn = _Turn(server, call)
        turn.reading = tasks.create_task(self._read_all(turn))

    async def _read_all(self, turn: "_Turn") -> None:
        """Pass the server's answers of this turn on to the client. Raises CallFailed."""
        call = turn.call
        try:
            first = await call.first()
            if not self._has_head:
                self._has_head = True
                await self._context.send_initial_metadata(first)
            while (answer := await call.read()) is not None:
                if self.state is State.SENT:
                    self.state = NEXT[self.state][Move.ANSWER]
                await self._context.write(answer)
                turn.on_answer()
            self._last = await call.last()
        except CallFailed as failed:
            note_failure(turn.server.grpc, failed)
            if (refused := unauthorized(turn.server, failed)) is not None:
                raise refused from None
            raise
        self._end_turn()
        if not turn.is_ending:
            self._sending.cancel()  # the server has ended it

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        self.state = NEXT[self.state][Move.REST]
        turn.server.in_flight -= 1
        turn.call.cancel()
        if self.lane_entry is not None:
            self.lane_entry.leave()
        self.plane.requests.leave(self._tenant, self)

    async def _watch(self) -> None:
        """The token, as a stream may only listen, and whether anything passes. Raises Problem."""
        while True:
            await asyncio.sleep(min(TOKEN_SECONDS, self._idle_seconds))
            self._authorize()
            if self._turn is not None and self.target.operation.takes_slot:
                await self._turn.end_if_idle(self._idle_seconds)

    def _authorize(self) -> None:
        """Check that the client may use the model that the message names. Raises Problem."""
        operation = self.target.operation
        assert operation.scope is not None
        self.identity = self.plane.authorize(operation.scope, operation.name, self._authorization)


class _Turn:
    """A stream to one server, which counts there until it has ended."""

    reading: "asyncio.Task[None]"

    def __init__(self, server: Server, call: CallStream) -> None:
        self.server = server
        self.call = call
        self.is_ending = False
        """Nothing passed for a while, so that no more is sent to it."""
        self._owed = 0
        """Messages without an answer, if each gets one."""
        self._active_at = asyncio.get_running_loop().time()
        server.in_flight += 1

    async def write(self, message: bytes) -> None:
        self._owed = max(self._owed, 0) + 1
        await self.call.write(message)

    def on_answer(self) -> None:
        self._owed -= 1
        self._active_at = asyncio.get_running_loop().time()

    async def end_if_idle(self, idle_seconds: Seconds) -> None:
        quiet_seconds = asyncio.get_running_loop().time() - self._active_at
        if self._owed <= 0 and quiet_seconds >= idle_seconds and not self.is_ending:
            self.is_ending = True
            await self.call.end()
