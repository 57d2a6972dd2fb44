"""The growth of the database's write-ahead log. The log grows while something keeps it from being written
back."""

from msgspec import Struct

from gpubroker_server.core.domain.units import Instant, Seconds

LARGE_BYTES = 256 * 2**20
GROWN_BYTES, GROWN_SECONDS = 64 * 2**20, Seconds(600.0)
"""A log that has grown by at least GROWN_BYTES, for at least GROWN_SECONDS, without being shortened is a
finding."""


class LogGrowth(Struct, frozen=True):
    size_bytes: int
    grown_bytes: int
    """The bytes by which the log has grown since `since`."""
    since: Instant
    """The time at which the log was last shortened, or first looked at."""

    def is_too_much(self, now: Instant) -> bool:
        has_grown = self.grown_bytes >= GROWN_BYTES and now - self.since >= GROWN_SECONDS
        return self.size_bytes >= LARGE_BYTES or has_grown


class LogWatch:
    """The growth of the log as one process has seen it."""

    def __init__(self) -> None:
        self.seen: LogGrowth | None = None
        """The growth as of the last look; None before the first look."""

    def look(self, size_bytes: int, now: Instant) -> None:
        last_growth = self.seen
        if last_growth is None or size_bytes < last_growth.size_bytes:
            self.seen = LogGrowth(size_bytes, 0, now)
        elif size_bytes > last_growth.size_bytes:
            grown_bytes = last_growth.grown_bytes + size_bytes - last_growth.size_bytes
            self.seen = LogGrowth(size_bytes, grown_bytes, last_growth.since)
