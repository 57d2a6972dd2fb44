"""Holders that a gateway makes without a request of a client: for models that are in memory without one, and
for models that queued inferences wait for."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import structlog

from gpubroker_server.core.domain.task import model_of
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.planning.inferences import waiting
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.residency import Residency
from gpubroker_server.inference.server_choice import Residencies
from gpubroker_server.ports.model_servers import UnknownModel
from gpubroker_server.ports.models import ModelState
from gpubroker_server.ports.store import StoreUnavailable

log = structlog.get_logger("gpubroker.tasks.task")

_ADOPT_SECONDS: Final = 10.0
_QUEUE_SECONDS: Final = 1.0

AGAIN_SECONDS: Final = Seconds(60.0)
MAX_AGAIN_SECONDS: Final = Seconds(3600.0)
"""Bounds of the backoff for models of queued inferences. A model that was brought for queued inferences and
is gone again, because its load failed or it was unloaded, is brought again after AGAIN_SECONDS. The time
doubles with each try in which the model was not in memory, up to MAX_AGAIN_SECONDS."""


class Adoption:
    """Gives holders to models that are in memory without one, and to the servers' base costs, so that their
    memory is counted in the ledger."""

    def __init__(self, residencies: Residencies) -> None:
        self._residencies = residencies
        self._seen: dict[str, frozenset[str]] = {}
        """Server -> the models that had no holder at the last check."""
        self._followed: set[str] = set()
        """Servers whose holders have been compared with the settings since this process started."""

    async def keep(self) -> None:
        """Check at regular intervals until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(_ADOPT_SECONDS)

    async def check(self) -> None:
        for residency in self._residencies:
            await self._check(residency)

    async def _check(self, residency: Residency) -> None:
        server = residency.rules.name
        with _logged(server):
            if server not in self._followed:
                await residency.follow_settings()
                self._followed.add(server)
            await residency.hold_base()
            without_holder = await _without_holder(residency)
            # A model that was just leaving when the index was read is gone at the next check, so only a model
            # that two checks in a row have found is adopted.
            to_adopt = sorted(without_holder & self._seen.get(server, frozenset()))
            self._seen[server] = without_holder
            steps: set[str] = set()
            for model in to_adopt:
                with _logged(server, model):
                    steps.update(await residency.steps_of(model))
            for model in to_adopt:
                # A request may have made a holder since the check began.
                if model not in steps and residency.of(model) is None:
                    with _logged(server, model):
                        await residency.adopt(model)


@contextmanager
def _logged(server: str, model: str = "") -> Iterator[None]:
    """Log a failure instead of raising it. The failure concerns this server or model alone, and the next
    check tries again."""
    try:
        yield
    except (Problem, UnknownModel, StoreUnavailable) as fault:
        log.warning(
            "what a model server has is not entered; trying again",
            server=server,
            model=model,
            fault=str(fault),
        )


async def _without_holder(residency: Residency) -> frozenset[str]:
    """Return the models that are in memory, have no holder and are no step of an ensemble that has one."""
    models = [model_of(task) for task in residency.holders()]
    held = {model.model for model in models} | {step for model in models for step in model.steps}
    index = await residency.repository() or {}
    return frozenset(
        name for name, indexed in index.items() if indexed.stage is ModelState.READY and name not in held
    )


@dataclass(slots=True)
class _Brought:
    at: Instant
    """The time of the last try."""
    again_seconds: float = AGAIN_SECONDS
    """The backoff before the next try."""


class QueuedModels:
    """Makes holders for models that queued inferences wait for, because only gateways make tasks. While a
    model has a holder, the leader keeps the model wanted."""

    def __init__(self, residencies: Residencies) -> None:
        self._residencies = residencies
        self._brought: dict[str, _Brought] = {}

    async def keep(self) -> None:
        """Check at regular intervals until cancelled."""
        while True:
            await asyncio.sleep(_QUEUE_SECONDS)
            with suppress(StoreUnavailable):
                await self.check()

    async def check(self) -> None:
        """Ask for the models for which queued inferences wait. Raises StoreUnavailable."""
        parts = self._residencies.parts
        now, groups_by_model = parts.clock.now(), waiting(parts.world)
        self._brought = {
            model: brought for model, brought in self._brought.items() if model in groups_by_model
        }
        for model, groups in groups_by_model.items():
            brought = self._brought.get(model)
            waits = bool(self._residencies.holding(model))
            if waits:
                # A model that got into memory has shown that it can be loaded: the backoff starts anew.
                if brought is not None and self._residencies.have(model):
                    brought.again_seconds = AGAIN_SECONDS
                if not self._residencies.may_move(model):
                    continue
            if brought is None:
                self._brought[model] = _Brought(now)
                if waits:
                    continue  # Where the model waits was chosen just now.
            elif now - brought.at < brought.again_seconds:
                continue
            else:
                brought.at = now
                if not waits:
                    brought.again_seconds = min(2 * brought.again_seconds, MAX_AGAIN_SECONDS)
            try:
                priority = max(group.standing for group in groups)
                await self._residencies.want(model, priority, queued=True)
            except (Problem, UnknownModel) as refused:
                log.warning(
                    "a model for which inferences wait cannot be had now", model=model, fault=str(refused)
                )
