"""The planning cycle: pending tasks in order -> placement -> preemption -> decisions."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpubroker_server.core.domain.decisions import Decision, given_mb
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import nodes_of
from gpubroker_server.core.domain.task import Placement, StopReason, Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.lifecycle.model_lifecycle import in_time
from gpubroker_server.core.planning.backfill import Forecast, Guards
from gpubroker_server.core.planning.cycle_order import Agenda
from gpubroker_server.core.planning.deciding import admit, evict, withdraw
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.fair_share import Shares
from gpubroker_server.core.planning.guarantees import Claims
from gpubroker_server.core.planning.lines import Lines
from gpubroker_server.core.planning.looks import Looks, Paused
from gpubroker_server.core.planning.memory import Memory
from gpubroker_server.core.planning.node_room import Outlooks
from gpubroker_server.core.planning.offers import Offers
from gpubroker_server.core.planning.placement import Places, worth_of
from gpubroker_server.core.planning.preemption import Eviction
from gpubroker_server.core.planning.prospects import Prospects
from gpubroker_server.core.planning.quota import Quotas
from gpubroker_server.core.world.placement_scores import Worth
from gpubroker_server.core.world.queue import OrderKey
from gpubroker_server.core.world.world import World

SLICE = 150
"""Looks at nodes for a task before the caller gets its turn again: some milliseconds."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a cycle stands after one of its slices."""

    ordered_at: Instant
    """When the cycle began. Ageing stands still during it, so that every task is examined once."""
    shares: Shares
    """How the tenants stand by now; not to be changed."""
    worth: Worth | None = None
    """Of places, to what was usual when the cycle began."""
    after: OrderKey | None = None
    forecasts: tuple[Forecast, ...] = ()
    kept_away: int = 0
    """How many tasks could only have taken what would delay a forecast."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One slice of a cycle. Its decisions build on each other, in this order."""

    decisions: tuple[Decision, ...]
    cursor: Cursor | None
    """None when the cycle is finished."""


def plan_cycle(
    world: World,
    policy: Policy,
    now: Instant,
    cursor: Cursor | None = None,
    budget: int = SLICE,
    memory: Memory | None = None,
    forecasts: Iterable[Forecast] = (),
) -> Plan:
    """Decide what to start and whom to stop, in a slice of one turn: it ends after `budget` looks at nodes.

    A new cycle (no cursor) first lets delayed tasks whose time has come into the queue of this World,
    which is all that it changes. The next slice needs a World in which this slice's decisions are applied.
    Work-conserving: a task for which there is no room holds nobody back, unless room is pledged to it, or one
    of the `forecasts` with which the cycle begins keeps it: then only who cannot delay it takes that room.
    `memory` saves looks and changes no plan, except that who comes into the queue between two slices may have
    to wait for the next cycle; keep it for the next slice and the next cycle.
    """
    part = Slice(world, policy, now, cursor, memory, forecasts)
    part.take_turn(budget)
    return part.plan()


