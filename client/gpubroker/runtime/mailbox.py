"""A journal with a reader that waits for reports, one call at a time."""

import asyncio
from collections.abc import Callable

from gpubroker.runtime.journal import START_OVER, Journal
from gpubroker.runtime.messages import Report

BATCH_BYTES = 32 * 1024 * 1024


class Mailbox:
    """A journal whose reader waits for reports. It belongs to the event loop in which it is made. Any thread
    may write to its journal."""

    def __init__(self) -> None:
        self.journal = Journal(self._wake)
        self._loop = asyncio.get_running_loop()
        self._ripe = False
        self._reader: asyncio.Future[bool] | None = None

    async def read(
        self, acknowledged: int, *, may_come: Callable[[], bool], timeout_seconds: float | None = None
    ) -> list[tuple[int, Report]]:
        """Wait for reports and return them. Return no reports if a later read replaces this one, if the time
        is up, or if no more reports can come."""
        self.close()
        self._ripe |= acknowledged == START_OVER
        while True:
            coming = may_come()
            if self._ripe or not coming:
                taken = self.journal.take(acknowledged, BATCH_BYTES)
                self._ripe = self.journal.has_more()
                if taken or not coming:
                    return taken
            if not await self._woken(timeout_seconds):
                return []

    async def _woken(self, timeout_seconds: float | None) -> bool:
        reader = self._reader = self._loop.create_future()
        timer = None
        if timeout_seconds is not None:
            timer = self._loop.call_later(timeout_seconds, _resolve, reader, False)
        try:
            go_on: bool = await reader
            return go_on
        finally:
            if timer is not None:
                timer.cancel()
            if self._reader is reader:
                self._reader = None

    def _wake(self, delay_seconds: float) -> None:
        self._loop.call_soon_threadsafe(self._ripen, delay_seconds)

    def _ripen(self, delay_seconds: float) -> None:
        if delay_seconds > 0:
            self._loop.call_later(delay_seconds, self._ripen, 0)
            return
        self._ripe = True
        if self._reader is not None:
            _resolve(self._reader, True)

    def close(self) -> None:
        """End a read that is waiting."""
        if self._reader is not None:
            _resolve(self._reader, False)
            self._reader = None


def _resolve(reader: "asyncio.Future[bool]", go_on: bool) -> None:
    if not reader.done():
        reader.set_result(go_on)
