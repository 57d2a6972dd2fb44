"""Models for which inferences wait are asked for again, where nobody has them or waits for them any more."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import structlog

from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.planning.inference_admission import waiting
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.residency.residencies import Residencies
from gpubroker_server.gateway.proxy.residency.residency import UnknownModel
from gpubroker_server.ports.store import StoreUnavailable

log = structlog.get_logger("gpubroker.tasks.task")

LOOK_SECONDS = Seconds(1.0)
AGAIN_SECONDS = Seconds(60.0)
MOST_AGAIN_SECONDS = Seconds(3600.0)
"""A model that was asked for and is nowhere again, because its load failed or somebody unloaded it, is asked
for so much later; twice as much each time that it was not there meanwhile, up to the other."""


@dataclass(slots=True)
class _Asked:
    at: Instant
    again_seconds: float = AGAIN_SECONDS


class Bringing:
    """While a model has a holder, the leader keeps it wanted; to make one is for gateways, which insert."""

    def __init__(self, residencies: Residencies) -> None:
        self._parts = residencies.parts
        self._residencies = residencies
        self._asked: dict[str, _Asked] = {}

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(StoreUnavailable):
                await self.look()

    async def look(self) -> None:
        """Once. Raises StoreUnavailable."""
        now = self._parts.clock.now()
        found = waiting(self._parts.world)
        self._asked = {model: asked for model, asked in self._asked.items() if model in found}
        for model, groups in found.items():
            asked = self._asked.get(model)
            if self._residencies.holding(model):
                if asked is not None and self._residencies.have(model):
                    asked.again_seconds = AGAIN_SECONDS
                continue
            if asked is None:
                self._asked[model] = _Asked(now)
            elif now - asked.at < asked.again_seconds:
                continue
            else:
                asked.at, asked.again_seconds = now, min(2 * asked.again_seconds, MOST_AGAIN_SECONDS)
            try:
                urgency = max(group.standing for group in groups)
                await self._residencies.want(model, urgency, queued=True)
            except (Problem, UnknownModel) as refused:
                log.warning(
                    "a model for which inferences wait cannot be had now", model=model, fault=str(refused)
                )
