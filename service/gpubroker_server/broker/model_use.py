"""Asks gateways which models are in use, while an equal waits for the memory of one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.orders import Report
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle.model_turns import is_contended, turns
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import Clock

LOOK_SECONDS = Seconds(0.1)

ReadUse = Callable[[], Awaitable[frozenset[str] | None]]
"""The models that have a request at any gateway; None while that cannot be read."""


class ModelUse:
    def __init__(self, world: World, read: ReadUse, clock: Clock) -> None:
        self._world = world
        self._read = read
        self._clock = clock

    async def keep(self, hear: Callable[[Sequence[Report]], None]) -> None:
        """Until cancelled. Calls `hear` only if what is in use changes whose turn it is. Gateways have one
        interval to say that: they do so when they learn that something waits."""
        was_contended = False
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            in_use = await self._read() if was_contended else None
            if in_use is not None and turns(self._world, in_use, self._clock.now()):
                hear([ModelsInUse(in_use)])
            was_contended = is_contended(self._world)
