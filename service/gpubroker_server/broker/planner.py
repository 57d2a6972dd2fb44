"""The planning step of a cycle: plan, commit in slices, consolidate, forecast."""

import asyncio
from collections.abc import Callable
from math import inf

import structlog

from gpubroker_server.broker.commit import COMMITTED, Committer
from gpubroker_server.core.domain.interval import Interval
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.planning.consolidation import Consolidation
from gpubroker_server.core.planning.cycle import Slice
from gpubroker_server.core.planning.forecasts.forecast_rounds import ForecastRounds
from gpubroker_server.core.planning.fragmentation import find_scattered_demand
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import Clock

log = structlog.get_logger("gpubroker.broker")

MOST_TURNS = 4
"""Turns of planning, of some milliseconds each, that share one commit. The first turn of a cycle, with the
most urgent tasks, has its own commit."""

FORECAST_SECONDS = 0.005
"""How long each cycle works on forecasts, while they are due."""

FRAGMENTATION_SECONDS = Seconds(5.0)
"""How often fragmentation is looked at."""


class Planner:
    """Of one term."""

    def __init__(
        self, world: World, policy: Policy, clock: Clock, commits: Committer, wake: Callable[[], None]
    ) -> None:
        self._world = world
        self._policy = policy
        self._clock = clock
        self._commits = commits
        self._wake = wake
        self._cache = PlanCache()
        self._consolidation = Consolidation()
        self.forecast_rounds = ForecastRounds()
        self._fragmentation_pace = Interval(FRAGMENTATION_SECONDS)
        self._is_fragmented = False

    async def plan(self, stop: Callable[[], bool]) -> None:
        """Starts, preemptions and moves of what waits; then forecasts for the rest. `stop` ends it early."""
        if self.forecast_rounds.is_outdated(self._world):
            await self._forecast(inf)
        await self._plan_slices(stop)
        await self._consolidate()
        self._log_fragmentation(self._clock.now())
        await self._forecast(FORECAST_SECONDS)

    async def _plan_slices(self, stop: Callable[[], bool]) -> None:
        cursor, turns = None, 1
        while True:
            now, forecasts = self._clock.now(), self.forecast_rounds.forecasts
            part = Slice(self._world, self._policy, now, cursor, self._cache, forecasts)
            taken = 0
            while not part.is_last and (taken < turns or part.is_searching):
                part.take_turn()
                taken += 1
                await asyncio.sleep(0)
            plan = part.plan()
            await self._commits.carry_out(self.forecast_rounds.compare(self._world, plan.decisions, now))
            cursor, turns = plan.cursor, MOST_TURNS
            if cursor is None or stop():
                return

    async def _consolidate(self) -> None:
        """Move runs for a task that the plan has left waiting, if that is allowed and helps."""
        now = self._clock.now()
        decision = self._consolidation.next_move(
            self._world, self._policy, now, self.forecast_rounds.forecasts
        )
        if decision is not None and COMMITTED in await self._commits.carry_out([decision]):
            self._consolidation.count(decision, now)

    def _log_fragmentation(self, now: Instant) -> None:
        """Log once when tasks begin to wait because free memory is in pieces, and once when that is over."""
        if not self._fragmentation_pace.is_due(now):
            return
        self._fragmentation_pace.done(now)
        found = find_scattered_demand(self._world, self._policy, now)
        if found is not None and not self._is_fragmented:
            log.warning(
                "free memory is in pieces too small for what most tasks wait for",
                waiting=found.waiting, gpus=found.demand.gpus, need_mb=found.need_mb, free_mb=found.free_mb,
                largest_mb=found.largest_mb,
            )  # fmt: skip
        elif found is None and self._is_fragmented:
            log.info("free memory is no longer in pieces too small for what most tasks wait for")
        self._is_fragmented = found is not None

    async def _forecast(self, most_seconds: float) -> None:
        """Compute when the first waiting tasks will start. What is not done in time continues in the next
        cycle, so that neither reports nor plans wait for it."""
        now, loop = self._clock.now(), asyncio.get_running_loop()
        until = loop.time() + most_seconds
        while self.forecast_rounds.step(self._world, self._policy, now):
            if loop.time() >= until:
                self._wake()
                return
            await asyncio.sleep(0)
