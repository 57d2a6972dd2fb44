"""A measured value that has been above a threshold for a while, and is not yet back below a lower one."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant, Seconds


class Threshold(NamedTuple):
    high: float
    """At or above it for `seconds`: on."""
    low: float
    """Below it for `seconds`: off."""
    seconds: Seconds = Seconds(0.0)


@dataclass(frozen=True, slots=True)
class Alarm:
    is_on: bool = False
    since: Instant = Instant(0.0)
    """Since when it is on, or off."""
    crossed_at: Instant | None = None
    """Since when the value has been where the alarm changes, if it is there."""

    def follow(self, value: float | None, threshold: Threshold, now: Instant) -> "Alarm":
        """None: not known, which changes nothing, and counts as neither high nor low."""
        crosses = value is not None and (value < threshold.low if self.is_on else value >= threshold.high)
        if not crosses:
            return self if self.crossed_at is None else replace(self, crossed_at=None)
        # A clock that is set back begins the wait anew.
        crossed_at = now if self.crossed_at is None else min(self.crossed_at, now)
        if now - crossed_at >= threshold.seconds:
            return Alarm(not self.is_on, now)
        return self if crossed_at == self.crossed_at else replace(self, crossed_at=crossed_at)
