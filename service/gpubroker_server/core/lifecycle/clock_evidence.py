"""Comparison of a clock that people can set with the one since boot, which nobody can set.

A clock that jumps far ahead would make each deadline pass, and all that is kept for a week prunable, within
seconds. Both clocks are read together, again and again. The wall clock is followed as long as it stays near
to where the clock since boot expects it. Beyond that it is contradicted: time goes on by the clock since
boot.
"""

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.units import Instant, MonotonicSeconds, Seconds

BOUND_SECONDS = Seconds(60.0)
"""A wall clock farther away than this is contradicted."""

MOST_DRIFT = 0.001
"""Seconds per second by which two healthy clocks may differ in speed; NTP slews by half of it."""

STEADY_SECONDS = Seconds(3600.0)
"""A clock that was set ahead counts once it has stayed there for so long: the machine was paused whole, or it
was set on purpose. Nothing is pruned before a clock has counted for so long."""


class Contradiction(Struct, frozen=True):
    offset_seconds: float
    """The time to which the wall clock was set, as an offset to the clock since boot."""
    since: MonotonicSeconds


class ClockEvidence(Struct, frozen=True):
    """Offsets are what a wall clock is ahead of the clock since boot."""

    expected_seconds: float
    """The offset that was found when the clock began to count, and its drift since."""
    offset_seconds: float
    """The offset to tell the time by: never farther than BOUND_SECONDS from the expected one."""
    since: MonotonicSeconds
    """The time since which the clock counts."""
    read_at: MonotonicSeconds
    contradiction: Contradiction | None = None

    def ahead_seconds(self) -> Seconds:
        """The seconds that a contradicted clock is ahead of the time that counts; negative if it is
        behind."""
        found = self.contradiction
        return Seconds(0.0 if found is None else found.offset_seconds - self.expected_seconds)


def begin_evidence(wall: Instant, boot: MonotonicSeconds) -> ClockEvidence:
    """A first reading of both clocks: nothing contradicts it."""
    return ClockEvidence(wall - boot, wall - boot, boot, boot)


def add_reading(known: ClockEvidence, wall: Instant, boot: MonotonicSeconds) -> ClockEvidence:
    """Return what is known after another reading of both clocks. A contradicted clock agrees again when it
    has come back. A clock that was set ahead counts from when it has stayed there for STEADY_SECONDS; a clock
    that was set back never does in this process: what has been lived would be lived twice."""
    offset_seconds = wall - boot
    difference = offset_seconds - known.expected_seconds
    if abs(difference) <= BOUND_SECONDS:
        # The expectation moves no faster than healthy clocks drift: else a clock that is set ahead in many
        # small steps would never be contradicted.
        drift = MOST_DRIFT * (boot - known.read_at)
        expected_seconds = known.expected_seconds + max(-drift, min(drift, difference))
        return ClockEvidence(expected_seconds, offset_seconds, known.since, boot)
    found = known.contradiction
    if found is None or abs(offset_seconds - found.offset_seconds) > BOUND_SECONDS:
        found = Contradiction(offset_seconds, boot)
    if difference > 0 and boot - found.since >= STEADY_SECONDS:
        return begin_evidence(wall, boot)
    return replace(known, offset_seconds=known.expected_seconds, read_at=boot, contradiction=found)


def may_prune(known: ClockEvidence, boot: MonotonicSeconds) -> bool:
    """Return True if the clock has counted for long enough to delete by it, and nothing contradicts it."""
    return known.contradiction is None and boot - known.since >= STEADY_SECONDS
