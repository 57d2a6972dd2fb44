"""Comparison of the wall clock, which people can set, with the clock since boot, which nobody can set.

A wall clock that jumps far ahead would make each deadline pass, and all data that is kept for a week
prunable, within seconds. Therefore both clocks are read together periodically. The wall clock is followed as
long as it stays near the time that the clock since boot leads to expect. Otherwise it is contradicted, and
the clock since boot tells the time.
"""

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.units import Instant, MonotonicSeconds, Seconds

BOUND_SECONDS = Seconds(60.0)
"""The greatest difference from the expected time at which a wall clock is not contradicted."""

MAX_DRIFT = 0.001
"""The seconds per second by which two healthy clocks may differ in speed. NTP slews by half of it."""

STEADY_SECONDS = Seconds(3600.0)
"""The time after which a clock that was set ahead counts again: the whole machine was paused, or the clock
was set on purpose. Nothing is pruned before a clock has counted for this time."""


class Contradiction(Struct, frozen=True):
    offset_seconds: float
    """The time to which the wall clock was set, as an offset to the clock since boot."""
    since: MonotonicSeconds


class ClockEvidence(Struct, frozen=True):
    """What is known about a wall clock. An offset is the time by which it is ahead of the clock since
    boot."""

    expected_seconds: float
    """The offset that was found when the clock began to count, and its drift since."""
    offset_seconds: float
    """The offset that tells the time, which never differs from the expected one by more than
    BOUND_SECONDS."""
    since: MonotonicSeconds
    """The time since which the clock counts."""
    read_at: MonotonicSeconds
    contradiction: Contradiction | None = None

    def ahead_seconds(self) -> Seconds:
        """Return the seconds by which a contradicted clock is ahead of the expected time; negative if it is
        behind, 0 if it is not contradicted."""
        contradiction = self.contradiction
        return Seconds(0.0 if contradiction is None else contradiction.offset_seconds - self.expected_seconds)


def begin_evidence(wall: Instant, boot: MonotonicSeconds) -> ClockEvidence:
    """Return the evidence of a first reading of both clocks, which nothing contradicts."""
    return ClockEvidence(wall - boot, wall - boot, boot, boot)


def add_reading(known: ClockEvidence, wall: Instant, boot: MonotonicSeconds) -> ClockEvidence:
    """Return the evidence after another reading of both clocks.

    A contradicted clock agrees again once it is near the expected time. A clock that was set ahead counts
    once it has stayed there for STEADY_SECONDS. A clock that was set back never counts in this process, since
    the time in between would be counted twice.
    """
    offset_seconds = wall - boot
    difference = offset_seconds - known.expected_seconds
    if abs(difference) <= BOUND_SECONDS:
        # The expected offset changes no faster than healthy clocks drift. Otherwise a clock that is set ahead
        # in many small steps would never be contradicted.
        drift = MAX_DRIFT * (boot - known.read_at)
        expected_seconds = known.expected_seconds + max(-drift, min(drift, difference))
        return ClockEvidence(expected_seconds, offset_seconds, known.since, boot)
    contradiction = known.contradiction
    if contradiction is None or abs(offset_seconds - contradiction.offset_seconds) > BOUND_SECONDS:
        contradiction = Contradiction(offset_seconds, boot)
    if difference > 0 and boot - contradiction.since >= STEADY_SECONDS:
        return begin_evidence(wall, boot)
    return replace(known, offset_seconds=known.expected_seconds, read_at=boot, contradiction=contradiction)


def may_prune(known: ClockEvidence, boot: MonotonicSeconds) -> bool:
    """Return True if nothing contradicts the clock, and it has counted for long enough to prune by it."""
    return known.contradiction is None and boot - known.since >= STEADY_SECONDS
