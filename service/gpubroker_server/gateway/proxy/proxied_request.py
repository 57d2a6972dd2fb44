"""The way of one request through the proxy, the same over HTTP and gRPC: one state machine, one body buffer.

    RECEIVING --> WAITING --> FORWARDING --> ANSWERING --> DONE
        |            ^         ^ |   |  ^
        |            |         | |   +--+   another server gets the buffered body
        |            +---------|-+          the model has left its server: wait until it is back
        +----------------------+            nothing to wait for

Every state may end in DONE: the request is refused, or its client goes away. `HttpExchange` and `GrpcCall`
add what differs between the protocols.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import ClassVar, Final

from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.body_buffer import BUFFER_BYTES, BodyBuffer
from gpubroker_server.gateway.proxy.lanes import NO_WISH, LaneEntry
from gpubroker_server.gateway.proxy.operations import FanOut, Target
from gpubroker_server.gateway.proxy.plane import Plane
from gpubroker_server.gateway.proxy.refusals import body_too_large
from gpubroker_server.gateway.proxy.servers import Server
from gpubroker_server.ports.backends import Trouble, UpstreamRequest


class State(StrEnum):
    RECEIVING = "receiving"
    """Its turn on the client's connection has not come, or its body must be complete before anything is sent:
    a load that is searched for files, a request to several servers. `start` and `end` move it on."""
    WAITING = "waiting"
    """For its model to be in memory, or for a slot of it. The buffered body counts as waiting bytes."""
    FORWARDING = "forwarding"
    """A server gets it and has not answered. It may go to another server while its whole body is buffered."""
    ANSWERING = "answering"
    """The answer goes to the client. Nothing is sent again."""
    DONE = "done"
    """It holds nothing any more."""


MOST_RETURNS: Final = 3
"""How often a request waits for a model that has left; then the client gets the server's answer."""

_NOTHING_SENT: Final = frozenset({Trouble.UNREACHABLE, Trouble.BUSY})
_IF_IDEMPOTENT: Final = _NOTHING_SENT | {Trouble.BROKEN}
"""Without SILENT: a silent server may still carry the request out."""
_IF_READING: Final = _IF_IDEMPOTENT | {Trouble.SILENT}

Bring = Callable[[], Awaitable[bool]]
"""Waits until a model is in memory. False: no server of the ledger has it. Raises Problem."""


