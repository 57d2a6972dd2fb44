"""Tells the leader which logs are being read at this gateway."""

import asyncio

from gpubroker_server.core.domain.orders import LogName
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.lifecycle.run_logs import FOLLOWED_SECONDS, FollowedLogs
from gpubroker_server.ports.run_logs import LogRows
from gpubroker_server.ports.store import Clock, StoreUnavailable

LOOK_SECONDS = 0.2
"""The shortest pause of a reader before it looks again for new parts of a log."""
LOOKS_PER_SECOND = 200
"""The number of looks per second of all readers together. With many readers, each reader looks less often."""
REPEAT_SECONDS = 1.0


class LogReaders:
    """The logs that are being read at this gateway. A row in the store names them to the leader."""

    def __init__(self, gateway: str, store: LogRows, clock: Clock) -> None:
        self._gateway = gateway
        self._store = store
        self._clock = clock
        self._since: dict[LogName, Instant] = {}
        self._looked_at: dict[LogName, Instant] = {}
        self._told = False
        """True if the row in the store names any log."""

    async def look(self, log: LogName, since: Instant) -> None:
        """Note that a reader, which began at `since`, looks for more of a log. Call it at each look. Raises
        StoreUnavailable."""
        is_new = self._since.get(log, Instant(0.0)) < since
        self._looked_at[log] = self._clock.now()
        if is_new:
            self._since[log] = since
            await self.tell()

    def seconds_between_looks(self) -> float:
        return max(LOOK_SECONDS, len(self._since) / LOOKS_PER_SECOND)

    async def keep(self) -> None:
        """Tell the leader every `REPEAT_SECONDS` which logs are read, until cancelled."""
        while True:
            await asyncio.sleep(REPEAT_SECONDS)
            if self._since or self._told:
                try:
                    await self.tell()
                except StoreUnavailable:
                    continue

    async def tell(self) -> None:
        """Tell the leader which logs are read. Logs at which no reader has looked lately are dropped first.
        Raises StoreUnavailable."""
        now = self._clock.now()
        for log in [log for log, looked_at in self._looked_at.items() if looked_at < now - FOLLOWED_SECONDS]:
            del self._looked_at[log], self._since[log]
        await self._store.follow_logs(FollowedLogs(self._gateway, now, dict(self._since)))
        self._told = bool(self._since)
