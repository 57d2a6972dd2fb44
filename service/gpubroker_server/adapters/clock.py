"""Clocks: seconds since this machine was booted, and the database's time between two readings of it."""

import asyncio
import time
from typing import Protocol

from gpubroker_server.core.domain.units import Instant, MonotonicSeconds, Seconds
from gpubroker_server.ports.store import ReadTicks, StoreUnavailable

# On Linux CLOCK_MONOTONIC stops while the machine sleeps and CLOCK_BOOTTIME does not. macOS lacks the second,
# and its CLOCK_MONOTONIC does not stop.
_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_ANSWERS = 3


def boot_seconds() -> MonotonicSeconds:
    """Seconds since boot, sleep included. All processes of a machine read the same; it never jumps."""
    return MonotonicSeconds(time.clock_gettime(_BOOT_CLOCK))


class TimeSource(Protocol):
    async def database_time(self) -> Instant: ...


class DatabaseClock:
    """Interpolates between readings of the database's clock; `now` never goes back.

    When the database's clock is set back, `now` stands still until that clock has caught up: nothing falls
    due meanwhile, and no moment is lived twice. A restart of the service takes over the new time at once.
    """

    def __init__(
        self, source: TimeSource, every_seconds: Seconds = Seconds(30.0), ticks: ReadTicks = boot_seconds
    ) -> None:
        self._source = source
        self._every_seconds = every_seconds
        self._ticks = ticks
        self._offset_seconds = time.time() - ticks()
        self._latest = Instant(0.0)
        self.round_trip_seconds = Seconds(0.0)
        """Of the quickest answer to the last reading."""

    def now(self) -> Instant:
        self._latest = max(self._latest, Instant(self._ticks() + self._offset_seconds))
        return self._latest

    async def read(self) -> None:
        """Ask the database a few times. The quickest answer counts, and half of the time it took as its way
        back: the first one may have waited for a connection. Raises StoreUnavailable."""
        answers = [await self._answer() for _ in range(_ANSWERS)]
        quickest, self._offset_seconds = min(answers)
        self.round_trip_seconds = Seconds(quickest)

    async def _answer(self) -> tuple[float, float]:
        """(seconds it took, what the database's clock is ahead of ours by)"""
        asked = self._ticks()
        there = await self._source.database_time()
        answered = self._ticks()
        return answered - asked, there - (asked + answered) / 2

    async def keep(self) -> None:
        """Read again and again, until cancelled; a database that is away leaves the last reading in force."""
        while True:
            await asyncio.sleep(self._every_seconds)
            try:
                await self.read()
            except StoreUnavailable:
                continue
