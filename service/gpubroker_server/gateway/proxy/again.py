"""A request whose model left before it came: it is kept, and sent again once the model is back.

The server says of such a request that it knows no such model; nothing was done then. A picture that is a
moment old, or somebody who unloads by hand, makes that happen to requests that were right to be sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from gpubroker_server.gateway.proxy.between import Between
from gpubroker_server.gateway.proxy.cold import HELD_BYTES, Refusable
from gpubroker_server.gateway.proxy.lanes import Turn
from gpubroker_server.gateway.proxy.server import Server
from gpubroker_server.ports.backends import Asking, Header

MOST_TIMES: Final = 3
"""So often a request is sent again; then the client reads what the server says."""

_MOST_SAID_BYTES: Final = 4096
"""No longer is an answer that says so."""

_STATUSES: Final = (404, 503)
"""The second one if the request names a version."""
_UNKNOWN: Final = "Request for unknown model: "

_FAILED: Final = 500
_DEAD: Final = "is not healthy"


def says_gone(said: str) -> bool:
    """Whether these words of a server are about a model that it does not have; of a version that a model
    does not have it tells in other ones."""
    return said.startswith(_UNKNOWN) and not (" version " in said and said.endswith(" is not found"))


def _says_gone(body: bytes) -> bool:
    """The same of an answer over HTTP, which is JSON whatever its type says."""
    head, tail = b'{"error":"', b'"}'
    is_error = body.startswith(head) and body.endswith(tail)
    return is_error and says_gone(body[len(head) : -len(tail)].decode("utf-8", "replace"))


def says_dead(said: str) -> bool:
    """Whether a server speaks of a model whose process is gone. It calls that ready all the same."""
    return _DEAD in said


class Again(Between, Refusable):
    """Keeps the request as long as it may be needed."""

    _answer: Refusable

    def __init__(
        self,
        send: Callable[[Refusable], Asking],
        answer: Refusable,
        is_there: Callable[[], bool],
        back: Callable[[], Awaitable[None]],
        doubt: Callable[[], None],
    ) -> None:
        """`is_there`: the model, when it is sent; of others their server tells itself. `back`: until it may
        be sent again; raises Problem. `doubt`: called when it answers as one whose process is gone."""
        self._send = send
        self._answer = answer
        self._is_there = is_there
        self._back = back
        self._doubt = doubt
        self._has_failed = False
        self._was_there = is_there()
        self._times = 0
        self._pieces: list[bytes] | None = []
        """Of the body, all that has come; None if it is not kept any more."""
        self._kept_bytes = 0
        self._is_complete = False
        self._head: tuple[int, Sequence[Header], int | None] | None = None
        """Of an answer that is held back until its body is there."""
        self._said: list[bytes] = []
        self._waiting: asyncio.Task[None] | None = None
        self._asking = send(self)

    @property
    def turn(self) -> Turn | None:
        return self._answer.turn

    @turn.setter
    def turn(self, turn: Turn | None) -> None:
        self._answer.turn = turn

    @property
    def server(self) -> Server | None:
        return self._answer.server

    @server.setter
    def server(self, server: Server | None) -> None:
        self._answer.server = server

    # What the client's side calls.

    def write(self, data: bytes) -> None:
        self._asking.write(data)
        if self._pieces is not None:
            self._pieces.append(data)
            self._kept_bytes += len(data)
            if self._kept_bytes > HELD_BYTES:
                self._pieces = None

    def end(self) -> None:
        self._is_complete = True
        self._asking.end()

    def cancel(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._asking.cancel()

    # What the server's side calls.

    def on_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:
        is_whole = self._pieces is not None and self._is_complete
        if status in _STATUSES and self._was_there and is_whole and (body_bytes or 0) <= _MOST_SAID_BYTES:
            self._head = status, headers, body_bytes
            return
        self._pieces = None
        self._has_failed = status == _FAILED and self._was_there
        self._answer.on_head(status, headers, body_bytes)

    def on_body(self, data: bytes) -> None:
        if self._head is None:
            if self._has_failed and says_dead(data[:_MOST_SAID_BYTES].decode("utf-8", "replace")):
                self._doubt()
            self._answer.on_body(data)
            return
        self._said.append(data)
        if sum(map(len, self._said)) > _MOST_SAID_BYTES:
            self._let_through()

    def on_pause(self) -> None:
        if self._head is None:
            self._answer.on_pause()

    def on_end(self) -> None:
        if self._head is not None:
            if self._times < MOST_TIMES and _says_gone(b"".join(self._said)):
                self._waiting = asyncio.ensure_future(self._send_again())
                return
            self._let_through()
        self._answer.on_end()

    def on_refused(self, fault: Exception) -> None:
        self._answer.on_refused(fault)

    def _let_through(self) -> None:
        assert self._head is not None
        self._answer.on_head(*self._head)
        for piece in self._said:
            self._answer.on_body(piece)
        self._head, self._pieces = None, None

    async def _send_again(self) -> None:
        self._times += 1
        self._head, self._said = None, []
        try:
            await self._back()
            self._was_there = self._is_there()
            self._asking = asking = self._send(self)
        except Exception as fault:
            self._answer.on_refused(fault)
            return
        for piece in self._pieces or ():
            asking.write(piece)
        asking.end()
