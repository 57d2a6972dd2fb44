"""When the leader's next cycle begins: soon after something happened, but not after each event by itself."""

import asyncio
from contextlib import suppress
from math import inf

TICK_SECONDS = 0.25
"""Cycles begin at least so often, for deadlines and due retries."""

PACE_SECONDS = 0.005
"""Cycles begin at least so far apart, so that what arrives together shares one plan and two commits. After a
quiet moment the first one begins at once."""


class CycleTimer:
    """New tasks and requests wait for each other, but not for reports of runs that have begun."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._began_at = -inf
        self._urgent_at = -inf
        """When the last urgent cycle began."""

    def wake(self, *, urgent: bool = False) -> None:
        """There is something to do. `urgent`: a client waits for the next plan."""
        self._woken.set()
        if urgent:
            self._is_urgent.set()

    async def next(self) -> None:
        """Returns when a cycle shall begin. A later `wake` is for the next one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_SECONDS):
                await self._woken.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._began_at + PACE_SECONDS):
                await self._is_urgent.wait()
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._urgent_at + PACE_SECONDS - loop.time()))
        self._began_at = loop.time()
        if self._is_urgent.is_set():
            self._urgent_at = self._began_at
        self._woken.clear()
        self._is_urgent.clear()
