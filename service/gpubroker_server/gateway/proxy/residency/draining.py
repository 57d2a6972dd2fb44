"""A gateway lets go of a model that is to leave: it says so when nothing that it sent there is under way."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.last_values import PRESENT_SECONDS, Presence, PresenceStore, claim_name
from gpubroker_server.ports.store import Clock, StoreUnavailable

log = structlog.get_logger("gpubroker.tasks.task")

SAY_SECONDS: Final = Seconds(PRESENT_SECONDS / 5)
"""So often it says that it is there."""

LOOK_SECONDS: Final = Seconds(0.05)
"""And so often it looks whether the last answer has come, while one is waited for."""


class LettingGo:
    def __init__(
        self, world: World, has_older: Callable[[str, float], bool], now: Callable[[], float]
    ) -> None:
        """`has_older`: whether a request to a model is under way that was sent before, by the clock `now`."""
        self._world = world
        self._has_older = has_older
        self._now = now
        self._heard: dict[str, float] = {}
        """Since when it is known of each that it is to leave: later requests are not for it."""
        self._woken = asyncio.Event()

    def claims(self) -> frozenset[str]:
        """Of which it has let go by now."""
        leaving = {
            claim_name(task.id, task.fence): task.model.model
            for task in self._world.homes.live()
            if task.state is TaskState.STOPPING and task.model is not None
        }
        self._heard = {claim: self._heard.get(claim, self._now()) for claim in leaving}
        return frozenset(
            claim for claim, model in leaving.items() if not self._has_older(model, self._heard[claim])
        )

    def on_events(self, events: Sequence[Event]) -> None:
        """Say at once that one is let go of; the World must have heard of them before."""
        if any(event.kind == "task.stopping" for event in events):
            self._woken.set()

    async def say(self, store: PresenceStore, name: str, at: Instant) -> frozenset[str]:
        """Raises StoreUnavailable."""
        claims = self.claims()
        await store.present(Presence(name, at, claims))
        return claims

    async def keep_saying(self, store: PresenceStore, name: str, clock: Clock) -> None:
        """Until cancelled. What cannot be said now is said the next time."""
        said: frozenset[str] = frozenset()
        said_at = Instant(0.0)
        while True:
            if self.claims() != said or clock.now() >= said_at + SAY_SECONDS:
                at = clock.now()
                with suppress(StoreUnavailable):
                    said, said_at = await self.say(store, name, at), at
            self._woken.clear()
            is_waiting = len(self._heard) > len(said)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS if is_waiting else SAY_SECONDS):
                    await self._woken.wait()
