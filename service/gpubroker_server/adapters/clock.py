"""Clocks: the seconds since this machine was booted, its wall clock, and the database's clock, which is
interpolated between readings."""

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
    """Return the seconds since boot, including sleep. The value is equal for all processes of a machine, and
    never jumps."""
    return MonotonicSeconds(time.clock_gettime(_BOOT_CLOCK))


class WallClock:
    """This machine's wall clock, as far as its clock since boot does not contradict it. It never goes
    back."""

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
    not contradict them. `now` never goes back.

    If the database's clock is set back by less than the bound, `now` stands still until that clock has
    caught up. A restart of the service takes over the new time at once.
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
        evidence = self._evidence
        offset_seconds = self._unread_offset_seconds if evidence is None else evidence.offset_seconds
        self._latest = max(self._latest, Instant(self._ticks() + offset_seconds))
        return self._latest

    @property
    def is_contradicted(self) -> bool:
        return self._evidence is not None and self._evidence.contradiction is not None

    def may_prune(self) -> bool:
        return self._evidence is not None and may_prune(self._evidence, self._ticks())

    async def read(self) -> None:
        """Read the database's clock a few times and use the quickest answer, because the first one may have
        waited for a connection. Half of the time that the answer took counts as its way back. Raises
        StoreUnavailable."""
        answers = [await self._answer() for _ in range(_ANSWERS)]
        quickest, database_time, boot = min(answers)
        before = self._evidence
        self._evidence = (
            begin_evidence(database_time, boot)
            if before is None
            else add_reading(before, database_time, boot)
        )
        self._tell(before, self._evidence)
        self.round_trip_seconds = Seconds(quickest)

    async def _answer(self) -> tuple[float, Instant, MonotonicSeconds]:
        """Return the seconds that the answer took, the database's time, and this machine's time at that
        moment."""
        asked = self._ticks()
        database_time = await self._source.database_time()
        answered = self._ticks()
        return answered - asked, database_time, MonotonicSeconds((asked + answered) / 2)

    def _tell(self, before: ClockEvidence | None, now: ClockEvidence) -> None:
        """Warn once when a contradiction begins, and once when it ends."""
        was = None if before is None else before.contradiction
        if now.contradiction is not None and was is None:
            log.warning(
                "the database's clock was set: it does not count, and nothing is pruned",
                fault=_contradicted(now.ahead_seconds()),
            )
        elif was is not None and now.contradiction is None:
            log.warning("the database's clock counts again")

    async def keep(self) -> None:
        """Read the clock at intervals until cancelled. While the database cannot be reached, the last
        reading is used."""
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
