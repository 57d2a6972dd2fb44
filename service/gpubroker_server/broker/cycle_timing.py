"""When the leader's next cycle begins: soon after something happened, and not after each thing anew."""

import asyncio
from contextlib import suppress
from math import inf

TICK_SECONDS = 0.25
"""How often deadlines and due retries are looked at when nothing else happens."""

PACE_SECONDS = 0.005
"""Cycles begin at least so far apart: what came in meanwhile shares one plan and two commits. After a quiet
moment the first one begins at once."""


class Rhythm:
    """Who arrives waits for others who arrive, and not for the reports of runs that have begun already."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._arrived = asyncio.Event()
        self._began_at = -inf
        self._served_at = -inf
        """When the last cycle began that somebody had arrived for."""

    def wake(self) -> None:
        """There is something to do."""
        self._woken.set()

    def arrive(self) -> None:
        """Somebody waits for the next plan."""
        self._woken.set()
        self._arrived.set()

    async def next(self) -> None:
        """Back when a cycle shall begin. Whatever wakes it from now on is for the one after."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_SECONDS):
                await self._woken.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._began_at + PACE_SECONDS):
                await self._arrived.wait()
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._served_at + PACE_SECONDS - loop.time()))
        self._began_at = loop.time()
        if self._arrived.is_set():
            self._served_at = self._began_at
        self._woken.clear()
        self._arrived.clear()
