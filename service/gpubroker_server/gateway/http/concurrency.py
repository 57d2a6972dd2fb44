"""Answers that take long to compute: one at a time, so that other requests are not held up."""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, closing
from threading import Event
from time import monotonic
from typing import TypeVar

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.gateway.http.problems import Problem

T = TypeVar("T")


class OneAtATime:
    """A lock with a bounded queue, first come, first served."""

    def __init__(self, what: str, max_waiting: int, *, on_the_loop: bool = False) -> None:
        """`what` names the answers in a refusal: "plans". `on_the_loop`: the computation blocks the event
        loop, so the lock stays taken for as long again, and other requests get that time."""
        self._what = what
        self._max_waiting = max_waiting
        self._on_the_loop = on_the_loop
        self._waiting = 0
        self._busy = asyncio.Lock()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold the lock for one answer. Raises Problem too-many-requests if the queue is full."""
        if (self._busy.locked() or self._waiting) and self._waiting >= self._max_waiting:
            more = f" and {self._waiting} more are waiting" if self._waiting else ""
            raise Problem("too-many-requests", what=self._what, more=more)
        self._waiting += 1
        try:
            await self._busy.acquire()
        finally:
            self._waiting -= 1
        began = monotonic()
        try:
            yield
        finally:
            if self._on_the_loop:
                asyncio.get_running_loop().call_later(monotonic() - began, self._busy.release)
            else:
                self._busy.release()


async def run_in_thread(steps: Generator[None, None, T], limit_seconds: Seconds) -> T:
    """The return value of `steps`, which must share nothing mutable with the event loop.

    Raises TimeoutError after `limit_seconds`. Cancelling ends the thread after its next step.
    """
    cancelled = Event()
    try:
        return await asyncio.to_thread(_run_steps, steps, limit_seconds, cancelled)
    finally:
        cancelled.set()


def _run_steps(steps: Generator[None, None, T], limit_seconds: Seconds, cancelled: Event) -> T:
    until = monotonic() + limit_seconds
    with closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: T = end.value
                return found
            if cancelled.is_set() or monotonic() > until:
                raise TimeoutError
