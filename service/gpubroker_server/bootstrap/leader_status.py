"""The leader as a process knows it, from its own broker or from the last values that another leader
published."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap.broker_role import BrokerRole
from gpubroker_server.bootstrap.follower import Job, LogFollower, publish_seconds
from gpubroker_server.broker.observe import forget_ended
from gpubroker_server.core.control.fleet import FleetSeen, background_room
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.planning.forecasts.forecast_rounds import EVERY_SECONDS, ForecastRounds
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.ports.last_values import LastValues, LeaderSeen
from gpubroker_server.ports.store import LineageChanged, LogShortened, StoreUnavailable

SILENT_SECONDS = 5.0
"""The time without a publication after which a leader is not known any more."""

PAUSE_FACTOR = 2.0
"""The pause after each step of forecasting, as a multiple of the step's duration. It lets requests go
first."""


class LeaderStatus:
    """Applies samples and progress that another leader publishes, while this process does not lead."""

    def __init__(
        self, store: SqlStore, follower: LogFollower, policy: Policy, broker: BrokerRole | None
    ) -> None:
        self._store = store
        self._follower = follower
        self._policy = policy
        self._broker = broker
        self._published: LeaderSeen | None = None
        self._idle: tuple[Idle, ...] = ()
        self._heard = 0
        self._forecast_rounds = ForecastRounds()
        follower.listen(partial(forget_ended, follower.progress))
        follower.on_reread.append(self._on_reread)

    async def begin(self) -> None:
        """Read the leader's first values. Raises StartRefused if the leader uses another Ray than this
        process would."""
        if self._broker is not None:
            _, values = await self._store.published(0)
            if self._store.is_shared:
                await self._broker.check_ray(values.leader)
            self._note(values)

    def jobs(self) -> list[Job]:
        if not self._store.is_shared:
            return []
        every_seconds = publish_seconds(self._policy)
        return [("last values", self._keep_reading(every_seconds)), ("forecasts", self._keep_forecasting())]

    def leader(self) -> LeaderSeen | None:
        """Return the leader; None if none is known."""
        if (leader := self._here()) is not None:
            return None if (term := leader.term()) is None else leader.seen(term)
        last = self._published
        if last is None or self._follower.clock.now() - last.at > SILENT_SECONDS:
            return None
        return last

    def last_fleet(self) -> FleetSeen | None:
        """Return the state of the fleet as the present or the last leader sees it; None if it is unknown."""
        if self._broker is not None:
            return self._broker.last_fleet()
        return None if self._published is None else self._published.fleet

    def executor_status(self) -> Mapping[str, Any]:
        """Return the status of the leader's executor, or of this process's executor if no leader is known."""
        leader = self.leader()
        if leader is not None:
            return leader.executor
        if self._broker is not None:
            return self._broker.executor.status()
        return {"state": "unknown", "address": "", "message": "there is no leader"}

    def paused(self) -> PausedDetection | None:
        """Return the silent nodes that the leader does not give up, and the reason. Nothing else of a leader
        in this process is read, because its whole status grows with the number of nodes."""
        if (leader := self._here()) is not None and leader.term() is not None:
            return leader.paused()
        seen = self.leader()
        return None if seen is None else seen.paused

    def forecasts(self) -> Sequence[Forecast]:
        """Return the forecasts of starts. Each process computes them from its World."""
        leader = self._here()
        return self._forecast_rounds.forecasts if leader is None else leader.forecasts()

    def _on_reread(self, _fault: LogShortened | LineageChanged) -> None:
        """Read all last values again. The World was read again without samples, and in a database that lost
        commits, the numbers of publications went back too."""
        self._heard = 0

    def _here(self) -> BrokerRole | None:
        """Return the broker of this process while it leads or no other process can lead; None otherwise."""
        broker = self._broker
        return None if broker is None or (self._store.is_shared and broker.term() is None) else broker

    async def _keep_reading(self, every_seconds: Seconds) -> None:
        while True:
            if self._here() is None:
                with suppress(StoreUnavailable):  # the age of the World shows it
                    await self._read()
            await asyncio.sleep(every_seconds)

    async def _read(self) -> None:
        self._heard, values = await self._store.published(self._heard)
        world = self._follower.world
        world.measure(values.samples, values.nodes)
        self._note(values)
        if values.leader is not None and (fleet := values.leader.fleet) is not None:
            room = background_room(world, self._policy, fleet.background_mb)
            world.control(room, fleet.full_disks, fleet.stream_weights)
        if self._broker is not None:
            await self._broker.check_ray(values.leader)
        for task, progress in values.progress.items():
            row = world.tasks.get(task)
            if row is not None and row.is_active:
                self._follower.progress[task] = progress

    def _note(self, values: LastValues) -> None:
        self._idle = self._idle if values.idle is None else tuple(values.idle)
        if (leader := values.leader) is not None:
            fleet = None if leader.fleet is None else replace(leader.fleet, idle=self._idle)
            self._published = replace(leader, fleet=fleet)
            if self._broker is not None:
                self._broker.last_fleet = lambda: fleet

    async def _keep_forecasting(self) -> None:
        world, clock = self._follower.world, self._follower.clock
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            while self._here() is None:
                began = time.monotonic()
                if not self._forecast_rounds.step(world, self._policy, clock.now()):
                    break
                await asyncio.sleep(PAUSE_FACTOR * (time.monotonic() - began))
