"""What servers of models have in memory though nobody has asked for it here, and what they take themselves:
both are entered, so that they are counted as theirs."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.residency.residencies import Residencies
from gpubroker_server.gateway.proxy.residency.residency import Residency, UnknownModel
from gpubroker_server.ports.models import Stage
from gpubroker_server.ports.store import StoreUnavailable

log = structlog.get_logger("gpubroker.tasks.task")

LOOK_SECONDS: Final = 10.0


class Adopting:
    def __init__(self, residencies: Residencies) -> None:
        self._residencies = residencies
        self._seen: dict[str, frozenset[str]] = {}
        """By server, what was in memory and had no holder at the last look."""

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        for residency in self._residencies:
            await self._look(residency)

    async def _look(self, residency: Residency) -> None:
        server = residency.rules.name
        with _told(server):
            await residency.hold_base()
            found = await _strays(residency)
            stay = sorted(found & self._seen.get(server, frozenset()))
            self._seen[server] = found
            steps: set[str] = set()
            for model in stay:
                with _told(server, model):
                    steps.update(await residency.steps_of(model))
            for model in stay:
                if model not in steps and residency.of(model) is None:  # nobody has asked for it meanwhile
                    with _told(server, model):
                        await residency.adopt(model)


@contextmanager
def _told(server: str, model: str = "") -> Iterator[None]:
    """What cannot be entered now keeps nothing else out, and is tried again."""
    try:
        yield
    except (Problem, UnknownModel, StoreUnavailable) as fault:
        log.warning(
            "what a model server has is not entered; trying again",
            server=server,
            model=model,
            fault=str(fault),
        )


async def _strays(residency: Residency) -> frozenset[str]:
    """In memory, held by nobody, and no step of an ensemble that somebody holds. What is just leaving had its
    holder when the index was asked for, and one look more tells."""
    held = {task.model.model for task in residency.holders() if task.model is not None}
    held |= {step for task in residency.holders() if task.model is not None for step in task.model.steps}
    index = await residency.repository() or {}
    return frozenset(name for name, one in index.items() if one.stage is Stage.READY and name not in held)
