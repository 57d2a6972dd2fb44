"""The planning cycle: take the tasks in order, find a way for each, decide."""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision, granted_mb
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import nodes_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.planning.budget import PROBE_DECIDED, Steps
from gpubroker_server.core.planning.decisions import admit, evict, withdraw
from gpubroker_server.core.planning.find_way import Evict, Start, View, Wait, WaitReason, Way, search_way
from gpubroker_server.core.planning.forecasts.limits import LimitReservations
from gpubroker_server.core.planning.forecasts.reservations import Forecast, Reservations
from gpubroker_server.core.planning.growth import more_ranks
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.node_room import NodeRooms
from gpubroker_server.core.planning.nodes.offers import Offers
from gpubroker_server.core.planning.places import Places, scores_of
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.planning.queue_order import QueueOrder
from gpubroker_server.core.planning.refusal_cache import RefusalCache
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.planning.tenants.guarantees import Guarantees
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.placement_scores import PlacementScorer
from gpubroker_server.core.world.queue import OrderKey
from gpubroker_server.core.world.world import World

TURN_PROBES = 150
"""Probes of nodes before the caller gets its turn again: some milliseconds."""


class Cursor(Struct, frozen=True):
    """The position of a cycle after one of its slices."""

    began_at: Instant
    """Ageing stands still during a cycle, so that every task is examined once."""
    shares: FairShares
    """Usage per tenant so far in this cycle. Treat as read-only."""
    scores: PlacementScorer | None = None
    """Scores of places by the demands that were usual when the cycle began."""
    after: OrderKey | None = None
    """The place of the last task that was examined; None before the first."""
    forecasts: tuple[Forecast, ...] = ()
    refused_by_reservation: int = 0
    """Tasks refused so far because of reservations."""


class Plan(Struct, frozen=True):
    """One slice of a cycle. Its decisions build on each other, in this order."""

    decisions: tuple[Decision, ...]
    cursor: Cursor | None
    """The cursor for the next slice; None when the cycle is finished."""


def plan_cycle(
    world: World,
    policy: Policy,
    now: Instant,
    cursor: Cursor | None = None,
    budget: int = TURN_PROBES,
    cache: PlanCache | None = None,
    forecasts: Iterable[Forecast] = (),
) -> Plan:
    """Plan one slice: it ends with the task during which `budget` probes of nodes are spent.

    A new cycle (no cursor) first lets delayed tasks whose time has come into the World's queue, and changes
    nothing else. The next slice needs a World in which this slice's decisions are applied. Work-conserving:
    a task without room holds no other back, except by what is pledged to it or what one of the `forecasts`
    reserves. A `cache` saves probes and changes no plan, except that a task submitted between two slices may
    have to wait for the next cycle. Keep it for the next slice and the next cycle.
    """
    part = Slice(world, policy, now, cursor, cache, forecasts)
    part.take_turn(budget)
    return part.plan()


