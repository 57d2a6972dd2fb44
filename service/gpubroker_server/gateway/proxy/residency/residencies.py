"""Models of all servers in the ledger, for those who ask for a model and not for a server."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import NodeName, Seconds
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.proxy.residency.residency import (
    TELL_SECONDS,
    Residency,
    ResidencyParts,
    UnknownModel,
)
from gpubroker_server.gateway.proxy.residency.server_rules import PlaceWatch, ServerRules
from gpubroker_server.ports.models import ModelHost


class Residencies:
    def __init__(self, parts: ResidencyParts, served: Sequence[tuple[ServerRules, ModelHost]]) -> None:
        self.parts = parts
        self._each = tuple(Residency(parts, rules, host) for rules, host in served)
        self.is_up: Callable[[str], bool] = lambda _server: True
        """Whether a server answers; whoever asks them all the time says so."""

    def __iter__(self) -> Iterator[Residency]:
        """In the order of the settings."""
        return iter(self._each)

    def at(self, server: str) -> Residency | None:
        return next((residency for residency in self._each if residency.rules.name == server), None)

    def holding(self, model: str) -> list[Residency]:
        """Where it is in memory, or waits for that."""
        return [residency for residency in self._each if residency.of(model) is not None]

    def is_there(self, model: str) -> bool:
        """At a server that answers."""
        return any(there.is_there(model) and self.is_up(there.rules.name) for there in self._each)

    def have(self, model: str) -> bool:
        """The same of any server: one that is away may answer by the time that it is asked."""
        return any(there.is_there(model) for there in self._each)

    def priority_of(self, model: str, asked: int | None = None) -> int:
        """That of the first server for which the operator has said one, else that of all models."""
        if asked is not None:
            return asked
        said = (residency for residency in self._each if model in residency.rules.models)
        return next(said, self._each[0]).priority_of(model)

    def note_use(self, model: str, priority: int) -> None:
        """Wherever it is; if it is nowhere, where the next one who asks would bring it."""
        for residency in self.holding(model) or self._each[:1]:
            residency.note_use(model, priority)

    def note_wanted(self, model: str, asked: int | None) -> bool:
        """A request for the model has come. Whether it is in memory at a server that answers."""
        self.note_use(model, self.priority_of(model, asked))
        return self.is_there(model)

    async def ready_if_known(self, model: str, asked: int | None) -> bool:
        """Wait until the model is in memory at one of the servers. False: no server has such a model. Raises
        Problem."""
        priority = self.priority_of(model, asked)
        try:
            residency, _ = await self.want(model, priority)
            await residency.ready(model, priority)
        except UnknownModel:
            return False
        return True

    async def back(self, model: str, asked: int | None, server: str) -> bool:
        """The same for one that is there as far as the picture goes, and of which this server says that it
        has none."""
        if (there := self.at(server)) is not None and there.is_there(model):
            await there.back(model)
        return await self.ready_if_known(model, asked)

    def doubt(self, model: str, server: str) -> None:
        """It answers as one does whose process is gone."""
        if (there := self.at(server)) is not None:
            there.doubt(model)

    async def want(self, model: str, priority: int, *, queued: bool = False) -> tuple[Residency, Task]:
        """Its holder, made if there is none, and where that is: at the first server of those below that has
        the model and a GPU which is large enough. Raises Problem, UnknownModel, StoreUnavailable.

        1. servers that answer
        2. those that have it in memory, or wait for that
        3. those for which the operator has named it
        4. more free memory on one GPU
        5. the order of the settings
        """
        refused: Problem | UnknownModel | None = None
        for residency in self._in_order(model):
            try:
                return residency, await residency.want(model, priority, queued=queued)
            except UnknownModel as unknown:
                refused = refused or unknown
            except Problem as problem:
                if problem.kind.status != _NEVER:
                    raise
                refused = problem
        assert refused is not None
        raise refused

    async def unloaded(self, model: str) -> bool:
        """Have it unloaded wherever it is, and wait until it is gone; False if it was nowhere. Raises Problem
        model-not-ready."""
        holding = self.holding(model)
        for residency in holding:
            await residency.unloaded(model)
        return bool(holding)

    async def keep_telling(self, every_seconds: Seconds = TELL_SECONDS) -> None:
        """The leader which models are used, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for residency in self._each:
                group.create_task(residency.keep_telling(every_seconds))
            group.create_task(self._keep_looking(every_seconds))

    async def _keep_looking(self, every_seconds: Seconds) -> None:
        watch = PlaceWatch(self.parts.world, [residency.rules for residency in self._each])
        while True:
            await asyncio.sleep(every_seconds)
            watch.look()

    def _in_order(self, model: str) -> list[Residency]:
        if len(self._each) == 1:
            return [*self._each]
        return sorted(self._each, key=lambda residency: self._rank(residency, model))

    def _rank(self, residency: Residency, model: str) -> tuple[bool, bool, bool, int]:
        rules = residency.rules
        return (
            not self.is_up(rules.name),
            residency.of(model) is None,
            model not in rules.models,
            -self._free_mb(rules),
        )

    def _free_mb(self, rules: ServerRules) -> int:
        """On the emptiest of its GPUs."""
        world = self.parts.world
        books = (world.books[key] for key in world.by_node.get(NodeName(rules.node), []))
        mine = (book for book in books if not rules.devices or book.device.uuid in rules.devices)
        return max((book.free_mb() for book in mine), default=0)


_NEVER = 422
"""Of a problem: it does not fit there, now or later."""
