"""Answers of any length that break off: how often in a row, and how long to wait before the next call."""

import time

from gpubroker.errors import BrokerError, Unreachable
from gpubroker.transport.exchange import LONGEST_PAUSE_SECONDS, Pause, Steps, pause_seconds


class Breaks:
    """Counts the answers that broke off at once. Reading is given up after `retry_seconds` of them."""

    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self._called_at = 0.0
        self._count, self._give_up_at = 0, 0.0

    def note_call(self) -> None:
        self._called_at = time.monotonic()

    def note_end(self, *, is_broken: bool, has_news: bool) -> None:
        """Record the end of an answer. A call that stayed open for long without news may have been ended by a
        proxy, and does not count."""
        now = time.monotonic()
        if not is_broken or has_news or now - self._called_at >= LONGEST_PAUSE_SECONDS:
            self._count = 0
            return
        if self._count == 0:
            self._give_up_at = now + self._retry_seconds
        self._count += 1

    def pause(self, what: str, fault: BrokerError | None = None) -> Steps[None]:
        """Wait before the next call if answers broke off. Raises `fault`, or Unreachable with a text about
        `what`, if they did for `retry_seconds`."""
        if not self._count:
            return
        pause = pause_seconds(self._count - 1)
        pause = max(pause, 0.0 if fault is None else fault.retry_after_seconds or 0.0)
        if time.monotonic() + pause > self._give_up_at:
            raise fault or Unreachable(
                f"{what}: each answer has broken off there for {self._retry_seconds:g} s; the service's own "
                "log says why"
            )
        yield Pause(pause)
