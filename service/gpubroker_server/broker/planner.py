"""The planning step of a cycle: plan, commit in slices, consolidate, forecast."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from gpubroker_server.broker.commit import COMMITTED, Committer
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.planning.consolidation import Consolidation
from gpubroker_server.core.planning.cycle import Slice, has_nothing_to_plan
from gpubroker_server.core.planning.forecasts.forecast_rounds import ForecastRounds
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import Clock

MAX_TURNS = 4
"""The number of planning turns, of some milliseconds each, that share one commit. The first turn of a cycle,
with the most urgent tasks, has its own commit."""

FORECAST_SECONDS = 0.005
"""The time that each cycle spends on forecasts while some are due."""


@dataclass(eq=False)
class Planner:
    """Plans the cycles of one term."""

    world: World
    policy: Policy
    clock: Clock
    commits: Committer
    wake: Callable[[], None]

    def __post_init__(self) -> None:
        self._cache = PlanCache()
        self._consolidation = Consolidation()
        self.forecast_rounds = ForecastRounds()

    async def plan(self, stop: Callable[[], bool]) -> None:
        """Plan starts, preemptions and moves for the waiting tasks, then forecasts for those that stay
        waiting. The planning ends early once `stop` returns True."""
        if self.forecast_rounds.is_outdated(self.world):
            await self._forecast(inf)
        await self._plan_slices(stop)
        await self._consolidate()
        await self._forecast(FORECAST_SECONDS)

    async def _plan_slices(self, stop: Callable[[], bool]) -> None:
        if has_nothing_to_plan(self.world):
            return
        cursor, turns = None, 1
        while True:
            now, forecasts = self.clock.now(), self.forecast_rounds.forecasts
            part = Slice(self.world, self.policy, now, cursor, self._cache, forecasts)
            taken = 0
            while not part.is_last and (taken < turns or part.is_searching):
                part.take_turn()
                taken += 1
                await asyncio.sleep(0)
            plan = part.plan()
            await self.commits.carry_out(self.forecast_rounds.compare(self.world, plan.decisions, now))
            cursor, turns = plan.cursor, MAX_TURNS
            if cursor is None or stop():
                return

    async def _consolidate(self) -> None:
        """Move runs to make room for a task that the plan has left waiting, if the policy allows it."""
        now = self.clock.now()
        decision = self._consolidation.next_move(self.world, self.policy, now, self.forecast_rounds.forecasts)
        if decision is not None and COMMITTED in await self.commits.carry_out([decision]):
            self._consolidation.count(decision, now)

    async def _forecast(self, most_seconds: float) -> None:
        """Compute when the first waiting tasks will start. The computation is split over several cycles, so
        that neither reports nor plans wait for it."""
        now, loop = self.clock.now(), asyncio.get_running_loop()
        until = loop.time() + most_seconds
        while self.forecast_rounds.step(self.world, self.policy, now):
            if loop.time() >= until:
                self.wake()
                return
            await asyncio.sleep(0)
