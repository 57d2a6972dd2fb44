"""The leader's work beside its cycles: it publishes last values, divides slots of models, prunes old rows,
asks gateways which models they use, and asks an autoscaler for room."""

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
"""The pause between two steps of pruning, each of which blocks other writes for some milliseconds."""

REQUEST_SECONDS = Seconds(5.0)
USE_SECONDS = Seconds(0.1)
"""The time between two reads of the models that gateways use."""
SERVER_GONE_SECONDS = Seconds(2.0)
"""The time between two checks of the server processes whose models are in quarantine."""

ReadTerm = Callable[[], Term | None]
"""Returns the term of this process; None while it does not lead."""


@dataclass(eq=False)
class ResourceRequests:
    """Asks an autoscaler for room for everything that runs or waits."""

    world: World
    policy: Policy
    clock: Clock
    request: Callable[[Sequence[Mapping[str, float]]], None]
    """Asks the autoscaler for these bundles, in place of those asked for before."""

    async def keep(self, term: ReadTerm, every_seconds: Seconds = REQUEST_SECONDS) -> None:
        """Keep asking the autoscaler for the demand until cancelled. The request is repeated because a
        restarted autoscaler forgets it."""
        while True:
            if term() is not None:
                demand = autoscaling_demand(self.world, self.policy, self.clock.now())
                self.request(room_for_all(demand))
            await asyncio.sleep(every_seconds)


@dataclass(eq=False)
class Publisher:
    """Publishes samples, progress and the leader's status to other processes. Each publication contains only
    the values that have changed since the previous one."""

    world: World
    progress: Mapping[TaskId, Progress]
    leader: Callable[[Term], LeaderSeen]
    """Returns the status of this process while it leads the given term."""
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
        """Publish the values that have changed. If they cannot be written now, the next call publishes
        them."""
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
    """Return the leader's status without its idle devices, and the idle devices."""
    if (fleet := leader.fleet) is None:
        return leader, ()
    return replace(leader, fleet=replace(fleet, idle=())), fleet.idle


async def keep_for_the_next_start(
    store: LastValueStore, leader: Callable[[Term], LeaderSeen], term: ReadTerm, every_seconds: Seconds
) -> None:
    """Publish the leader's status until cancelled, each time the counts of events or the findings have
    changed. The next start of this process reads it; this is for an installation in which no other process
    does. Idle devices are left out, because they may be in use at the next start."""
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
        """`slots` maps a model to the number of slots that all gateways have together."""
        self._slots = slots
        self._store = store
        self._clock = clock
        self._term: Term | None = None
        self._shares: SlotShares | None = None
        self._divided: Mapping[str, Shares] = {}

    @property
    def divided(self) -> Mapping[str, Shares] | None:
        """The newest shares of each model; None if there are no slots to divide."""
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
    """Removes finished tasks, old events and old audit notes in small steps."""

    store: TaskStore
    clock: Clock
    retention: Retention
    term: ReadTerm
    heard: Callable[[], Position]
    """Returns the position in the event log that this process's World has reached."""
    may_prune: Callable[[], bool]
    """Returns True if the clock has been right for long enough to delete by it."""

    async def keep(self, every_seconds: Seconds = PRUNE_SECONDS) -> None:
        """Delete expired rows at intervals, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                await self.prune()
            except StaleTerm:
                continue  # the next leader prunes
            except StoreUnavailable as fault:
                log.warning("pruning was interrupted; it continues later", fault=str(fault))

    async def prune(self) -> None:
        """Delete all rows that have expired by now. Raises StaleTerm and StoreUnavailable."""
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
    """Return the models that have a request at any gateway, and those that had one lately; None while the
    database does not answer."""
    present = await _present(store, clock)
    if present is None:
        return None
    return ModelsInUse(
        frozenset().union(*(gateway.in_use for gateway in present)),
        frozenset().union(*(gateway.recent for gateway in present)),
    )


async def _present(store: PresenceStore, clock: Clock) -> list[Presence] | None:
    """Return the gateways that were heard within PRESENT_SECONDS; None if the database does not answer."""
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
    """Read until cancelled which models are in use, while something waits for memory that an idle model
    holds. `read` returns the models in use. `hear` receives them only if they change which model has its
    turn. The first read comes one interval after the wait began: gateways publish their use only once they
    learn that something waits."""
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
    """Report, until cancelled, model servers whose process has ended. These servers are no longer in the
    settings, so they are not asked themselves. `is_gone` returns True if this machine knows that the process
    has ended."""
    while True:
        hear([ServerGone(process) for process in sorted(left_processes(world)) if is_gone(process)])
        await asyncio.sleep(SERVER_GONE_SECONDS)
