"""The way of one request through the proxy, the same over every protocol: one state machine, one body buffer.

The states and their moves are one table, `core/serving/request_states.py`; docs/reference/states.md draws it.
The protocols add how a request is read, sent and answered.
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

MOST_RETURNS: Final = 3
"""How often a request waits for a model that has left; then the client gets the server's answer."""

_NOTHING_SENT: Final = frozenset({Trouble.UNREACHABLE, Trouble.BUSY, Trouble.UNAUTHORIZED})
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
    """The identity of the client's token; None where none is needed."""
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
        """Begin to work on the request, whose turn has come and whose client may ask this. Raises Problem."""
        if self.identity is not None:
            self.plane.requests.enter(self._tenant, self)
        if (operation := self.target.operation).loads or operation.fan_out is not None:
            fans_out = operation.fan_out is not None and self.plane.fleet.has_choice(self.over_grpc)
            self._collects = fans_out or self._must_see_body()
            if self._collects and not self.is_complete:
                return
        self._proceed()

    def write(self, data: bytes) -> None:
        """The next bytes of the body."""
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

    def close(self, move: Move) -> None:
        """Release what the request holds. `move`: why it ends; only the first call counts."""
        if self.state in ENDS:
            return
        self.state = NEXT[self.state][move]
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
    def _must_see_body(self) -> bool:
        """Return whether the whole body is looked into before anything of it is sent."""

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

    # Before it is sent.

    def _proceed(self) -> None:
        """Have it wait, or send it if there is nothing to wait for. Raises Problem."""
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
        """Return what to wait for before the request is sent: that the model is there, or gone if this
        unloads it."""
        operation, residencies = self.target.operation, self.plane.residencies
        if residencies is None or not self.target.model:
            return None
        if operation.unloads:
            return partial(residencies.unloaded, self._model)
        if not operation.needs_model or self.plane.fleet.is_outside_ledger(self._model):
            return None
        return None if residencies.note_wanted(self._model, self.wish.priority) else self._bring

    def _wait(self, bring: Bring | None) -> None:
        """Wait in a task of its own until the request can be sent. Raises Problem if the bodies that wait are
        too large."""
        self._begin_waiting(bring, self._body.size)
        self._task = asyncio.ensure_future(self._forward_when_ready(bring))

    def _begin_waiting(self, bring: Bring | None, body_bytes: int) -> None:
        """Count the body among those that wait. Raises Problem if all of them have too many bytes."""
        if body_bytes:
            self._body.charge(body_bytes, self._tenant)
        is_queued = bring is None and self.lane_entry is not None
        self.state = NEXT[self.state][Move.QUEUE if is_queued else Move.AWAIT_MODEL]

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
        """Wait until the model is there and has a slot, both at once: while the request waits for one it may
        lose the other. Raises Problem."""
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
            if not is_known or not self.plane.has_left(self._model):
                return
            self.lane_entry.leave()
            self.lane_entry, bring = None, self._bring
            if self.state is State.QUEUED:
                self.state = NEXT[self.state][Move.AWAIT_MODEL]

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

    # At a server.

    def _forward(self) -> None:
        """Send the request to the server that should get it, or to several."""
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
        assert server is not None  # none was tried
        self._send_to(server)

    def _send_to(self, server: Server) -> None:
        """Send the head and as much of the body as has come."""
        self.state = NEXT[self.state][Move.SEND]
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
        self.state = NEXT[self.state][Move.ANSWER]
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
        """Return True if the server says that it does not have the model: nothing was done then."""
        return self._is_kept and self.is_complete and self._returns < MOST_RETURNS

    def _ask_again(self) -> bool:
        """Go on after a server has denied that it has the model. Returns False if all servers were asked.

        1. To another server that has the model: a restarted server may be long without it.
        2. If the ledger has the model at this server, wait until the ledger or the server changes.
        3. Else to the next server, which may have got the model just now.
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
        """Keep what was sent, as long as it is small enough to be sent again."""
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
