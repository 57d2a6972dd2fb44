"""A gateway drains models that are to leave: it reports when none of its requests to one is unanswered."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.last_values import PRESENT_SECONDS, Presence, PresenceStore, claim_name
from gpubroker_server.ports.store import Clock, StoreUnavailable

_REPORT_SECONDS: Final = Seconds(PRESENT_SECONDS / 5)
"""How often the gateway reports that it is present."""

_CHECK_SECONDS: Final = Seconds(0.05)
"""How often it checks whether the last answer has come, while there is one to wait for."""


class Draining:
    def __init__(
        self, world: World, has_older: Callable[[str, float], bool], now: Callable[[], float]
    ) -> None:
        """`has_older`: whether a request to a model is unanswered that was sent by then, by the clock
        `now`."""
        self._world = world
        self._has_older = has_older
        self._now = now
        self._leaving_since: dict[str, float] = {}
        """By claim, when it became known here that it is to leave: later requests go elsewhere."""
        self._woken = asyncio.Event()

    def drained(self) -> frozenset[str]:
        """The claims of models that are to leave and have no request of this gateway left."""
        leaving = {
            claim_name(task.id, task.fence): task.model.model
            for task in self._world.models.live()
            if task.state is TaskState.STOPPING and task.model is not None
        }
        since = {claim: self._leaving_since.get(claim, self._now()) for claim in leaving}
        self._leaving_since = since
        return frozenset(
            claim for claim, model in leaving.items() if not self._has_older(model, since[claim])
        )

    def on_events(self, events: Sequence[Event]) -> None:
        """Report at once; the World must have applied the events before."""
        if any(event.kind == "task.stopping" for event in events):
            self._woken.set()

    async def report(self, store: PresenceStore, name: str, at: Instant) -> frozenset[str]:
        """Raises StoreUnavailable."""
        claims = self.drained()
        await store.present(Presence(name, at, claims))
        return claims

    async def keep_reporting(self, store: PresenceStore, name: str, clock: Clock) -> None:
        """Until cancelled. A report that fails is made the next time."""
        reported: frozenset[str] = frozenset()
        reported_at = Instant(0.0)
        while True:
            if self.drained() != reported or clock.now() >= reported_at + _REPORT_SECONDS:
                at = clock.now()
                with suppress(StoreUnavailable):
                    reported, reported_at = await self.report(store, name, at), at
            self._woken.clear()
            is_waiting = len(self._leaving_since) > len(reported)
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS if is_waiting else _REPORT_SECONDS):
                    await self._woken.wait()
