"""Answers that take long to work out: few at a time, so that nobody else waits for them long."""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, closing
from threading import Event
from time import monotonic
from typing import TypeVar

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.gateway.http.problems import Problem

T = TypeVar("T")


class Turns:
    """One answer is worked out at a time; so many more requests wait for their turn, the first one first."""

    def __init__(self, what: str, most_waiting: int, *, on_the_loop: bool = False) -> None:
        """`what`: such answers, as a refusal names them: plans; `on_the_loop`: working one out holds up
        everybody else, who then has the event loop for as long before the next turn begins."""
        self._what = what
        self._most_waiting = most_waiting
        self._on_the_loop = on_the_loop
        self._waiting = 0
        self._busy = asyncio.Lock()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Hold the turn for one answer. Raises Problem too-many-requests if too many wait already."""
        if (self._busy.locked() or self._waiting) and self._waiting >= self._most_waiting:
            more = f" and {self._waiting} more are waiting" if self._waiting else ""
            raise Problem(
                "too-many-requests",
                f"{self._what} are worked out one at a time; one is under way{more}; ask again in a second",
            )
        self._waiting += 1
        try:
            await self._busy.acquire()
        finally:
            self._waiting -= 1
        began = monotonic()
        try:
            yield
        finally:
            if self._on_the_loop:
                asyncio.get_running_loop().call_later(monotonic() - began, self._busy.release)
            else:
                self._busy.release()


async def aside(steps: Generator[None, None, T], limit_seconds: Seconds) -> T:
    """What the steps come to, worked out in a thread of its own, while everything else goes on. They must
    share nothing with others that changes.

    Raises TimeoutError once they have taken so long. Who no longer waits for it ends it after its next step.
    """
    over = Event()
    try:
        return await asyncio.to_thread(_worked_out, steps, limit_seconds, over)
    finally:
        over.set()


def _worked_out(steps: Generator[None, None, T], limit_seconds: Seconds, over: Event) -> T:
    until = monotonic() + limit_seconds
    with closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: T = end.value
                return found
            if over.is_set() or monotonic() > until:
                raise TimeoutError
