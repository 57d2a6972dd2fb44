"""A request at one of several servers, and at the next one if nothing has come of it there.

It stands between the client's exchange and the server: towards the first it is what was asked, towards the
second who asks.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gpubroker_server.gateway.proxy.aims import Aim
from gpubroker_server.gateway.proxy.between import Between
from gpubroker_server.gateway.proxy.cold import HELD_BYTES, Refusable
from gpubroker_server.gateway.proxy.server import Server
from gpubroker_server.ports.backends import Asking, Header, RequestHead, Trouble

if TYPE_CHECKING:
    from gpubroker_server.gateway.proxy.fleet import Fleet

KEPT_BYTES: Final = 2 * HELD_BYTES
"""So much of a body is kept for a second server, until the first one answers: more than is taken of a client
before there is a connection."""

_WELL: Final = 200

NOTHING_SENT: Final = frozenset({Trouble.UNREACHABLE, Trouble.BUSY})
"""After these anything may be sent to another server."""


class Attempt(Between):
    _answer: Refusable

    def __init__(
        self, fleet: "Fleet", head: RequestHead, answer: Refusable, aim: Aim, passes: frozenset[Trouble]
    ) -> None:
        """`passes`: after which trouble it goes to another server."""
        self._fleet = fleet
        self._head = head
        self._answer = answer
        self._aim = aim
        self._passes = passes
        self._is_complete = False
        self._is_held = False
        """The client was told to send no more of the body."""
        self._kept: list[bytes] | None = []
        """All of the body until now; None: it is not to be sent again."""
        self._kept_bytes = 0
        self._tried: list[Server] = []
        server = self._next()
        assert server is not None  # nothing was tried
        self._asking = self._ask(server)

    # What the client's exchange calls.

    def write(self, data: bytes) -> None:
        if self._kept is not None:
            self._kept.append(data)
            self._kept_bytes += len(data)
            if self._kept_bytes > KEPT_BYTES:
                self._kept = None
        self._asking.write(data)

    def end(self) -> None:
        self._is_complete = True
        self._asking.end()

    def cancel(self) -> None:
        self._leave()
        self._asking.cancel()

    # What the server calls.

    def on_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:
        self._kept = None
        if self._server is not None:
            self._server.http.answered()
            if self._aim.loads and status == _WELL:
                self._server.note_load(self._aim.model)
        self._answer.on_head(status, headers, body_bytes)

    def on_end(self) -> None:
        self._leave()
        self._answer.on_end()

    def on_trouble(self, trouble: Trouble, detail: str) -> None:
        failed = self._server
        self._leave()
        other = self._next() if self._kept is not None and trouble in self._passes else None
        if other is None:
            self._answer.on_trouble(trouble, detail)
            return
        if failed is not None:
            failed.http.failed(trouble, detail)
            failed.passed_on += 1
        self._go_on(other)

    def hold_body(self) -> None:
        self._is_held = True
        self._answer.hold_body()

    def go_on_with_body(self) -> None:
        self._is_held = False
        self._answer.go_on_with_body()

    def _next(self) -> Server | None:
        aim = self._aim
        return self._fleet.pick(aim.model, aim.version, loads=aim.loads, tried=self._tried)

    def _ask(self, server: Server) -> Asking:
        self._tried.append(server)
        self._server: Server | None = server
        self._answer.server = server
        server.in_flight += 1
        return server.backend.ask(self._head, self)

    def _go_on(self, server: Server) -> None:
        was_held, self._is_held = self._is_held, False
        self._asking = asking = self._ask(server)
        for piece in self._kept or ():
            asking.write(piece)
        if self._is_complete:
            asking.end()
        else:
            asking.flush()
        if was_held and not self._is_held:
            self._answer.go_on_with_body()

    def _leave(self) -> None:
        """Once for each server."""
        if self._server is not None:
            self._server.in_flight -= 1
            self._server = None
