"""Port to the logs of runs: which logs gateways follow now, and which parts are kept."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.domain.orders import LogName
from gpubroker_server.core.domain.units import Instant, Term
from gpubroker_server.core.lifecycle.run_logs import FollowedLogs as FollowedLogs


class LogPart(Struct, frozen=True):
    """A part of a log: `data`, or the `digest` of the object that has the bytes. An empty part says that the
    log had no more bytes at that time."""

    log: LogName
    first_byte: int
    size_bytes: int
    at: Instant
    """The time at which the agent read the part."""
    tenant: str
    data: bytes | None = None
    digest: str | None = None

    @property
    def end_byte(self) -> int:
        return self.first_byte + self.size_bytes


class LogChanges(Struct, frozen=True):
    """The changes to kept parts that one transaction makes."""

    replaced: Collection[LogName] = ()
    """The logs whose earlier parts are removed."""
    cut: Mapping[LogName, tuple[int, int]] | None = None
    """Log -> (start, end) of the bytes that are removed from it."""
    parts: Sequence[LogPart] = ()
    """The new parts. Each replaces the part at the same place."""


class LogRows(Protocol):
    """The rows of logs. Each call may raise StoreUnavailable."""

    async def follow_logs(self, followed: FollowedLogs) -> None:
        """Replace the logs that this gateway followed before."""

    async def followed_logs(self) -> Sequence[FollowedLogs]:
        """Return the logs that each gateway follows, however long ago the gateway said so."""

    async def keep_logs(self, term: Term, changes: LogChanges) -> None:
        """Write the changes. Raises StaleTerm."""

    async def log_parts(self, log: LogName, after_byte: int, limit: int) -> Sequence[LogPart]:
        """Return the next parts that have bytes after `after_byte`, in order. The first part may begin before
        it."""

    async def log_end(self, log: LogName) -> tuple[int, Instant | None]:
        """Return the end of the kept parts in bytes, and the time at which the newest part was read; 0 and
        None if there are no parts."""
