"""The choice of the server that loads a model, for requests that name a model and no server."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Final

import structlog

from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.world.server_places import gpus_of, place_fault
from gpubroker_server.core.world.world import World
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.residency import Residency, ResidencyParts
from gpubroker_server.ports.model_servers import UnknownModel
from gpubroker_server.ports.models import ModelHost
from gpubroker_server.ports.store import StoreUnavailable

log = structlog.get_logger("gpubroker.tasks.task")

REPORT_SECONDS: Final = Seconds(30.0)
"""Interval between reports to the leader about which models were used."""

_CHOICE_SECONDS: Final = Seconds(5.0)
"""Interval in which the server is chosen again while requests wait for a model. Differences below it between
the times at which servers could have the model ready do not count."""

_NEVER: Final = 422
"""The HTTP status of the problem that a model can never fit on a server."""


class Residencies:
    def __init__(self, parts: ResidencyParts, served: Sequence[tuple[ServerRules, ModelHost]]) -> None:
        self.parts = parts
        self._each = tuple(Residency(parts, rules, host) for rules, host in served)
        self.answers: Callable[[str, bool], bool] = lambda _server, _over_grpc: True
        """Function that returns True if the server of this name answers over gRPC, or else over HTTP. The
        fleet sets it."""

    def __iter__(self) -> Iterator[Residency]:
        """Yield the residencies in the order of the settings."""
        return iter(self._each)

    def at(self, server: str) -> Residency | None:
        return next((residency for residency in self._each if residency.rules.name == server), None)

    def holding(self, model: str) -> list[Residency]:
        """Return the residencies of servers where the model is in memory or waits for memory."""
        return [residency for residency in self._each if residency.of(model) is not None]

    def have(self, model: str) -> bool:
        """Return True if the model is in memory at a server. The server need not answer now: it may do so by
        the time it is asked."""
        return any(residency.is_there(model) for residency in self._each)

    def may_move(self, model: str) -> bool:
        """Return True if the model waits for memory at one server, while another might get room sooner."""
        tasks = [residency.memory_of(model) for residency in self._each]
        return len(tasks) > 1 and all(task is None or task.state is TaskState.PENDING for task in tasks)

    def priority_of(self, model: str, asked: int | None = None) -> int:
        """Return the first of these priorities that exists: the one that was asked for, that of the first
        server whose settings name the model, and the default of the first server."""
        if asked is not None:
            return asked
        named = (residency for residency in self._each if model in residency.rules.models)
        return next(named, self._each[0]).priority_of(model)

    def note_wanted(self, model: str, asked: int | None, *, over_grpc: bool = False) -> bool:
        """Note that a request for the model has come. Returns True if the model is in memory at a server that
        answers over the request's protocol."""
        priority = self.priority_of(model, asked)
        having = [
            residency
            for residency in self._each
            if residency.is_there(model) and self.answers(residency.rules.name, over_grpc)
        ]
        # Only copies that answer requests are in use: another one, which waits for memory, is not needed.
        for residency in having or self.holding(model) or self._each[:1]:
            residency.note_use(model, priority)
        return bool(having)

    def _can_answer(self, model: str, *, besides: Residency, over_grpc: bool) -> bool:
        """Return True if a server that answers, `besides` this one, has the model in memory."""
        return any(
            residency.is_there(model) and self.answers(residency.rules.name, over_grpc)
            for residency in self._each
            if residency is not besides
        )

    async def ready_if_known(
        self, model: str, asked: int | None, seconds: float | None = None, *, over_grpc: bool = False
    ) -> bool:
        """Wait until the model is in memory at one of the servers: at most `seconds`, and never longer than
        `cold_seconds`. Returns False if no server has such a model. Raises Problem."""
        try:
            await self._ready(model, self.priority_of(model, asked), seconds, over_grpc=over_grpc)
        except UnknownModel:
            return False
        except StoreUnavailable:
            raise Problem("store-unavailable") from None
        return True

    async def _ready(self, model: str, priority: int, seconds: float | None, *, over_grpc: bool) -> None:
        """Wait like `ready_if_known`. While the model waits for memory at one server, another may get room.
        Raises UnknownModel, StoreUnavailable too."""
        began = self.parts.clock.now()
        while True:
            residency, _ = await self.want(model, priority, over_grpc=over_grpc)
            cold_seconds = residency.rules.cold_seconds
            most_seconds = cold_seconds if seconds is None else min(seconds, cold_seconds)
            # The time that storing the holder took is part of the wait.
            left_seconds = began + most_seconds - self.parts.clock.now()
            is_last = not self.may_move(model) or left_seconds <= _CHOICE_SECONDS
            elsewhere = partial(self._can_answer, model, besides=residency, over_grpc=over_grpc)
            try:
                wait_seconds = Seconds(left_seconds if is_last else _CHOICE_SECONDS)
                await residency.ready(model, priority, wait_seconds, unless=elsewhere)
            except Problem as problem:
                if is_last or problem.code != "model-not-ready" or self.parts.waiters.is_closed:
                    raise
            else:
                return

    async def returned(self, model: str, asked: int | None, server: str, *, over_grpc: bool = False) -> bool:
        """Wait for a model that the ledger has at `server`, while the server denies it. Returns False if no
        server has such a model. Raises Problem."""
        if (residency := self.at(server)) is not None and residency.is_there(model):
            elsewhere = partial(self._can_answer, model, besides=residency, over_grpc=over_grpc)
            await residency.returned(model, unless=elsewhere)
        return await self.ready_if_known(model, asked, over_grpc=over_grpc)

    def report_dead(self, model: str, server: str) -> None:
        """Have the leader check the model: the server's answer says that the model's process is gone."""
        if (residency := self.at(server)) is not None:
            residency.report_dead(model)

    def try_again(self, model: str) -> None:
        """Allow a load of the model by hand, even if one has failed lately."""
        for residency in self._each:
            residency.try_again(model)

    async def want(
        self, model: str, priority: int, *, queued: bool = False, over_grpc: bool = False
    ) -> tuple[Residency, Task]:
        """Return the model's holder, made if there is none, and the residency that it belongs to: the first
        in this order whose server has the model and a GPU that is large enough. Raises Problem, UnknownModel,
        StoreUnavailable.

        1. servers that answer
        2. servers that have the model in memory
        3. servers that are loading the model
        4. servers where the model is expected in memory before a request for it would be refused
        5. servers where the model waits for memory
        6. servers whose settings name the model
        7. the earlier time at which the model is expected in memory
        8. more free memory on one GPU
        9. the order of the settings
        """
        refused: Problem | UnknownModel | None = None
        unknown_at: list[str] = []
        for residency in await self._in_order(model, priority, over_grpc=over_grpc):
            try:
                return residency, await residency.want(model, priority, queued=queued)
            except UnknownModel as unknown:
                unknown_at.append(residency.rules.name)
                refused = refused or unknown
            except Problem as problem:
                if problem.kind.status != _NEVER:
                    raise
                refused = problem
        assert refused is not None
        if len(unknown_at) > 1 and isinstance(refused, UnknownModel):
            refused = UnknownModel(
                f"none of the servers {', '.join(sorted(unknown_at))} has it in its repository"
            )
        raise refused

    async def unloaded(self, model: str, by: str) -> bool:
        """Have the model unloaded everywhere at the request of this token, and wait until it is gone. Returns
        False if no server had it. Raises Problem."""
        # All servers are checked before the first unload: either all unload the model or none.
        for residency in self._each:
            residency.check_unload(model)
        holding = self.holding(model)
        try:
            for residency in holding:
                await residency.unloaded(model, by)
        except StoreUnavailable:
            raise Problem("store-unavailable") from None
        return bool(holding)

    async def keep_reporting(self, every_seconds: Seconds = REPORT_SECONDS) -> None:
        """Tell the leader which models are used, and the log which servers have no place, until cancelled."""
        checks = PlaceChecks(self.parts.world, [residency.rules for residency in self._each])
        while True:
            await asyncio.sleep(every_seconds)
            checks.check()
            for residency in self._each:
                try:
                    await residency.report_use()
                except StoreUnavailable as fault:
                    log.warning("the use of models is reported later", fault=str(fault))

    async def _in_order(self, model: str, priority: int, *, over_grpc: bool) -> list[Residency]:
        if len(self._each) == 1:
            return [*self._each]
        able = [residency for residency in self._each if self.answers(residency.rules.name, over_grpc)]
        seconds = dict.fromkeys(self._each, inf)
        if not any(_is_loading(residency, model) or residency.is_there(model) for residency in able):
            for residency in able:
                seconds[residency] = await residency.seconds_until_ready(model, priority)

        def rank(residency: Residency) -> tuple[bool, bool, bool, bool, bool, bool, float, int]:
            rules, expected_seconds = residency.rules, seconds[residency]
            return (
                residency not in able,
                not residency.is_there(model),
                not _is_loading(residency, model),
                expected_seconds > rules.cold_seconds,
                residency.of(model) is None,
                model not in rules.models,
                expected_seconds // _CHOICE_SECONDS if expected_seconds < inf else inf,
                -self._free_mb(rules),
            )

        return sorted(self._each, key=rank)

    def _free_mb(self, rules: ServerRules) -> int:
        """Return the free memory of the emptiest of the server's GPUs in MiB."""
        return max((ledger.offered_mb() for ledger in gpus_of(self.parts.world, rules)), default=0)


def _is_loading(residency: Residency, model: str) -> bool:
    task = residency.memory_of(model)
    return task is not None and task.state is TaskState.ADMITTED


class PlaceChecks:
    """Logs once for each server whose node or GPUs are missing. Nodes join one after the other, so a place
    counts as missing only if two checks in a row miss it after other nodes have joined."""

    def __init__(self, world: World, servers: Sequence[ServerRules]) -> None:
        self._world = world
        self._servers = servers
        self._missing: set[str] = set()
        self._logged: set[str] = set()

    def check(self) -> None:
        world = self._world
        if not any(node.ready for node in world.nodes.values()):
            return
        faults = {rules.name: place_fault(world, rules) for rules in self._servers}
        missing = {name for name, fault in faults.items() if fault}
        for name in sorted((missing & self._missing) - self._logged):
            log.warning("the models of a server cannot be loaded", server=name, fault=faults[name])
        self._logged = (self._logged | self._missing) & missing
        self._missing = missing
