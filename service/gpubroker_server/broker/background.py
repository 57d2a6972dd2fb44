"""The leader's work beside its cycles: publish last values, divide slots of models, prune, ask for gateways,
and ask an autoscaler for room."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import structlog
from msgspec.structs import replace

from gpubroker_server.core.control.finding_dates import FindingDate
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.domain.device import DeviceSample, NodeSample
from gpubroker_server.core.domain.model_orders import ModelsInUse, ServerGone
from gpubroker_server.core.domain.orders import Report
from gpubroker_server.core.domain.policy import Policy, Retention
from gpubroker_server.core.domain.progress import Progress
from gpubroker_server.core.domain.units import DeviceKey, NodeName, Position, Seconds, TaskId, Term
from gpubroker_server.core.explain.autoscaling import autoscaling_demand, room_for_all
from gpubroker_server.core.lifecycle.model_adoption import left_processes
from gpubroker_server.core.lifecycle.model_turns import is_contended, turns
from gpubroker_server.core.serving.slots import AWAY_SECONDS, HOLD_SECONDS, Shares, SlotShares
from gpubroker_server.core.world.world import World
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
"""The time between two steps, each of which blocks other writes for some milliseconds."""

REQUEST_SECONDS = Seconds(5.0)
USE_SECONDS = Seconds(0.1)
"""The time between two questions to gateways which models are in use."""
SERVER_GONE_SECONDS = Seconds(2.0)
"""The time between two looks at the processes of servers that left models in quarantine."""

ReadTerm = Callable[[], Term | None]
"""The term of this process; None while it does not lead."""


@dataclass(eq=False)
class ResourceRequests:
    """Asks an autoscaler for room for everything that runs or waits."""

    world: World
    policy: Policy
    clock: Clock
    request: Callable[[Sequence[Mapping[str, float]]], None]
    """Replaces what was asked for before."""

    async def keep(self, term: ReadTerm, every_seconds: Seconds = REQUEST_SECONDS) -> None:
        """Request the demand until cancelled, again and again, because the autoscaler may have been started
        again."""
        while True:
            if term() is not None:
                demand = autoscaling_demand(self.world, self.policy, self.clock.now())
                self.request(room_for_all(demand))
            await asyncio.sleep(every_seconds)


@dataclass(eq=False)
class Publisher:
    """Publishes samples, progress and the leader's status to other processes: what changed since the last
    time."""

    world: World
    progress: Mapping[TaskId, Progress]
    leader: Callable[[Term], LeaderSeen]
    """The status of this process while it leads the term."""
    store: LastValueStore

    def __post_init__(self) -> None:
        self._term = Term(0)
        self._number = 0
        """The number of the last publication of this term."""
        self._samples: dict[DeviceKey, DeviceSample] = {}
        self._nodes: dict[NodeName, NodeSample] = {}
        self._runs: dict[TaskId, Progress] = {}
        self._idle: Sequence[Idle] | None = None
        """The idle devices that were last published."""

    async def keep(self, term: ReadTerm, every_seconds: Seconds) -> None:
        """Publish while there is a term, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            if (leading := term()) is not None:
                await self.publish(leading)

    async def publish(self, term: Term) -> None:
        """Publish what has changed. What cannot be written now is published the next time."""
        if term != self._term:
            self._term, self._number, self._idle = term, 0, None
            self._samples, self._nodes, self._runs = {}, {}, {}
        samples = {
            key: ledger.sample for key, ledger in self.world.ledgers.items() if ledger.sample is not None
        }
        nodes, runs = dict(self.world.node_samples), dict(self.progress)
        leader, idle = _apart(self.leader(term))
        values = LastValues(
            samples=[sample for key, sample in samples.items() if sample is not self._samples.get(key)],
            progress={task: last for task, last in runs.items() if last is not self._runs.get(task)},
            leader=leader,
            idle=None if idle == self._idle else idle,
            ended=[task for task in self._runs if task not in runs],
            nodes=[sample for name, sample in nodes.items() if sample is not self._nodes.get(name)],
        )
        try:
            await self.store.publish(term, self._number + 1, values)
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
    """Publish the leader until cancelled, for the next start of this process: each time the event log or the
    findings say something new of the fleet. This is for an installation in which no other process reads the
    leader. Idle devices are left out, because they may be in use at the next start."""
    published: tuple[Term, Mapping[str, int], Sequence[FindingDate]] | None = None
    for number in count(1):
        await asyncio.sleep(every_seconds)
        if (leading := term()) is None:
            continue
        seen, _ = _apart(leader(leading))
        if seen.fleet is not None and (news := (leading, seen.fleet.events, seen.fleet.dates)) != published:
            with suppress(StoreUnavailable):
                await store.publish(leading, number, LastValues(leader=seen))
                published = news


