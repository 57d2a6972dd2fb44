"""Says once when tasks begin to wait because free memory is in pieces, and once when that is over."""

import structlog

from gpubroker_server.core.domain.interval import Pace
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.planning.fragmentation import scattered
from gpubroker_server.core.world.world import World

log = structlog.get_logger("gpubroker.broker")

LOOK_SECONDS = Seconds(5.0)


class FragmentationWatch:
    def __init__(self, world: World, policy: Policy) -> None:
        self._world = world
        self._policy = policy
        self._pace = Pace(LOOK_SECONDS)
        self._is_told = False

    def look(self, now: Instant) -> None:
        """After a cycle; most of the time it does nothing."""
        if not self._pace.is_due(now):
            return
        self._pace.done(now)
        found = scattered(self._world, self._policy, now)
        if found is not None and not self._is_told:
            log.warning(
                "free memory is in pieces too small for what most tasks wait for",
                waiting=found.waiting, gpus=found.demand.gpus, need_mb=found.need_mb, free_mb=found.free_mb,
                largest_mb=found.largest_mb,
            )  # fmt: skip
        elif found is None and self._is_told:
            log.info("free memory is no longer in pieces too small for what most tasks wait for")
        self._is_told = found is not None
