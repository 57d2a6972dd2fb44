"""A process of the broker in the simulation: the real candidate, leader, picture and pruner, life by life."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from gpubroker_server.adapters.sql.store import SqlStore
from gpubroker_server.bootstrap.follower import LogFollower
from gpubroker_server.broker.background import Pruner
from gpubroker_server.broker.dispatch import Dispatcher
from gpubroker_server.broker.leadership import LeaderCandidate
from gpubroker_server.broker.loop import Leader
from gpubroker_server.broker.observe import Observer
from gpubroker_server.core.domain.leader_term import LeaderTerm, LeaderTermRules
from gpubroker_server.core.domain.policy import Policy, Retention
from gpubroker_server.core.domain.units import Seconds, Term
from gpubroker_server.core.lifecycle.reconcile import InventoryRules
from gpubroker_server.ports.store import BlobStore, StoreUnavailable, TaskStore

from tests.simulation.line_to_database import Database, Session
from tests.simulation.machine import CLUSTER
from tests.simulation.timeline import Timeline
from tests.simulation.virtual_loop import Host, VirtualLoop
from tests.simulation.wires import Network, Wire

PRUNE_SECONDS = Seconds(7.0)
RETENTION = Retention(Seconds(15.0), Seconds(1e6), Seconds(1e6))
"""Tasks without a key go soon, those with one stay: jumps of a clock must not make a key unknown."""


@dataclass
class Site:
    """What all processes share."""

    timeline: Timeline
    database: Database
    network: Network
    blobs: BlobStore
    policy: Policy
    faults: list[str] = field(default_factory=list)
    """What must never happen, and did."""
    terms_led: int = 0


class Process:
    """One after another of them has this name, on one host."""

    def __init__(self, name: str, site: Site, host: Host, chance: Random) -> None:
        self.name, self.host = name, host
        self._site, self._chance = site, chance
        self.is_cut_off = False
        self.is_dead = True
        self.loop: VirtualLoop
        self.picture: LogFollower
        self._candidate: LeaderCandidate
        self._main: asyncio.Task[None]
        self._wire: Wire
        self._buried: list[VirtualLoop] = []
        self._lives = 0
        self._strikes: dict[str, Callable[[], None]] = {}

    @property
    def term(self) -> Term | None:
        """That it leads, as far as it knows."""
        return None if self.is_dead else self._candidate.term

    def start(self) -> None:
        """A new process: it knows what is in the database, and nothing else."""
        if not self.is_dead:
            return
        self.is_dead = False
        self._lives += 1
        site = self._site
        self.loop = VirtualLoop(site.timeline, self.host, self._chance)  # type: ignore[abstract]  # as much of a loop as is used
        life = Life(self, site, self._chance)
        self.picture, self._wire, self._candidate = life.picture, life.wire, life.candidate
        site.network.wires.append(self._wire)
        self._main = self.loop.create_task(life.run())
        self._main.add_done_callback(self._end)

    def kill(self) -> None:
        """SIGKILL."""
        if not self.is_dead:
            self.is_dead = True
            self.loop.die()
            self._site.network.wires.remove(self._wire)
            self._note_faults()
            self._buried.append(self.loop)

    def leave(self) -> None:
        """SIGTERM: it lets its term go, and ends."""
        if not self.is_dead:
            self._main.cancel()

    def strike(self, where: str, what: Callable[[], None]) -> None:
        """When it comes to this point next, this happens to it."""
        self._strikes[where] = what

    def spare(self) -> None:
        self._strikes.clear()

    async def pass_by(self, where: str) -> None:
        """`before commit`, `after send`, and so on."""
        if self._strikes and where in self._strikes:
            self._strikes.pop(where)()
            if self.is_dead:
                await self.loop.create_future()
            await asyncio.sleep(0)

    def close(self) -> None:
        """It is never looked at again."""
        self.kill()
        for loop in self._buried:
            loop.bury()

    @property
    def life(self) -> str:
        return f"{self.name}-{self._lives}"

    def _end(self, main: "asyncio.Task[None]") -> None:
        with suppress(asyncio.CancelledError):
            if (error := main.exception()) is not None:
                self._site.faults.append(f"{self.life} ended: {_text(error)}")
        self.kill()

    def _note_faults(self) -> None:
        self._site.faults += [f"{self.life}: {_text(fault)}" for fault in self.loop.faults]


class Life:
    """As `gpubroker_server.bootstrap` puts a broker together."""

    def __init__(self, process: Process, site: Site, chance: Random) -> None:
        self._process, self._site = process, site
        session = Session(site.database, process, site.timeline, chance)
        self._store = cast(TaskStore, session)
        host = process.host
        half_life = site.policy.usage_half_life_seconds
        self.picture = LogFollower(cast(SqlStore, session), half_life, self._fail, host.ticks)
        self.wire: Any = Wire(process.name, process, host, self.picture.clock, site.network, chance)
        self.candidate = LeaderCandidate(
            name=process.life,
            store=self._store,
            executor=cast("Any", self.wire),
            rules=LeaderTermRules(),
            ticks=host.ticks,
            chance=chance.random,
            new_leader=self._new_leader,
            catch_up=self.picture.catch_up,
            resigned=asyncio.Event(),
        )
        self._pruner = Pruner(
            self._store,
            self.picture.clock,
            RETENTION,
            lambda: self.candidate.term,
            lambda: self.picture.world.position,
            lambda: True,  # a storm is over before a clock counts for long enough
        )
        self.picture.listen(
            lambda events: self.candidate.leader.on_events(events) if self.candidate.leader else None
        )

    async def run(self) -> None:
        while True:
            try:
                await self.picture.begin()
                break
            except StoreUnavailable:
                await asyncio.sleep(1.0)
        async with asyncio.TaskGroup() as group:
            for _, job in self.picture.jobs():
                group.create_task(job)
            group.create_task(self._pruner.keep(PRUNE_SECONDS))
            group.create_task(self.candidate.run())

    def _new_leader(self, leader_term: LeaderTerm) -> Leader:
        site, picture, ticks = self._site, self.picture, self._process.host.ticks
        site.terms_led += 1
        rules = InventoryRules(CLUSTER)
        return Leader(
            leader_term=leader_term,
            ticks=ticks,
            world=picture.world,
            policy=site.policy,
            store=self._store,
            executor=self.wire,
            observer=Observer(picture.world, site.policy, site.blobs, rules, 65536, picture.progress, ticks),
            dispatcher=Dispatcher(
                self._store,
                site.blobs,
                self.wire,
                picture.world,
                picture.clock,
                entrypoints=(),
            ),
            clock=picture.clock,
        )

    def _fail(self, part: str, fault: BaseException) -> None:
        self._site.faults.append(f"{self._process.life}, {part}: {_text(fault)}")


def _text(fault: BaseException) -> str:
    """Of the first one, however deep it is."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return repr(fault)