class SlotDivider:
    """Divides the slots of models among gateways, by what they hold and want."""

    def __init__(self, slots: Mapping[str, int], store: SlotStore, clock: Clock) -> None:
        """`slots`: model -> slots of all gateways together."""
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
        """Divide the slots while there is a term, until cancelled."""
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


@dataclass(eq=False)
class Pruner:
    """Removes finished tasks, old events and old audit notes, a little at a time."""

    store: TaskStore
    clock: Clock
    retention: Retention
    term: ReadTerm
    heard: Callable[[], Position]
    """The position in the log of this process's World."""
    may_prune: Callable[[], bool]
    """Returns True if the clock counts for long enough to delete by it."""

    async def keep(self, every_seconds: Seconds = PRUNE_SECONDS) -> None:
        """Delete what is too old, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                await self.prune()
            except StaleTerm:
                continue  # the next leader prunes
            except StoreUnavailable as fault:
                log.warning("pruning was interrupted; it continues later", fault=str(fault))

    async def prune(self) -> None:
        """Delete all that has expired by now. Raises StaleTerm, StoreUnavailable."""
        while (term := self.term()) is not None and self.may_prune():
            cutoffs = self.retention.cutoffs(self.clock.now(), self.heard())
            if not await self.store.prune(term, cutoffs):
                return
            await asyncio.sleep(PRUNE_PAUSE_SECONDS)


async def gateways_have_let_go(store: PresenceStore, clock: Clock, claim: str) -> bool:
    """Return True if all gateways have let go of a claim on a model."""
    present = await _present(store, clock)
    return present is not None and all(claim in gateway.let_go for gateway in present)


async def models_in_use(store: PresenceStore, clock: Clock) -> ModelsInUse | None:
    """The models that have a request at any gateway, or had one lately; None while the database does not
    answer."""
    present = await _present(store, clock)
    if present is None:
        return None
    return ModelsInUse(
        frozenset().union(*(gateway.in_use for gateway in present)),
        frozenset().union(*(gateway.recent for gateway in present)),
    )


async def _present(store: PresenceStore, clock: Clock) -> list[Presence] | None:
    """Return the gateways that have not been silent for too long."""
    try:
        presences = await store.presences()
    except StoreUnavailable:
        return None
    since = clock.now() - PRESENT_SECONDS
    return [presence for presence in presences if presence.at >= since]


async def watch_model_use(
    world: World,
    read: Callable[[], Awaitable[ModelsInUse | None]],
    clock: Clock,
    policy: Policy,
    hear: Callable[[Sequence[Report]], None],
) -> None:
    """Ask gateways until cancelled which models are in use, while something waits that could have the memory
    of an idle one. `hear` is called only if that changes whose turn it is. `read`: as `models_in_use`.
    Gateways have one interval to say that: they do so when they learn that something waits."""
    was_contended = False
    while True:
        await asyncio.sleep(USE_SECONDS)
        in_use = await read() if was_contended else None
        if in_use is not None and turns(world, in_use, clock.now(), policy):
            hear([in_use])
        was_contended = is_contended(world, clock.now(), policy)


async def watch_left_servers(
    world: World, is_gone: Callable[[str], bool], hear: Callable[[Sequence[Report]], None]
) -> None:
    """Report servers whose process has ended, until cancelled. A server that is no longer in the settings is
    not asked. `is_gone` says whether this machine knows that the process has ended."""
    while True:
        hear([ServerGone(process) for process in sorted(left_processes(world)) if is_gone(process)])
        await asyncio.sleep(SERVER_GONE_SECONDS)
