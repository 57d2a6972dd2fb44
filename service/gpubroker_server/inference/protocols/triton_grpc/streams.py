"""Streams over gRPC. A stream has a slot of its model while the server owes an answer, and none while it is
idle."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import grpc

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.request_states import NEXT
from gpubroker_server.core.serving.request_states import RequestMove as Move
from gpubroker_server.core.serving.request_states import RequestState as State
from gpubroker_server.inference.body_buffer import BUFFER_BYTES
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.protocols.triton.errors import says_unknown_model
from gpubroker_server.inference.protocols.triton.operations import TritonOperation
from gpubroker_server.inference.protocols.triton_grpc.calls import (
    GrpcCall,
    note_failure,
    trouble_of,
    unauthorized,
)
from gpubroker_server.inference.protocols.triton_grpc.messages import error_in, target_of
from gpubroker_server.inference.proxied_request import MAX_RETURNS, Bring
from gpubroker_server.inference.servers import Server
from gpubroker_server.ports.backends import CallFailed, CallStream, Metadata

TOKEN_SECONDS: Final = 1.0
"""Interval in which a stream checks that its token is still valid."""

IDLE_SECONDS: Final = Seconds(5.0)
"""Time for which a stream keeps its slot after its last answer."""


class GrpcStream(GrpcCall):
    """A client's stream, which is served by several streams to servers, one after the other (turns).

    A stream to a server begins with a message, at the server that has the message's model, once the model has
    a free slot. It ends when each message has an answer and nothing has passed for `idle_seconds`: the
    service closes its side, and gives the slot back once the server has closed its own. A decoupled model may
    answer a message many times, and only the model knows whether it is done; it keeps the slot until its
    server has closed the stream.

    The first message of a stream to a server may be sent again by the rules of a single request, as long as
    it has no answer and no other message has followed. Of several messages the server may have carried out
    some.
    """

    _turn: "_Turn | None" = None
    """The open stream to a server; None while there is none."""
    _sending: "asyncio.Task[None]"
    _has_begun = False
    """True once a stream to a server has been opened."""
    _has_head = False
    """True once the client has the metadata that come before the first answer."""
    _last: Metadata = ()
    """The trailing metadata of the last server, which end the client's stream."""

    def __init__(
        self,
        plane: Plane,
        operation: TritonOperation,
        method: str,
        metadata: Metadata,
        authorization: bytes | None,
        idle_seconds: Seconds,
    ) -> None:
        """`authorization` is the header with the client's token."""
        super().__init__(plane, operation, method, metadata)
        self._authorization = authorization
        self._idle_seconds = idle_seconds

    async def stream(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve the client's stream until it ends, or its token is no longer valid."""
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
        """Pass the client's messages on, in one turn for each period of use. Raises Problem if a message is
        refused."""
        if not self._operation.model_field:
            self.plane.requests.enter(self._tenant, self)
            self._begin(tasks)
        async for message in messages:
            # Each message is checked like a call of its own, because it names its own model.
            self._authorize()
            # A turn that is ending takes no more messages: the next turn begins after it.
            if self._turn is not None and self._turn.is_ending:
                await asyncio.wait({self._turn.reading})
            if self._turn is None:
                await self._take_slot(message)
                self._begin(tasks)
            assert self._turn is not None
            await self._turn.write(message)
        if not self._has_begun:
            self._begin(tasks)  # A server may answer a stream without a message.
        if self._turn is not None:
            await self._turn.end()

    async def _take_slot(self, message: bytes) -> None:
        """Wait until the message's model is in memory and has a slot. Raises Problem."""
        self.plane.requests.enter(self._tenant, self)
        self.target = target_of(self._operation, message)
        self.lane_entry = None
        bring, must_wait = self._reserve()
        if must_wait:
            await self._wait_for_model(bring, len(message))

    async def _wait_for_model(self, bring: Bring | None, message_bytes: int) -> None:
        """Wait until the model is ready. Raises Problem."""
        self._begin_waiting(bring, message_bytes)
        try:
            await self._until_ready(bring)
        finally:
            self._body.release()

    def _begin(self, tasks: asyncio.TaskGroup) -> None:
        self._has_begun = True
        self.state = NEXT[self.state][Move.SEND]
        # A stateful model keeps a sequence in its server, so the stream stays at that server if it can.
        server = self.server = self.plane.fleet.pick(self.target, over_grpc=True, before=self.server)
        assert server is not None  # `pick` returns None only after servers were tried.
        assert server.calls is not None
        call = server.calls.open(self._method, self._metadata, self.seconds_left())
        self._tried, self._returns = [server], 0
        follows, residencies = self.target.operation.takes_slot, self.plane.residencies
        self._was_there = follows and residencies is not None and residencies.have(self._model)
        may_repeat = self._was_there or self.plane.fleet.has_choice(self.over_grpc)
        turn = self._turn = _Turn(server, call, BUFFER_BYTES if may_repeat else 0)
        turn.reading = tasks.create_task(self._read_all(turn))

    async def _read_all(self, turn: "_Turn") -> None:
        """Pass the answers of this turn on to the client. Raises CallFailed, Problem."""
        while not await self._read_call(turn):
            pass  # The turn goes on at another server.
        self._end_turn()
        if not turn.is_ending:
            self._sending.cancel()  # The server has ended the stream, so the client's messages have no use.

    async def _read_call(self, turn: "_Turn") -> bool:
        """Pass the answers of one server on to the client. Returns False if the turn goes on at another
        server. Raises CallFailed, Problem."""
        call = turn.call
        try:
            first = await call.first()
            if turn.only is None:
                await self._pass_head(first)
            while (answer := await call.read()) is not None:
                error = error_in(answer) if turn.only is not None or self._was_there else ""
                self._report_if_dead(error)
                if turn.only is not None:
                    if says_unknown_model(error) and await self._sent_elsewhere(turn, None):
                        return False
                    await self._pass_head(first)
                if self.state is State.SENT:
                    self.state = NEXT[self.state][Move.ANSWER]
                await self._context.write(answer)
                turn.on_answer()
            await self._pass_head(first)
            self._last = await call.last()
        except CallFailed as failed:
            note_failure(turn.server.grpc, failed)
            self._report_if_dead(failed.detail)
            refused = unauthorized(turn.server, failed)
            if await self._sent_elsewhere(turn, failed):
                return False
            if refused is not None:
                raise refused from None
            raise
        return True

    async def _pass_head(self, first: Metadata) -> None:
        if not self._has_head:
            self._has_head = True
            await self._context.send_initial_metadata(first)

    async def _sent_elsewhere(self, turn: "_Turn", failed: CallFailed | None) -> bool:
        """Send the only message of the turn again if a single request might be sent again. Returns False if
        the message is not sent again. `failed` is the failure of the call; None if the server has answered
        that it does not have the model. Raises Problem."""
        # Messages that the client sends meanwhile wait for the server that is found.
        async with turn.moving:
            if turn.only is None:
                return False
            if failed is None or (failed.trouble is None and says_unknown_model(failed.detail)):
                server = await self._server_after_denial(turn, turn.only)
            else:
                server = self._server_after_trouble(turn, failed)
            if server is None:
                return False
            assert server.calls is not None
            turn.leave_server()
            self.state = NEXT[self.state][Move.SEND]
            self.server = server
            self._tried.append(server)
            call = server.calls.open(self._method, self._metadata, self.seconds_left())
            await turn.send_again(server, call, turn.only)
        return True

    def _server_after_trouble(self, turn: "_Turn", failed: CallFailed) -> Server | None:
        if trouble_of(failed) not in self._retried_after():
            return None
        server = self.plane.fleet.pick(self.target, over_grpc=True, tried=self._tried)
        if server is not None:
            turn.server.passed_on += 1
        return server

    async def _server_after_denial(self, turn: "_Turn", message: bytes) -> Server | None:
        """Return the server that gets a message after another has denied that it has the model, in the order
        of `ProxiedRequest._ask_again`. Raises Problem."""
        fleet, residencies = self.plane.fleet, self.plane.residencies
        if self._returns >= MAX_RETURNS:
            return None
        must_return = self._was_there and residencies is not None
        if not must_return or fleet.another_has(self.target, self._tried, over_grpc=True):
            return fleet.pick(self.target, over_grpc=True, tried=self._tried)
        assert residencies is not None
        self._returns += 1
        turn.leave_server()
        if self.lane_entry is not None:
            self.lane_entry.leave()
            self.lane_entry = None
        bring = partial(residencies.returned, self._model, self.wish.priority, turn.server.name)
        await self._wait_for_model(bring, len(message))
        self._tried = []
        return fleet.pick(self.target, over_grpc=True, before=turn.server)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        if self.state in (State.SENT, State.ANSWERING):
            self.state = NEXT[self.state][Move.REST]
        turn.leave_server()
        if self.lane_entry is not None:
            self.lane_entry.leave()
        self.plane.requests.leave(self._tenant, self)

    async def _watch(self) -> None:
        """Check the token at intervals, because a stream may only listen, and end a turn in which nothing
        passes. Raises Problem."""
        while True:
            await asyncio.sleep(min(TOKEN_SECONDS, self._idle_seconds))
            self._authorize()
            if self._turn is not None and self.target.operation.takes_slot:
                await self._turn.end_if_idle(self._idle_seconds)

    def _authorize(self) -> None:
        """Check that the client's token is still valid and allows the operation. Raises Problem."""
        operation = self.target.operation
        assert operation.scope is not None
        self.identity = self.plane.authorize(operation.scope, operation.name, self._authorization)


class _Turn:
    """A stream to one server, or to the next one if the first has done nothing. The stream counts in the
    server's `in_flight` until it has ended."""

    reading: "asyncio.Task[None]"

    def __init__(self, server: Server, call: CallStream, most_kept_bytes: int) -> None:
        """`most_kept_bytes` is the size of the longest message that may be sent again."""
        self.server = server
        self.call = call
        self.is_ending = False
        """True once nothing has passed for `idle_seconds`: no more messages are sent."""
        self.only: bytes | None = None
        """The message that may be sent again: the first one, until it has an answer or another message
        follows."""
        self.moving = asyncio.Lock()
        """Held while a message is written, and while another server is looked for."""
        self._most_kept_bytes = most_kept_bytes
        self._is_counted = True
        self._has_ended = False
        """True once the client has no more messages."""
        self._owed = 0
        """The number of messages without an answer, if each message gets one. Negative after surplus
        answers."""
        self._active_at = asyncio.get_running_loop().time()
        server.in_flight += 1

    async def write(self, message: bytes) -> None:
        async with self.moving:
            self.only = message if len(message) <= self._most_kept_bytes else None
            self._most_kept_bytes = 0  # Of several messages none is sent again.
            # Surplus answers to earlier messages do not pay for this one.
            self._owed = max(self._owed, 0) + 1
            await self.call.write(message)

    async def end(self) -> None:
        """Tell the server that the client has no more messages."""
        async with self.moving:
            self._has_ended = True
            await self.call.end()

    def leave_server(self) -> None:
        """Give up the call. Later calls do nothing."""
        self.call.cancel()
        if self._is_counted:
            self.server.in_flight -= 1
            self._is_counted = False

    async def send_again(self, server: Server, call: CallStream, message: bytes) -> None:
        """Continue at another server. The caller holds `moving`."""
        self.server, self.call = server, call
        server.in_flight += 1
        self._is_counted = True
        await call.write(message)
        if self._has_ended:
            await call.end()

    def on_answer(self) -> None:
        self.only = None
        self._owed -= 1
        self._active_at = asyncio.get_running_loop().time()

    async def end_if_idle(self, idle_seconds: Seconds) -> None:
        quiet_seconds = asyncio.get_running_loop().time() - self._active_at
        if self._owed <= 0 and quiet_seconds >= idle_seconds and not self.is_ending:
            self.is_ending = True
            await self.call.end()