class ProxiedRequest(ABC):
    over_grpc: ClassVar[bool]

    state = State.RECEIVING
    is_complete = False
    """All of the body has come."""
    identity: Identity | None = None
    """Of the client's token; None where none is needed."""
    wish = NO_WISH
    is_idempotent = False
    lane_entry: LaneEntry | None = None
    """If it takes a slot of its model."""
    server: Server | None = None
    """The one that was asked last."""

    _upstream: UpstreamRequest | None = None
    """At `server`, until that has answered."""
    _task: asyncio.Task[None] | None = None
    """While it waits, or several servers are asked."""
    _collects = False
    """RECEIVING until the body is complete."""
    _is_kept = False
    """The buffer has all of the body that has come, and may be sent again."""
    _is_paused = False
    """The client was told to send no more for now."""
    _is_in_flight = False
    """Counted at `server`."""
    _was_there = False
    """The ledger had the model in memory when the request was sent."""
    _returns = 0

    def __init__(self, plane: Plane, target: Target) -> None:
        self.plane = plane
        self.target = target
        self._body = BodyBuffer(plane.waiting_bytes)
        self._tried: list[Server] = []

    # What the client's side calls.

    def start(self) -> None:
        """Its turn has come, and its client may ask this. Raises Problem."""
        if self.identity is not None:
            self.plane.requests.enter(self._tenant, self)
        if (operation := self.target.operation).loads or operation.fan_out is not None:
            fans_out = operation.fan_out is not None and self.plane.fleet.has_choice(self.over_grpc)
            self._collects = fans_out or self.plane.reads_load(operation)
            if self._collects and not self.is_complete:
                return
        self._proceed()

    def write(self, data: bytes) -> None:
        """The next bytes of the body."""
        if self._upstream is not None:
            self._upstream.write(data)
            if self._is_kept:
                self._keep(data)
        elif self.state is State.WAITING:
            self._write_waiting(data)
        elif self.state is State.RECEIVING:
            self._body.add(data)
            if self._collects and self._body.size > BUFFER_BYTES:
                most = f"a request to all servers may have {BUFFER_BYTES} bytes"
                self.refuse(body_too_large(most, self._body.size, "send less at once"))

    def flush(self) -> None:
        """These were all bytes that have come for now."""
        if self._upstream is not None:
            self._upstream.flush()

    def end(self) -> None:
        """The body is complete."""
        self.is_complete = True
        if self._upstream is not None:
            self._upstream.end()
        elif self.state is State.RECEIVING and self._collects:
            try:
                self._proceed()
            except Exception as fault:
                self.refuse(fault)

    def close(self) -> None:
        """The answer is over, or the client has gone. May be called again."""
        if self.state is State.DONE:
            return
        self.state = State.DONE
        self.plane.requests.leave(self._tenant, self)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._upstream is not None:
            self._upstream.cancel()
        self._leave_server()
        if self.lane_entry is not None:
            self.lane_entry.leave()
        if self._body.size:
            self._body.clear()

    # What the server's side calls.

    def pause_body(self) -> None:
        """The server takes no more for now."""
        self._is_paused = True
        self._pause_client()

    def resume_body(self) -> None:
        self._is_paused = False
        self._resume_client()

    # What the protocols add.

    @abstractmethod
    def _ask(self, server: Server) -> UpstreamRequest:
        """Open the request at that server."""

    @abstractmethod
    async def _fan_out(self, servers: Sequence[Server], how: FanOut) -> None:
        """Ask all of them, and pass one answer on. Raises Problem, CallFailed."""

    @abstractmethod
    def _check_body(self) -> None:
        """Look into a complete body before anything is sent. Raises Problem."""

    @abstractmethod
    def refuse(self, fault: Exception) -> None:
        """Answer with that, and close."""

    def _pause_client(self) -> None:
        """Have the client send no more of the body for now."""
        return

    def _resume_client(self) -> None:
        return

    # RECEIVING and WAITING.

    def _proceed(self) -> None:
        """To WAITING, or straight to FORWARDING if there is nothing to wait for. Raises Problem."""
        if self._collects:
            self._collects = False
            self._check_body()
        if self.identity is not None:
            bring, must_wait = self._reserve()
            if must_wait:
                self._wait(bring)
                return
        self._forward()

    def _reserve(self) -> tuple[Bring | None, bool]:
        """A slot if the model is there, else how to bring it; and whether it has to wait. Raises Problem."""
        bring = self._missing_model()
        if bring is None and self.target.operation.takes_slot:
            assert self.identity is not None
            self.lane_entry = self.plane.lanes.enter(self.target.model, self.identity, self.wish)
        waits = self.lane_entry is not None and self.lane_entry.waits
        return bring, bring is not None or waits or self.target.operation.is_audited

    def _missing_model(self) -> Bring | None:
        """What to wait for before the request is sent: that its model is there, or gone if it is unloaded."""
        operation, residencies = self.target.operation, self.plane.residencies
        if residencies is None or not self.target.model:
            return None
        if operation.unloads:
            return partial(residencies.unloaded, self._model)
        if not operation.needs_model or self.plane.fleet.is_outside_ledger(self._model):
            return None
        return None if residencies.note_wanted(self._model, self.wish.priority) else self._bring

    def _wait(self, bring: Bring | None) -> None:
        """Raises Problem."""
        if self._body.size:
            self._body.charge(self._body.size, self._tenant)
        self.state = State.WAITING
        self._task = asyncio.ensure_future(self._forward_when_ready(bring))

    async def _forward_when_ready(self, bring: Bring | None) -> None:
        try:
            await self._until_ready(bring)
            self._task = None
            self._body.release()
            self._forward()
        except Exception as fault:
            self._task = None
            self.refuse(fault)

    async def _until_ready(self, bring: Bring | None) -> None:
        """Until the model is there and has a slot, both at once: while the request waits for one it may lose
        the other. Raises Problem."""
        await self.plane.note(self.target, self.identity)
        while True:
            is_known = bring is None or await bring()
            if not self.target.operation.takes_slot:
                return
            assert self.identity is not None
            if self.lane_entry is None:
                self.lane_entry = self.plane.lanes.enter(self.target.model, self.identity, self.wish)
            await self.lane_entry.granted()
            if not is_known or not self.plane.has_left(self._model):
                return
            self.lane_entry.leave()
            self.lane_entry, bring = None, self._bring

    async def _bring(self) -> bool:
        residencies = self.plane.residencies
        assert residencies is not None
        if self.target.operation.loads:
            residencies.try_again(self._model)
        return await residencies.ready_if_known(self._model, self.wish.priority, self.wish.seconds)

    def _write_waiting(self, data: bytes) -> None:
        try:
            self._body.charge(len(data), self._tenant)
        except Problem as full:
            self.refuse(full)
            return
        before = self._body.size
        self._body.add(data)
        if before < BUFFER_BYTES <= self._body.size:
            self.pause_body()

    # FORWARDING and ANSWERING.

    def _forward(self) -> None:
        """To the server that should get it, or to several."""
        plane, operation = self.plane, self.target.operation
        fleet = plane.fleet
        self.state = State.FORWARDING
        if operation.fan_out is not None and (servers := fleet.all_for(self.target, self.over_grpc)):
            self._task = asyncio.ensure_future(self._forward_to_all(servers, operation.fan_out))
            return
        follows = operation.takes_slot and not self.target.is_encoded
        self._was_there = follows and plane.residencies is not None and plane.residencies.have(self._model)
        self._is_kept = self._was_there or fleet.has_choice(self.over_grpc)
        self._tried.clear()
        server = fleet.pick(self.target, over_grpc=self.over_grpc)
        assert server is not None  # none was tried
        self._send_to(server)

    def _send_to(self, server: Server) -> None:
        """With the body as far as it has come."""
        self.server = server
        self._tried.append(server)
        server.in_flight += 1
        self._is_in_flight = True
        was_paused, self._is_paused = self._is_paused, False
        self._upstream = upstream = self._ask(server)
        for piece in self._body.pieces:
            upstream.write(piece)
        if self.is_complete:
            upstream.end()
        elif self._body.pieces:
            upstream.flush()
        if not self._is_kept and self._body.pieces:
            self._body.clear()
        if was_paused and not self._is_paused:
            self._resume_client()

    async def _forward_to_all(self, servers: Sequence[Server], how: FanOut) -> None:
        try:
            await self._fan_out(servers, how)
        except Exception as fault:
            self.refuse(fault)

    def _begin_answer(self, is_success: bool) -> None:
        self.state = State.ANSWERING
        if self._is_kept:
            self._is_kept = False
            self._body.clear()
        server = self.server
        if server is not None:
            server.endpoint(self.over_grpc).answered()
            if is_success and self.target.operation.loads:
                server.note_load(self.target.model)

    def _retry(self, trouble: Trouble) -> bool:
        """Send it to another server, if it may go there after this trouble."""
        failed = self.server
        self._leave_server()
        if failed is None or trouble not in self._retried_after() or not self._send_to_another():
            return False
        failed.passed_on += 1
        return True

    def _send_to_another(self) -> bool:
        other = self.plane.fleet.pick(self.target, over_grpc=self.over_grpc, tried=self._tried)
        if other is None or not self._is_kept:
            return False
        self._leave_server()
        self._send_to(other)
        return True

    def _retried_after(self) -> frozenset[Trouble]:
        if self.target.operation.reads:
            return _IF_READING
        return _IF_IDEMPOTENT if self.is_idempotent else _NOTHING_SENT

    def _may_ask_again(self) -> bool:
        """If the server says that it does not have the model: nothing was done then."""
        return self._is_kept and self.is_complete and self._returns < MOST_RETURNS

    def _ask_again(self) -> bool:
        """The server does not have the model. If the ledger says so, back to WAITING; else to the next
        server, which may have got it just now. False: all were asked."""
        server, residencies = self.server, self.plane.residencies
        assert server is not None
        if not self._was_there or residencies is None:
            return self._send_to_another()
        self._returns += 1
        self._leave_server()
        if self.lane_entry is not None:
            self.lane_entry.leave()
            self.lane_entry = None
        try:
            self._wait(partial(residencies.returned, self._model, self.wish.priority, server.name))
        except Problem as full:
            self.refuse(full)
        return True

    def _report_dead(self) -> None:
        """The server says that the model's process is gone."""
        if self.plane.residencies is not None and self.server is not None:
            self.plane.residencies.report_dead(self._model, self.server.name)

    def _leave_server(self) -> None:
        self._upstream = None
        if self._is_in_flight:
            assert self.server is not None
            self.server.in_flight -= 1
            self._is_in_flight = False

    def _keep(self, data: bytes) -> None:
        """What was sent, to send it again."""
        self._body.add(data)
        if self._body.size > BUFFER_BYTES:
            self._is_kept = False
            self._body.clear()

    @property
    def _model(self) -> str:
        return self.target.model.decode(errors="replace")

    @property
    def _tenant(self) -> str:
        return "" if self.identity is None else self.identity.tenant
