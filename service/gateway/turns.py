"""Answers that take long to work out: few at a time, and nobody else waits for them longer than a moment."""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import TypeVar

from service.core.units import Seconds
from service.gateway.problems import Problem

TURN_SECONDS = 0.003
"""After so long everybody else has a turn."""

T = TypeVar("T")


class Turns:
    """One answer is worked out at a time; so many more requests wait for their turn, the first one first."""

    def __init__(self, what: str, most_waiting: int) -> None:
        """`what`: such answers, as a refusal names them: plans."""
        self._what = what
        self._most_waiting = most_waiting
        self._waiting = 0
        self._busy = asyncio.Lock()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Hold the turn for one answer. Raises Problem too-many-requests if too many wait already."""
        if self._busy.locked() and self._waiting >= self._most_waiting:
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
        try:
            yield
        finally:
            self._busy.release()


async def in_turns(
    steps: Generator[None, None, T], limit_seconds: Seconds, turn_seconds: float = TURN_SECONDS
) -> T:
    """What the steps come to, with a pause for all else that the service does whenever a turn is over.

    Raises TimeoutError once the steps themselves have taken longer than the limit.
    """
    loop = asyncio.get_running_loop()
    spent, began = 0.0, loop.time()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
        taken = loop.time() - began
        if spent + taken > limit_seconds:
            raise TimeoutError
        if taken >= turn_seconds:
            spent += taken
            await asyncio.sleep(0)
            began = loop.time()
