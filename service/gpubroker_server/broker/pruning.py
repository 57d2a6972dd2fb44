"""What is over is taken out by the leader, a little at a time."""

import asyncio
from collections.abc import Callable

import structlog

from gpubroker_server.core.domain.policy import Retention
from gpubroker_server.core.domain.units import Position, Seconds, Term
from gpubroker_server.ports.store import Clock, StaleTerm, StoreUnavailable, TaskStore

log = structlog.get_logger("gpubroker.retention")

PAUSE_SECONDS = Seconds(0.1)
"""Between two steps, each of which holds up other writes for some milliseconds."""


class Pruner:
    def __init__(
        self,
        store: TaskStore,
        clock: Clock,
        retention: Retention,
        term: Callable[[], Term | None],
        heard: Callable[[], Position],
    ) -> None:
        """`term`: of this process, while it leads; `heard`: how far its picture has come in the log."""
        self._store = store
        self._clock = clock
        self._retention = retention
        self._term = term
        self._heard = heard

    async def keep(self, every_seconds: Seconds = Seconds(60.0)) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                await self.prune()
            except StaleTerm:
                continue  # whoever leads now sees to it
            except StoreUnavailable as fault:
                log.warning("what is over stays for now", fault=str(fault))

    async def prune(self) -> None:
        """All that is over by now. Raises StaleTerm, StoreUnavailable."""
        while (term := self._term()) is not None:
            cutoffs = self._retention.cutoffs(self._clock.now(), self._heard())
            if not await self._store.prune(term, cutoffs):
                return
            await asyncio.sleep(PAUSE_SECONDS)
