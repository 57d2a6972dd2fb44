"""The way of one request through the proxy. Requests over every protocol share this state machine and body
buffer.

The states and their moves are one table, `core/serving/request_states.py`; docs/reference/states.md draws it.
The protocols implement reading, sending and answering.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import ClassVar, Final

from gpubroker_server.core.serving.request_states import ENDS, NEXT
from gpubroker_server.core.serving.request_states import RequestMove as Move
from gpubroker_server.core.serving.request_states import RequestState as State
from gpubroker_server.http.identity import Identity
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.body_buffer import BUFFER_BYTES, BodyBuffer
from gpubroker_server.inference.lanes import NO_WISH, LaneEntry
from gpubroker_server.inference.operation import FanOut, Target
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.refusals import body_too_large
from gpubroker_server.inference.servers import Server
from gpubroker_server.ports.backends import Trouble, UpstreamRequest

MAX_RETURNS: Final = 3
"""The most times that a request waits for a model that has left. After that the client gets the server's
answer."""

_NOTHING_SENT: Final = frozenset({Trouble.UNREACHABLE, Trouble.BUSY, Trouble.UNAUTHORIZED})
"""Troubles after which any request may go to another server."""
_IF_IDEMPOTENT: Final = _NOTHING_SENT | {Trouble.BROKEN}
"""Troubles after which an idempotent request may go to another server. SILENT is not one of them: a silent
server may still carry the request out."""
_IF_READING: Final = _IF_IDEMPOTENT | {Trouble.SILENT}
"""Troubles after which a request that changes nothing may go to another server."""

Bring = Callable[[], Awaitable[bool]]
"""Function that waits until a model is in memory. Returns False if no server of the ledger has the model.
Raises Problem."""


class ProxiedRequest(ABC):
    over_grpc: ClassVar[bool]

    state = State.RECEIVING
    is_complete = False
    """True once all of the body has come."""
    identity: Identity | None = None
    """The identity of the client's token; None where no token is needed."""
    wish = NO_WISH
    is_idempotent = False
    lane_entry: LaneEntry | None = None
    """The request's place or slot in the lane of its model; None if it takes no slot."""
    server: Server | None = None
    """The server that was asked last."""

    _upstream: UpstreamRequest | None = None
    """The request at `server`, until the server has answered."""
    _task: asyncio.Task[None] | None = None
    """The task in which the request waits, or in which several servers are asked."""
    _collects = False
    """True if the request stays in RECEIVING until the body is complete."""
    _is_kept = False
    """True if the buffer has all of the body that has come, so that the request may be sent again."""
    _is_paused = False
    """True if the client was told to send no more for now."""
    _is_in_flight = False
    """True if the request counts in `server.in_flight`."""
    _was_there = False
    """True if the ledger had the model in memory when the request was sent."""
    _returns = 0
    """The number of times that the request has waited for a model that had left."""

    def __init__(self, plane: Plane, target: Target) -> None:
        self.plane = plane
        self.target = target
        self._body = BodyBuffer(plane.waiting_bytes)
        self._tried: list[Server] = []

    # Methods for the client's side.

    def start(self) -> None:
        """Start to work on the request. Called once its turn has come and its client is known to have the
        right. Raises Problem."""
        if self.identity is not None:
            self.plane.requests.enter(self._tenant, self)
        if (operation := self.target.operation).loads or operation.fan_out is not None:
            fans_out = operation.fan_out is not None and self.plane.fleet.has_choice(self.over_grpc)
            self._collects = fans_out or self._must_see_body()
            if self._collects and not self.is_complete:
                return
        self._proceed()

    def write(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        if self._upstream is not None:
            self._upstream.write(data)
            if self._is_kept:
                self._keep(data)
        elif self.state is State.QUEUED or self.state is State.AWAITING_MODEL:
            self._write_waiting(data)
        elif self.state is State.RECEIVING:
            self._body.add(data)
            if self._collects and self._body.size > BUFFER_BYTES:
                most = f"a request to all servers may have {BUFFER_BYTES} bytes"
                self.refuse(body_too_large(most, self._body.size, "send less at once"))

    def flush(self) -> None:
        """Send what was written: no more bytes have come for now."""
        if self._upstream is not None:
            self._upstream.flush()

    def end(self) -> None:
        """Note that the body is complete, and pass that on."""
        self.is_complete = True
        if self._upstream is not None:
            self._upstream.end()
        elif self.state is State.RECEIVING and self._collects:
            try:
                self._proceed()
            except Exception as fault:
                self.refuse(fault)

    def close(self, move: Move) -> None:
        """Release everything that the request holds. `move` is the reason for the end. Later calls do
        nothing."""
        if self.state in ENDS:
            return
        self.state = NEXT[self.state][move]
        self.plane.requests.leave(self._tenant, self)
        # The request's own task may have called this: it must not cancel itself before it is done.
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._upstream is not None:
            self._upstream.cancel()
        self._leave_server()
        if self.lane_entry is not None:
            self.lane_entry.leave()
        if self._body.size:
            self._body.clear()

    # Methods for the server's side.

    def pause_body(self) -> None:
        """Have the client send no more: the server takes no more for now."""
        self._is_paused = True
        self._pause_client()

    def resume_body(self) -> None:
        self._is_paused = False
        self._resume_client()

    # Methods that the protocols implement.

    @abstractmethod
    def _ask(self, server: Server) -> UpstreamRequest:
        """Open a request to the server."""

    @abstractmethod
    async def _fan_out(self, servers: Sequence[Server], how: FanOut) -> None:
        """Ask all servers, and pass one merged answer on. Raises Problem, CallFailed."""

    @abstractmethod
    def _must_see_body(self) -> bool:
        """Return True if the whole body must be checked before anything of it is sent."""

    @abstractmethod
    def _check_body(self) -> None:
        """Check a complete body before anything is sent. Raises Problem."""

    @abstractmethod
    def refuse(self, fault: Exception) -> None:
        """Answer with the fault, and close."""

    def _pause_client(self) -> None:
        """Have the client send no more of the body for now."""
        return

    def _resume_client(self) -> None:
        return

    # Waiting, before the request is sent.

    def _proceed(self) -> None:
        """Have the request wait, or send it if there is nothing to wait for. Raises Problem."""
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
        """Enter the model's lane if the model is in memory. Returns the function that brings a missing model,
        or None, and True if the request has to wait. Raises Problem."""
        bring = self._missing_model()
        # A request for a missing model takes no slot yet, which it would hold through the whole load.
        if bring is None and self.target.operation.takes_slot:
            assert self.identity is not None
            self.lane_entry = self.plane.lanes.enter(self.target.model, self.identity, self.wish)
        waits = self.lane_entry is not None and self.lane_entry.waits
        return bring, bring is not None or waits or self.target.operation.is_audited

    def _missing_model(self) -> Bring | None:
        """Return the function with which the request waits until its model is in memory or, if the request
        unloads the model, until it is gone. Returns None if there is nothing to wait for."""
        operation, residencies = self.target.operation, self.plane.residencies
        if residencies is None or not self.target.model:
            return None
        if operation.unloads:
            by = "" if self.identity is None else self.identity.name
            return partial(residencies.unloaded, self._model, by)
        is_outside = self.plane.fleet.is_outside_ledger(self._model, over_grpc=self.over_grpc)
        if not operation.needs_model or is_outside:
            return None
        is_there = residencies.note_wanted(self._model, self.wish.priority, over_grpc=self.over_grpc)
        return None if is_there else self._bring

    def _wait(self, bring: Bring | None) -> None:
        """Start a task that waits until the request can be sent. Raises Problem if the waiting bodies are too
        large."""
        self._begin_waiting(bring, self._body.size)
        self._task = asyncio.ensure_future(self._forward_when_ready(bring))

    def _begin_waiting(self, bring: Bring | None, body_bytes: int) -> None:
        """Count the body among the waiting bodies. Raises Problem if all of them together have too many
        bytes."""
        if body_bytes:
            self._body.charge(body_bytes, self._tenant)
        is_queued = bring is None and self.lane_entry is not None
        self.state = NEXT[self.state][Move.QUEUE if is_queued else Move.AWAIT_MODEL]

    async def _forward_when_ready(self, bring: Bring | None) -> None:
        try:
            await self._until_ready(bring)
            # `_task` is cleared before `_forward`, which may start another task.
            self._task = None
            self._body.release()
            self._forward()
        except Exception as fault:
            self._task = None
            self.refuse(fault)

    async def _until_ready(self, bring: Bring | None) -> None:
        """Wait until the model is in memory and the request has a slot at the same time: the model may leave
        while the request waits for the slot. Raises Problem."""
        # The audit log's line is durable before the request is carried out.
        await self.plane.note(self.target, self.identity)
        while True:
            is_known = bring is None or await bring()
            if not self.target.operation.takes_slot:
                return
            assert self.identity is not None
            if self.lane_entry is None:
                self.lane_entry = self.plane.lanes.enter(self.target.model, self.identity, self.wish)
            if self.lane_entry.waits and self.state is State.AWAITING_MODEL:
                self.state = NEXT[self.state][Move.QUEUE]
            await self.lane_entry.granted()
            if not is_known or not self.plane.has_left(self._model, over_grpc=self.over_grpc):
                return
            # The model has left meanwhile: wait for the model without a slot, and then for a slot again.
            self.lane_entry.leave()
            self.lane_entry, bring = None, self._bring
            if self.state is State.QUEUED:
                self.state = NEXT[self.state][Move.AWAIT_MODEL]

    async def _bring(self) -> bool:
        residencies = self.plane.residencies
        assert residencies is not None
        if self.target.operation.loads:
            residencies.try_again(self._model)
        return await residencies.ready_if_known(
            self._model, self.wish.priority, self.wish.seconds, over_grpc=self.over_grpc
        )

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

    # The request at a server.

    def _forward(self) -> None:
        """Send the request to the server that is to get it, or to several."""
        plane, operation = self.plane, self.target.operation
        fleet = plane.fleet
        if operation.fan_out is not None and (servers := fleet.all_for(self.target, self.over_grpc)):
            self.state = NEXT[self.state][Move.SEND]
            self._task = asyncio.ensure_future(self._forward_to_all(servers, operation.fan_out))
            return
        follows = operation.takes_slot and not self.target.is_encoded
        self._was_there = follows and plane.residencies is not None and plane.residencies.have(self._model)
        self._is_kept = self._was_there or fleet.has_choice(self.over_grpc)
        self._tried.clear()
        server = fleet.pick(self.target, over_grpc=self.over_grpc)
        assert server is not None  # `pick` returns None only after servers were tried.
        self._send_to(server)

    def _send_to(self, server: Server) -> None:
        """Send the head and as much of the body as has come."""
        self.state = NEXT[self.state][Move.SEND]
        self.server = server
        self._tried.append(server)
        server.in_flight += 1
        self._is_in_flight = True
        # The server may ask for a pause while it is written to, so the flag is reset before and read after.
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
        self.state = NEXT[self.state][Move.ANSWER]
        # Once an answer has begun the request is never sent again.
        if self._is_kept:
            self._is_kept = False
            self._body.clear()
        server = self.server
        if server is not None:
            endpoint = server.endpoint(self.over_grpc)
            endpoint.answered()
            if endpoint.refusal and is_success and self.target.model:
                endpoint.refusal = ""
            if is_success and self.target.operation.loads:
                server.note_load(self.target.model)

    def _retry(self, trouble: Trouble) -> bool:
        """Send the request to another server if that is allowed after this trouble. Returns True if the
        request was sent."""
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
        """Return True if the request may be sent once more after a server has said that it lacks the model.
        Such a server has done nothing."""
        return self._is_kept and self.is_complete and self._returns < MAX_RETURNS

    def _ask_again(self) -> bool:
        """Continue after a server has denied that it has the model. Returns False if all servers were asked.

        1. Send the request to another server that has the model: a restarted server may be long without it.
        2. If the ledger has the model at this server, wait until the ledger or the server changes.
        3. Otherwise send it to the next server, which may have got the model just now.
        """
        server, residencies = self.server, self.plane.residencies
        assert server is not None
        if not self._was_there or residencies is None:
            return self._send_to_another()
        if self.plane.fleet.another_has(self.target, self._tried, over_grpc=self.over_grpc):
            return self._send_to_another()
        self._returns += 1
        self._leave_server()
        if self.lane_entry is not None:
            self.lane_entry.leave()
            self.lane_entry = None
        try:
            returned = partial(residencies.returned, self._model, self.wish.priority, server.name)
            self._wait(partial(returned, over_grpc=self.over_grpc))
        except Problem as full:
            self.refuse(full)
        return True

    def _report_dead(self) -> None:
        """Have the leader check the model: the server says that the model's process is gone."""
        if self.plane.residencies is not None and self.server is not None:
            self.plane.residencies.report_dead(self._model, self.server.name)

    def _leave_server(self) -> None:
        self._upstream = None
        if self._is_in_flight:
            assert self.server is not None
            self.server.in_flight -= 1
            self._is_in_flight = False

    def _keep(self, data: bytes) -> None:
        """Keep the bytes that were sent, as long as the body is small enough to be sent again."""
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
