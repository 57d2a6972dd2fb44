"""Looks whether the processes of servers are gone that left models in quarantine: a server that is no
longer in the settings is not asked."""

import asyncio
from collections.abc import Callable, Sequence

from gpubroker_server.core.domain.model_orders import ServerGone
from gpubroker_server.core.domain.orders import Report
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle.model_adoption import left_processes
from gpubroker_server.core.world.world import World

LOOK_SECONDS = Seconds(2.0)


class LeftServers:
    def __init__(self, world: World, is_gone: Callable[[str], bool]) -> None:
        """`is_gone`: whether this machine knows that the process has ended."""
        self._world = world
        self._is_gone = is_gone

    async def keep(self, hear: Callable[[Sequence[Report]], None]) -> None:
        """Until cancelled."""
        while True:
            gone = [process for process in sorted(left_processes(self._world)) if self._is_gone(process)]
            hear([ServerGone(process) for process in gone])
            await asyncio.sleep(LOOK_SECONDS)
