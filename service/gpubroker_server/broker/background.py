"""What the leader does beside its cycles: publish last values, divide slots of models, prune, ask for
gateways, and ask an autoscaler for room."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

import structlog

from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.domain.device import DeviceSample, NodeSample
from gpubroker_server.core.domain.policy import Policy, Retention
from gpubroker_server.core.domain.units import DeviceKey, NodeName, Position, Seconds, TaskId, Term
from gpubroker_server.core.explain.autoscaling import autoscaling_demand, room_for_all
from gpubroker_server.core.serving.slots import AWAY_SECONDS, HOLD_SECONDS, Shares, SlotShares
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.executor import Progress
from gpubroker_server.ports.last_values import (
    PRESENT_SECONDS,
    LastValues,
    LastValueStore,
    LeaderSeen,
    Presence,
    PresenceStore,
    SlotStore,
)
from gpubroker_server.ports.store import (
    Clock,
    StaleTerm,
    StoreUnavailable,
    TaskStore,
)

log = structlog.get_logger("gpubroker.retention")

PRUNE_SECONDS = Seconds(60.0)
PRUNE_PAUSE_SECONDS = Seconds(0.1)
"""Between two steps, each of which blocks other writes for some milliseconds."""

REQUEST_SECONDS = Seconds(5.0)

ReadTerm = Callable[[], Term | None]
"""The term of this process; None while it does not lead."""


class ResourceRequests:
    """Asks an autoscaler for room for everything that runs or waits."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        clock: Clock,
        request: Callable[[Sequence[Mapping[str, float]]], None],
    ) -> None:
        """`request`: replaces what was asked for before."""
        self._world = world
        self._policy = policy
        self._clock = clock
        self._request = request

    async def keep(self, term: ReadTerm, every_seconds: Seconds = REQUEST_SECONDS) -> None:
        """Until cancelled. Repeats itself, because the autoscaler may have been started again."""
        while True:
            if term() is not None:
                demand = autoscaling_demand(self._world, self._policy, self._clock.now())
                self._request(room_for_all(demand))
            await asyncio.sleep(every_seconds)


