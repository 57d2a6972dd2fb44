"""Clocks: seconds since this machine was booted, its wall clock, and the database's time between two
readings."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from gpubroker_server.core.domain.units import Instant, MonotonicSeconds, Seconds
from gpubroker_server.core.lifecycle.clock_evidence import (
    BOUND_SECONDS,
    STEADY_SECONDS,
    ClockEvidence,
    add_reading,
    begin_evidence,
    may_prune,
)
from gpubroker_server.ports.store import ReadTicks, StoreUnavailable

log = structlog.get_logger("gpubroker.clock")

# On Linux CLOCK_MONOTONIC stops while the machine sleeps and CLOCK_BOOTTIME does not. macOS lacks the second,
# and its CLOCK_MONOTONIC does not stop.
_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_ANSWERS = 3


def boot_seconds() -> MonotonicSeconds:
    """Return the seconds since boot, including sleep. All processes of a machine read the same; it never
    jumps."""
    return MonotonicSeconds(time.clock_gettime(_BOOT_CLOCK))


class WallClock:
    """This machine's wall clock, unless its clock since boot contradicts it. Never goes back."""

    def __init__(self, wall: Callable[[], float] = time.time, ticks: ReadTicks = boot_seconds) -> None:
        self._wall = wall
        self._ticks = ticks
        self._evidence = begin_evidence(Instant(wall()), ticks())
        self._latest = Instant(0.0)

    def now(self) -> Instant:
        boot = self._read()
        self._latest = max(self._latest, Instant(boot + self._evidence.offset_seconds))
        return self._latest

    def may_prune(self) -> bool:
        return may_prune(self._evidence, self._read())

    def _read(self) -> MonotonicSeconds:
        boot = self._ticks()
        self._evidence = add_reading(self._evidence, Instant(self._wall()), boot)
        return boot


class TimeSource(Protocol):
    async def database_time(self) -> Instant: ...


class DatabaseClock:
    """Interpolates between readings of the database's clock, as far as this machine's clock since boot does
    not contradict them; `now` never goes back.

    When the database's clock is set back by less than the bound, `now` stands still until that clock has
    caught up: no moment is lived twice. A restart of the service takes over the new time at once.
    """

    def __init__(
        self, source: TimeSource, every_seconds: Seconds = Seconds(5.0), ticks: ReadTicks = boot_seconds
    ) -> None:
        self._source = source
        self._every_seconds = every_seconds
        self._ticks = ticks
        self._unread_offset_seconds = time.time() - ticks()
        self._evidence: ClockEvidence | None = None
        self._latest = Instant(0.0)
        self.round_trip_seconds = Seconds(0.0)
        """The round trip of the quickest answer to the last reading."""

    def now(self) -> Instant:
        known = self._evidence
        offset_seconds = self._unread_offset_seconds if known is None else known.offset_seconds
        self._latest = max(self._latest, Instant(self._ticks() + offset_seconds))
        return self._latest

    @property
    def is_contradicted(self) -> bool:
        return self._evidence is not None and self._evidence.contradiction is not None

    def may_prune(self) -> bool:
        return self._evidence is not None and may_prune(self._evidence, self._ticks())

    async def read(self) -> None:
        """Ask the database a few times. The quickest answer counts, and half of the time it took as its way
        back: the first one may have waited for a connection. Raises StoreUnavailable."""
        answers = [await self._answer() for _ in range(_ANSWERS)]
        quickest, database_time, boot = min(answers)
        known = self._evidence
        self._evidence = (
            begin_evidence(database_time, boot) if known is None else add_reading(known, database_time, boot)
        )
        self._tell(known, self._evidence)
        self.round_trip_seconds = Seconds(quickest)

    async def _answer(self) -> tuple[float, Instant, MonotonicSeconds]:
        """(seconds it took, the database's time, ours at that moment)"""
        asked = self._ticks()
        database_time = await self._source.database_time()
        answered = self._ticks()
        return answered - asked, database_time, MonotonicSeconds((asked + answered) / 2)

    def _tell(self, before: ClockEvidence | None, now: ClockEvidence) -> None:
        """Once when a contradiction begins, and once when it ends."""
        was = None if before is None else before.contradiction
        if now.contradiction is not None and was is None:
            log.warning(
                "the database's clock was set: it does not count, and nothing is pruned",
                fault=_contradicted(now.ahead_seconds()),
            )
        elif was is not None and now.contradiction is None:
            log.warning("the database's clock counts again")

    async def keep(self) -> None:
        """Read again and again, until cancelled; a database that is away leaves the last reading in force."""
        while True:
            await asyncio.sleep(self._every_seconds)
            try:
                await self.read()
            except StoreUnavailable:
                continue


def _contradicted(ahead_seconds: Seconds) -> str:
    side = "ahead of" if ahead_seconds > 0 else "behind"
    counts = (
        f"correct it, or wait: it counts once it has stayed there for {STEADY_SECONDS:g} s"
        if ahead_seconds > 0
        else "correct it, or restart all processes to take it over"
    )
    return (
        f"it is {abs(ahead_seconds):.0f} s {side} the time that this machine's clock since boot expects, "
        f"more than {BOUND_SECONDS:g} s; {counts}"
    )