class Slice:
    """A part of a cycle whose decisions are committed together, planned in one turn or several. Between two
    turns tasks may enter the queue; nothing else in the World may change. See `plan_cycle`."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        now: Instant,
        cursor: Cursor | None = None,
        cache: PlanCache | None = None,
        forecasts: Iterable[Forecast] = (),
    ) -> None:
        self._may_pause = cache is not None
        """True if a turn may end before a task is decided on. Only a cache keeps what such a turn has found:
        without one the next slice would begin where this one did, for ever."""
        # Begin the cycle, or go on where the last slice ended.
        self._cache = PlanCache() if cache is None else cache
        self._cursor = cursor or self._begin_cycle(world, policy, now, forecasts)
        self._now = now
        # What changed since then, and what a decision looks at.
        self._cache.open(world, policy, now, self._cursor.began_at, self._cursor.scores)
        self._order = self._open_order(world, policy)
        self._rooms, self._view = _view_of(world, policy, now, self._cursor, self._cache, self._order)
        self._refusals = RefusalCache(self._cache.refusals, self._view, self._cache.revisions)
        self._after = self._cursor.after
        self._decisions: list[Decision] = []
        self.is_searching = False
        """The last turn ended in the middle of a search."""
        self.is_last = False
        """No task is left to be examined."""
        self._work: Steps[None] | None = self._examine()

    def take_turn(self, budget: float = TURN_PROBES) -> None:
        """Examine tasks until so many probes are spent. A turn may end in the middle of a search; the next
        one goes on with it. This is the one place where probes are counted."""
        assert self._work is not None, "the slice has not ended"
        spent, before = 0.0, self._after
        for cost in self._work:
            spent += cost
            if spent >= budget and (self._may_pause or self._after is not before):
                return
        self.is_last = True

    def plan(self) -> Plan:
        """End the slice: what is to be committed now. A search under way is finished first."""
        assert self._work is not None, "a slice ends once"
        while self.is_searching:  # later, it would go on over nodes that the commit has changed
            next(self._work)
        self._work = None  # it refers to this slice: garbage would wait for the collector of cycles
        cursor = None
        if not self.is_last:
            cursor = replace(
                self._cursor,
                after=self._after,
                shares=self._order.shares.copy(),
                refused_by_reservation=self._view.reservations.refused_by_reservation,
            )
        self._cache.order = None if cursor is None else self._order
        self._cache.close(self._decisions)
        return Plan(tuple(self._decisions), cursor)

    def _examine(self) -> Steps[None]:
        """Examine every task that may find a way, in five calls. Each decision enters the draft, so that the
        next one builds on it."""
        world = self._view.draft.world
        # 1. Pledges of tasks that no longer wait for them end.
        self._decisions += self._withdraw()
        # 2. The next task in order that may find a way.
        while (head := (yield from self._order.next(self._refusals))) is not None:
            # 3. Find a way for it.
            self.is_searching, task = True, world.tasks[head.task]
            way = yield from self._way_of(task)
            # 4. Decide.
            self._after, self.is_searching = head.key, False
            self._decisions += self._decide(task, way)
            yield PROBE_DECIDED
        # 5. What no task could take goes to running gangs that lack ranks.
        self._decisions += more_ranks(self._view, self._refusals)

    def _begin_cycle(
        self, world: World, policy: Policy, now: Instant, forecasts: Iterable[Forecast]
    ) -> Cursor:
        world.enter_due(now)
        self._cache.order = None  # of a cycle that was given up
        return Cursor(
            now, FairShares(world, policy, now), scores_of(world, policy), forecasts=tuple(forecasts)
        )

    def _open_order(self, world: World, policy: Policy) -> QueueOrder:
        began_at, after, shares = self._cursor.began_at, self._cursor.after, self._cursor.shares
        order = self._cache.order
        if order is None or not order.continues(world, began_at, after, shares):
            return QueueOrder(world, policy, began_at, after, shares.copy())
        if self._cache.has_grown:
            order.requeue_inadmissible()
        elif self._cache.has_news:
            order.requeue_awaiting()
        return order

    def _withdraw(self) -> list[Decision]:
        draft = self._view.draft
        if self._after is not None:
            return []  # done at the beginning of the cycle
        return [withdraw(draft, task) for task in sorted(draft.pledged()) if not self._awaits_room(task)]

    def _awaits_room(self, task: TaskId) -> bool:
        """Return True if the task is in the queue, or moves and then goes to the room that is kept for it."""
        world = self._view.draft.world
        row = world.tasks.get(task)
        return task in world.queue or (row is not None and row.is_moving)

    def _way_of(self, task: Task) -> Steps[Way]:
        if self._view.draft.pledges_of(task.id):
            # What is pledged to it is free for it alone, so no answer about its equals is one about it.
            return (yield from search_way(task, self._view))
        known = self._refusals.recall(task)
        if known is not None:
            return known
        way = yield from search_way(task, self._view, self._refusals.nodes_to_search(task))
        if isinstance(way, Wait):
            self._refusals.remember(task, way)
        return way

    def _decide(self, task: Task, way: Way) -> list[Decision]:
        """Return the decision, if the task need not wait, and examine again what it may have changed."""
        if isinstance(way, Wait):
            self._view.reservations.refused_by_reservation += way.reason is WaitReason.RESERVED
            return []
        grown = self._cache.revisions.growth.revision
        decision = self._admit(task, way) if isinstance(way, Start) else self._evict(task, way)
        self._order.charge(task, granted_mb(decision))
        if self._cache.revisions.growth.revision > grown:
            self._order.requeue_inadmissible()
        elif self._is_awaited(decision):
            self._order.requeue_awaiting()
        return [decision]

    def _is_awaited(self, decision: Decision) -> bool:
        """Return True if the decision takes room on a node on which tasks wait for more to come."""
        awaited = self._cache.refusals.awaited
        return any(nodes_of(write.task) & awaited for write in decision.tasks)

    def _admit(self, task: Task, way: Start) -> Decision:
        node = way.places[0].node
        since, draft = self._cache.revisions.changes.at(node), self._view.draft
        was_closed = draft.background.is_closed(node)
        decision = admit(draft, task, way.places, self._now)
        has_closed = draft.background.is_closed(node) is not was_closed
        # The answers kept about the node are adjusted, instead of dropped, only if the placement is all that
        # changed there: the end of a pledge and a node that closes matter to some priorities only.
        if not (task.demand.bundles or decision.pledges or has_closed):
            self._rooms.took(node, since, task, way.places[0])
            self._view.reservations.on_placement(node, since, decision.tasks[0].task, way.places[0])
        self._view.reservations.on_start(task.id)
        self._view.limits.on_start(task.id)
        return decision

    def _evict(self, task: Task, way: Evict) -> Decision:
        place, is_shared = self._order.key_of(task), self._order.shares.has_several_tenants
        kept_up_to = self._view.guarantees.kept_up_to(task, place, is_shared=is_shared)
        return evict(self._view.draft, task, way.eviction, self._now, kept_up_to=kept_up_to)


def _view_of(
    world: World,
    policy: Policy,
    now: Instant,
    cursor: Cursor,
    cache: PlanCache,
    order: QueueOrder,
) -> tuple[NodeRooms, View]:
    draft = Draft(world, cache.revisions.changes, cache.revisions.growth)
    rooms = NodeRooms(draft, policy, now, cursor.began_at, cache.rooms)
    quotas = Quotas(draft, policy, cache.needs)
    guarantees = Guarantees(draft, policy, quotas)
    view = View(
        draft,
        policy,
        now,
        quotas,
        guarantees,
        Reservations(
            draft, policy, now, guarantees, order.key_of, cursor.forecasts, cursor.refused_by_reservation
        ),
        LimitReservations(draft, policy, now, order.key_of, cursor.forecasts),
        Places(draft, policy, now, scores=cursor.scores, rooms=rooms, tables=cache.places),
        Offers(draft, policy, now, cursor.began_at, cache.offers, rooms),
    )
    return rooms, view
