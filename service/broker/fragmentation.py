"""Says once when tasks begin to wait because free memory is in pieces, and once when that is over."""

import structlog

from service.core.fragmentation import scattered
from service.core.pace import Pace
from service.core.policy import Policy
from service.core.units import Instant, Seconds
from service.core.world import World

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
