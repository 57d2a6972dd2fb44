"""What a process knows of whoever leads: its own broker, or the last words of a leader elsewhere."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap.broker_role import BrokerRole
from gpubroker_server.bootstrap.follower import Job, Picture, word_seconds
from gpubroker_server.broker.observe import forget_ended
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.planning.forecasts.accuracy import EVERY_SECONDS, Foresight
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.store import StoreUnavailable

SILENT_SECONDS = 5.0
"""A leader that has said nothing for so long is none that one can count on."""

REST = 2.0
"""Forecasts are worked out in steps, with a rest so many times as long after each: answers go first."""


class Lead:
    """Where others may lead, it takes in their samples and progress while this process does not."""

    def __init__(self, store: SqlStore, picture: Picture, policy: Policy, broker: BrokerRole | None) -> None:
        self._store = store
        self._picture = picture
        self._policy = policy
        self._broker = broker
        self._word: LeaderSeen | None = None
        self._heard = 0
        self._foresight = Foresight()
        picture.listen(partial(forget_ended, picture.progress))

    async def begin(self) -> None:
        """Raises StartRefused if whoever leads does it with another Ray than this process would."""
        if self._broker is not None and self._store.is_shared:
            _, values = await self._store.published(0)
            await self._broker.check_ray(values.leader)

    def jobs(self) -> list[Job]:
        if not self._store.is_shared:
            return []
        every_seconds = word_seconds(self._policy)
        return [("last values", self._keep_hearing(every_seconds)), ("forecasts", self._keep_foreseeing())]

    def leader(self) -> LeaderSeen | None:
        """None if nobody is known to lead."""
        if (here := self._here()) is not None and (term := here.term()) is not None:
            return here.seen(term)
        word = self._word
        if word is None or self._picture.clock.now() - word.at > SILENT_SECONDS:
            return None
        return word

    def executor_status(self) -> Mapping[str, Any]:
        """Of the executor that works: that of whoever leads, else the one in this process."""
        leader = self.leader()
        if leader is not None:
            return leader.executor
        if self._broker is not None:
            return self._broker.executor.status()
        return {"state": "unknown", "address": "", "message": "nobody leads"}

    def paused(self) -> PausedDetection | None:
        leader = self.leader()
        return None if leader is None else leader.paused

    def forecasts(self) -> Sequence[Forecast]:
        """Everybody makes them of the same picture by the same rules."""
        here = self._here()
        return self._foresight.forecasts if here is None else here.forecasts()

    def forget(self) -> None:
        """The picture was read anew: what was heard of samples is no longer in it."""
        self._heard = 0

    def _here(self) -> BrokerRole | None:
        """The broker of this process, while it leads or nobody else could."""
        broker = self._broker
        return None if broker is None or (self._store.is_shared and broker.term() is None) else broker

    async def _keep_hearing(self, every_seconds: Seconds) -> None:
        while True:
            if self._here() is None:
                with suppress(StoreUnavailable):  # the picture grows old, and says so
                    await self._hear()
            await asyncio.sleep(every_seconds)

    async def _hear(self) -> None:
        self._heard, values = await self._store.published(self._heard)
        world = self._picture.world
        world.measure(values.samples)
        self._word = values.leader or self._word
        if self._broker is not None:
            await self._broker.check_ray(values.leader)
        for task, progress in values.progress.items():
            row = world.tasks.get(task)
            if row is not None and row.is_active:
                self._picture.progress[task] = progress

    async def _keep_foreseeing(self) -> None:
        world, clock = self._picture.world, self._picture.clock
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            while self._here() is None:
                began = time.monotonic()
                if not self._foresight.go_on(world, self._policy, clock.now()):
                    break
                await asyncio.sleep(REST * (time.monotonic() - began))