class Publisher:
    """Publishes samples, progress and the leader's status to other processes: what changed since the last
    time."""

    def __init__(
        self,
        world: World,
        progress: Mapping[TaskId, Progress],
        leader: Callable[[Term], LeaderSeen],
        store: LastValueStore,
    ) -> None:
        """`leader`: the status of this process while it leads the term."""
        self._world = world
        self._progress = progress
        self._leader = leader
        self._store = store
        self._term = Term(0)
        self._number = 0
        """Of the last publication of this term."""
        self._samples: dict[DeviceKey, DeviceSample] = {}
        self._nodes: dict[NodeName, NodeSample] = {}
        self._runs: dict[TaskId, Progress] = {}
        self._idle: Sequence[Idle] | None = None
        """What was last published."""

    async def keep(self, term: ReadTerm, every_seconds: Seconds) -> None:
        """While there is a term, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            if (leading := term()) is not None:
                await self.publish(leading)

    async def publish(self, term: Term) -> None:
        """What cannot be written now is published the next time."""
        if term != self._term:
            self._term, self._number, self._idle = term, 0, None
            self._samples, self._nodes, self._runs = {}, {}, {}
        samples = {
            key: ledger.sample for key, ledger in self._world.ledgers.items() if ledger.sample is not None
        }
        nodes, runs = dict(self._world.node_samples), dict(self._progress)
        leader, idle = _apart(self._leader(term))
        values = LastValues(
            samples=[sample for key, sample in samples.items() if sample is not self._samples.get(key)],
            progress={task: last for task, last in runs.items() if last is not self._runs.get(task)},
            leader=leader,
            idle=None if idle == self._idle else idle,
            ended=[task for task in self._runs if task not in runs],
            nodes=[sample for name, sample in nodes.items() if sample is not self._nodes.get(name)],
        )
        try:
            await self._store.publish(term, self._number + 1, values)
        except StoreUnavailable:
            return
        self._number += 1
        self._samples, self._nodes, self._runs, self._idle = samples, nodes, runs, idle


def _apart(leader: LeaderSeen) -> tuple[LeaderSeen, Sequence[Idle]]:
    """The leader without what is idle, and that."""
    if (fleet := leader.fleet) is None:
        return leader, ()
    return replace(leader, fleet=replace(fleet, idle=())), fleet.idle


async def keep_for_the_next_start(
    store: LastValueStore, leader: Callable[[Term], LeaderSeen], term: ReadTerm, every_seconds: Seconds
) -> None:
    """Where no other process reads it, publish the leader when the log has heard more of the fleet, until
    cancelled. Without what is idle: it may be in use until the next start."""
    told: tuple[Term, Mapping[str, int]] | None = None
    for number in count(1):
        await asyncio.sleep(every_seconds)
        if (leading := term()) is None:
            continue
        seen, _ = _apart(leader(leading))
        if seen.fleet is not None and (news := (leading, seen.fleet.events)) != told:
            with suppress(StoreUnavailable):
                await store.publish(leading, number, LastValues(leader=seen))
                told = news


class SlotDivider:
    """Divides the slots of models among gateways, by what they hold and want."""

    def __init__(self, slots: Mapping[str, int], store: SlotStore, clock: Clock) -> None:
        """`slots`: by model, for all gateways together."""
        self._slots = slots
        self._store = store
        self._clock = clock
        self._term: Term | None = None
        self._shares: SlotShares | None = None
        self._divided: Mapping[str, Shares] = {}

    @property
    def divided(self) -> Mapping[str, Shares] | None:
        """The newest shares; None without slots to divide."""
        return self._divided if self._slots else None

    async def keep(self, term: ReadTerm, every_seconds: Seconds) -> None:
        """While there is a term, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            await self.divide(term())

    async def divide(self, term: Term | None) -> None:
        if term is None or term != self._term:
            self._term, self._divided = term, {}
            self._shares = None if term is None else SlotShares(self._slots, self._clock.now())
        if self._shares is None:
            return
        try:
            claims = await self._store.slot_claims()
            now = self._clock.now()
            self._divided = self._shares.give(claims, now)
            for claim in claims:
                if claim.at <= now - HOLD_SECONDS - AWAY_SECONDS:
                    await self._store.drop_slots(claim.gateway)
        except StoreUnavailable:
            return


class Pruner:
    """Removes finished tasks, old events and old audit notes, a little at a time."""

    def __init__(
        self,
        store: TaskStore,
        clock: Clock,
        retention: Retention,
        term: ReadTerm,
        heard: Callable[[], Position],
        may_prune: Callable[[], bool],
    ) -> None:
        """`heard`: the position in the log of this process's World. `may_prune`: whether the clock counts for
        long enough to delete by it."""
        self._store = store
        self._clock = clock
        self._retention = retention
        self._term = term
        self._heard = heard
        self._may_prune = may_prune

    async def keep(self, every_seconds: Seconds = PRUNE_SECONDS) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                await self.prune()
            except StaleTerm:
                continue  # the next leader prunes
            except StoreUnavailable as fault:
                log.warning("pruning was interrupted; it continues later", fault=str(fault))

    async def prune(self) -> None:
        """All that has expired by now. Raises StaleTerm, StoreUnavailable."""
        while (term := self._term()) is not None and self._may_prune():
            cutoffs = self._retention.cutoffs(self._clock.now(), self._heard())
            if not await self._store.prune(term, cutoffs):
                return
            await asyncio.sleep(PRUNE_PAUSE_SECONDS)


async def gateways_have_let_go(store: PresenceStore, clock: Clock, claim: str) -> bool:
    """Whether all gateways have let go of a claim on a model."""
    present = await _present(store, clock)
    return present is not None and all(claim in gateway.let_go for gateway in present)


async def models_in_use(store: PresenceStore, clock: Clock) -> frozenset[str] | None:
    """The models that have a request at any gateway; None while the database does not answer."""
    present = await _present(store, clock)
    return None if present is None else frozenset().union(*(gateway.in_use for gateway in present))


async def _present(store: PresenceStore, clock: Clock) -> list[Presence] | None:
    """Gateways that have not been silent for too long."""
    try:
        presences = await store.presences()
    except StoreUnavailable:
        return None
    since = clock.now() - PRESENT_SECONDS
    return [presence for presence in presences if presence.at >= since]
