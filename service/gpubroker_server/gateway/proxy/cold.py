"""A request for a model that is not in memory yet, or has no slot for it: it waits, with what has come of its
body."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.lanes import Turn
from gpubroker_server.gateway.proxy.room import Room
from gpubroker_server.gateway.proxy.server import Server
from gpubroker_server.ports.backends import Answer, Asking

HELD_BYTES: Final = 1024 * 1024
"""So much of a body is kept; the client keeps the rest."""


class Refusable(Answer, Protocol):
    turn: Turn | None
    """At its model, if it needs one: whoever is answered gives it back."""
    server: Server | None
    """That was asked last."""

    def on_refused(self, fault: Exception) -> None:
        """Nothing was sent, and nothing more comes."""
        ...


class Cold(Asking):
    """Stands for the request until it may go; then it is sent, and this passes on what follows."""

    def __init__(
        self, ready: Awaitable[object], send: Callable[[], Asking], answer: Refusable, room: Room, tenant: str
    ) -> None:
        self._send = send
        self._answer = answer
        self._room = room
        self._tenant = tenant
        self._pieces: list[bytes] = []
        self._kept_bytes = 0
        self._is_complete = False
        self._asking: Asking | None = None
        self._waiting = asyncio.ensure_future(self._wait(ready))
        self._waiting.add_done_callback(lambda _: room.give_back(self._kept_bytes, tenant))

    async def _wait(self, ready: Awaitable[object]) -> None:
        try:
            await ready
            self._asking = asking = self._send()
        except Exception as fault:
            self._answer.on_refused(fault)
            return
        for piece in self._pieces:
            asking.write(piece)
        self._pieces.clear()
        if self._is_complete:
            asking.end()
        else:
            asking.flush()
        if self._kept_bytes >= HELD_BYTES:
            self._answer.go_on_with_body()

    def write(self, data: bytes) -> None:
        if self._asking is not None:
            self._asking.write(data)
            return
        try:
            self._room.take(len(data), self._tenant)
        except Problem as full:
            asyncio.get_running_loop().call_soon(self._waiting.cancel)  # it may not even have begun
            self._answer.on_refused(full)
            return
        self._pieces.append(data)
        before, self._kept_bytes = self._kept_bytes, self._kept_bytes + len(data)
        if before < HELD_BYTES <= self._kept_bytes:
            self._answer.hold_body()

    def flush(self) -> None:
        if self._asking is not None:
            self._asking.flush()

    def end(self) -> None:
        self._is_complete = True
        if self._asking is not None:
            self._asking.end()

    def cancel(self) -> None:
        self._waiting.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def hold_answer(self) -> None:
        if self._asking is not None:
            self._asking.hold_answer()

    def go_on_with_answer(self) -> None:
        if self._asking is not None:
            self._asking.go_on_with_answer()