class Slice:
    """A part of a cycle whose decisions are carried out together, made in one turn or several.

    Between two turns tasks may come into the queue; nothing else in the World may change. See `plan_cycle`.
    """

    def __init__(
        self,
        world: World,
        policy: Policy,
        now: Instant,
        cursor: Cursor | None = None,
        memory: Memory | None = None,
        forecasts: Iterable[Forecast] = (),
    ) -> None:
        if cursor is None:
            world.enter_due(now)
            shares, worth = Shares(world, policy, now), worth_of(world, policy)
            cursor = Cursor(now, shares, worth, forecasts=tuple(forecasts))
            if memory is not None:
                memory.agenda = None  # of a cycle that was given up
        self._looks = looks = Looks(may_pause=memory is not None)
        memory = Memory() if memory is None else memory
        memory.open(world, policy, now, cursor.ordered_at, cursor.worth)
        self._now = now
        self._cursor = cursor
        self._memory = memory
        self._draft = draft = Draft(world, memory.changes, memory.growth)
        self._outlooks = outlooks = Outlooks(draft, policy, now, cursor.ordered_at, memory.outlooks)
        self._places = places = Places(draft, policy, now, memory, cursor.worth, looks, outlooks)
        offers = Offers(draft, policy, now, cursor.ordered_at, memory.offers, outlooks)
        self._quotas = Quotas(draft, policy, memory.needs)
        self._shares = cursor.shares.copy()
        self._agenda = agenda = self._open_agenda(world, policy)
        self._claims = claims = Claims(draft, policy, self._quotas)
        self._guards = Guards(draft, policy, now, claims, agenda.key_of, cursor.forecasts, cursor.kept_away)
        self._lines = Lines(draft, policy, now, agenda.key_of, cursor.forecasts)
        self._prospects = Prospects(
            draft, policy, now, memory, places, offers, looks, self._quotas, claims, self._guards
        )
        self._decisions: list[Decision] = []
        self._after = cursor.after
        self.is_last = False
        """Nobody is left to be examined."""
        if cursor.after is None:
            self._withdraw()

    def _open_agenda(self, world: World, policy: Policy) -> Agenda:
        began_at, after = self._cursor.ordered_at, self._cursor.after
        agenda = self._memory.agenda
        if agenda is None or not agenda.goes_on(world, began_at, after, self._shares):
            return Agenda(world, policy, began_at, after, self._shares)
        if self._memory.needs_wake:
            agenda.wake()
        return agenda

    def _withdraw(self) -> None:
        stragglers = sorted(task for task in self._draft.pledged() if not self._awaits_room(task))
        self._decisions += [withdraw(self._draft, task) for task in stragglers]

    def _awaits_room(self, task: TaskId) -> bool:
        """It is in the queue, or will be, and then goes to the room that is kept for it."""
        row = self._draft.world.tasks.get(task)
        return task in self._draft.world.queue or (row is not None and row.is_moving)

    def plan(self) -> Plan:
        """What is to be carried out now. The slice is over."""
        cursor = None
        if not self.is_last:
            shares, kept_away = self._agenda.shares.copy(), self._guards.kept_away
            cursor = replace(self._cursor, after=self._after, shares=shares, kept_away=kept_away)
        self._memory.agenda = None if cursor is None else self._agenda
        self._memory.close(self._decisions)
        return Plan(tuple(self._decisions), cursor)

    def take_turn(self, budget: int = SLICE) -> None:
        """Examine at least one task, and more until so many looks at nodes are taken."""
        self._looks.allow(budget)
        began_after = self._after
        while self._after == began_after or not self._looks.are_spent:
            head = self._agenda.next(self._prospects)
            if head is None:
                self.is_last = self._agenda.is_done
                return
            before = self._memory.growth.revision
            task = self._draft.world.tasks[head.task]
            decision = self._decide(task)
            if decision is Paused.HERE:
                self._agenda.put_back(head, self._after)
                return
            self._after = head.key
            if decision is not None:
                self._decisions.append(decision)
                self._agenda.charge(task, given_mb(decision))
                if decision.why == "admit":
                    self._guards.started(task.id)
                    self._lines.started(task.id)
                if self._memory.growth.revision > before or self._is_awaited(decision):
                    self._agenda.wake()

    def _is_awaited(self, decision: Decision) -> bool:
        """It takes room where some wait for more to come."""
        return any(nodes_of(write.task) & self._memory.awaited for write in decision.tasks)

    def _decide(self, task: Task) -> Decision | Paused | None:
        """Admit the task, or make room for it, or neither. One with pledges waits for what they bring."""
        if not self._draft.pledges_of(task.id) and self._lines.ahead_of(task):
            return None
        if self._quotas.is_short(task):
            return None if self._draft.pledges_of(task.id) else self._make_room_in_quota(task)
        if self._draft.pledges_of(task.id):
            if task.demand.bundles:
                gang = self._places.gang(task)
                return None if gang is None else admit(self._draft, task, gang, self._now)
            is_moved = task.stop_reason is StopReason.MOVE
            placed = self._places.kept(task) if is_moved else self._places.best_of(task.id, task)
            if placed is None or placed is Paused.HERE:
                return placed
            return admit(self._draft, task, (placed,), self._now)
        group = self._draft.world.queue.group_of(task.id)
        is_refused = self._prospects.is_refused(group)
        if is_refused and not self._prospects.may_reclaim(group):
            return None
        if self._prospects.kept_away.includes(task, group.kin):
            return None
        if task.demand.bundles:
            found = self._prospects.gang(task, group.kin)
            if isinstance(found, tuple):
                return admit(self._draft, task, found, self._now)
            return self._enter(task, found)
        placement = self._prospects.place(task, group.kin)
        if placement is Paused.HERE:
            return placement
        if placement is None:
            way = self._prospects.reclaimed(task, group.kin)
            if way is not None:
                return self._evict(task, way)
            if is_refused:
                return None
            return self._enter(task, self._prospects.eviction(task, group.kin))
        placement = self._prospects.place_beside(task, group.kin, placement)
        if placement is not None:
            return self._admit(task, placement)
        return self._enter(task, self._prospects.eviction(task, group.kin, has_room=True))

    def _admit(self, task: Task, placement: Placement) -> Decision:
        since = self._memory.changes.at(placement.node)
        decision = admit(self._draft, task, (placement,), self._now)
        if not decision.pledges:
            self._outlooks.took(placement.node, since, task, placement)
            self._guards.took(placement.node, since, decision.tasks[0].task, placement)
        return decision

    def _make_room_in_quota(self, task: Task) -> Decision | None:
        way = self._prospects.in_quota(task, self._draft.world.queue.group_of(task.id).kin)
        return None if way is None else self._evict(task, way)

    def _evict(self, task: Task, eviction: Eviction) -> Decision | None:
        if not in_time(task, eviction.deadline_at):
            return None
        place, is_shared = self._agenda.key_of(task), self._shares.are_several
        kept_up_to = self._claims.kept_up_to(task, place, is_shared=is_shared)
        return evict(self._draft, task, eviction, self._now, kept_up_to=kept_up_to)

    def _enter(self, task: Task, found: Eviction | Paused | None) -> Decision | Paused | None:
        return self._evict(task, found) if isinstance(found, Eviction) else found
