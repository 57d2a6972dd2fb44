"""Alarms on measured values. An alarm goes on above one threshold and goes off below a lower one."""

from gpubroker.wire.bounds import Amount
from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.setting_marks import NonNegativeSeconds, PositiveAmount
from gpubroker_server.core.domain.units import Instant, Seconds


class Threshold(Struct, frozen=True):
    high: PositiveAmount
    """The alarm goes on once the value has been at or above this for `seconds`."""
    low: Amount
    """The alarm goes off once the value has been below this for `seconds`."""
    seconds: NonNegativeSeconds = Seconds(0.0)

    def __post_init__(self) -> None:
        """Check that `low` is below `high`. Raises ValueError."""
        check_order("low", self.low, "high", self.high)


def check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raise ValueError unless `low` is below `high`. The text names both by `low_name` and `high_name`."""
    if low >= high:
        raise ValueError(f"{low_name} {low:g} is not below {high_name} {high:g}; make it smaller")


class Alarm(Struct, frozen=True):
    is_on: bool = False
    since: Instant = Instant(0.0)
    """The time since which the alarm is on, or off."""
    crossed_at: Instant | None = None
    """The time since which the value has been past the threshold at which the alarm changes; None if it is
    not."""

    def follow(self, value: float | None, threshold: Threshold, now: Instant) -> "Alarm":
        """Return the alarm after this value. None is an unknown value, which counts as neither high nor
        low."""
        has_crossed = value is not None and (value < threshold.low if self.is_on else value >= threshold.high)
        if not has_crossed:
            return self if self.crossed_at is None else replace(self, crossed_at=None)
        # A clock that is set back begins the wait anew.
        crossed_at = now if self.crossed_at is None else min(self.crossed_at, now)
        if now - crossed_at >= threshold.seconds:
            return Alarm(not self.is_on, now)
        return self if crossed_at == self.crossed_at else replace(self, crossed_at=crossed_at)
