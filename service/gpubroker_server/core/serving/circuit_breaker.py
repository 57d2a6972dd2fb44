"""The circuit breaker of a model server. It opens after several failures in a row, and closes at an answer.
`now` is on any clock that never jumps."""

from typing import NamedTuple

from gpubroker_server.core.domain.units import MonotonicSeconds, Seconds


class BreakerRules(NamedTuple):
    faults: int = 3
    """The number of faults in a row, with no answer in between, at which the breaker opens. Requests then go
    to other servers, if there are any."""
    pause_seconds: Seconds = Seconds(1.0)
    """The shortest time for which the breaker stays open. An earlier answer belongs to a request from before
    the faults."""
    most_pause_seconds: Seconds = Seconds(30.0)
    """The longest pause. The pause doubles up to this time for a server that answers and fails in turn."""
    calm_seconds: Seconds = Seconds(60.0)
    """The time after closing from which the next pause is short again."""


class Breaker:
    """A breaker that is closed until `faults` come in a row, then open until the first answer after its
    pause."""

    __slots__ = ("_changed_at", "_faults", "_pause_seconds", "_rules", "fault", "is_open")

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self.is_open = False
        self.fault = ""
        """The last fault, in words; empty after an answer."""
        self._rules = rules or BreakerRules()
        self._faults = 0
        """The number of faults since the last answer."""
        self._changed_at = MonotonicSeconds(float("-inf"))
        self._pause_seconds = Seconds(0.0)

    def open_seconds(self, now: MonotonicSeconds) -> Seconds:
        """Return for how long the breaker has been open; 0 if it is closed."""
        return Seconds(now - self._changed_at if self.is_open else 0.0)

    def failed(self, now: MonotonicSeconds, why: str) -> bool:
        """Count a fault. Return True if this fault has opened the breaker."""
        self._faults += 1
        self.fault = why
        if self.is_open or self._faults < self._rules.faults:
            return False
        self._pause_seconds = self._next_pause(now)
        self._changed_at = now
        self.is_open = True
        return True

    def answered(self, now: MonotonicSeconds) -> bool:
        """Note an answer. Return True if this answer has closed the breaker."""
        if self.is_open and now < self._changed_at + self._pause_seconds:
            return False
        was_open = self.is_open
        self._faults = 0
        self.fault = ""
        self.is_open = False
        if was_open:
            self._changed_at = now
        return was_open

    def _next_pause(self, now: MonotonicSeconds) -> Seconds:
        rules = self._rules
        is_calm = now >= self._changed_at + rules.calm_seconds
        longer = max(rules.pause_seconds, 2 * self._pause_seconds)
        return rules.pause_seconds if is_calm else Seconds(min(rules.most_pause_seconds, longer))
