"""Work that is due at regular intervals."""

from math import inf

from gpubroker_server.core.domain.units import Instant, Seconds


class Interval:
    """Says when regular work is due. A clock that is set back does not delay the work."""

    def __init__(self, every_seconds: Seconds) -> None:
        self._every_seconds = every_seconds
        self._done_at = Instant(-inf)

    def is_due(self, now: Instant) -> bool:
        return not 0 <= now - self._done_at < self._every_seconds

    def done(self, now: Instant) -> None:
        self._done_at = now
