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
"""The number of probes of nodes, a few milliseconds of work, after which the caller gets its turn again."""


class Cursor(Struct, frozen=True):
    """The position of a cycle after one of its slices."""

    began_at: Instant
    """The time for which tasks are aged during the whole cycle, so that every task is examined once."""
    shares: FairShares
    """Usage per tenant so far in this cycle. Treat as read-only."""
    scores: PlacementScorer | None = None
    """The scores of places by the demands that were usual when the cycle began."""
    after: OrderKey | None = None
    """The place of the last task that was examined; None before the first."""
    forecasts: tuple[Forecast, ...] = ()
    refused_by_reservation: int = 0
    """The number of tasks refused so far because of reservations."""


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
    """Plan one slice, which ends with the task during which `budget` probes of nodes are spent.

    Without a cursor a new cycle begins: delayed tasks whose time has come enter the World's queue, and
    nothing else in the World changes. The next slice needs a World in which this slice's decisions are
    applied.

    The cycle is work-conserving: a task without room holds no other task back, except by what is pledged to
    it or what one of the `forecasts` reserves. A `cache` saves probes and changes no plan, except that a task
    submitted between two slices may have to wait for the next cycle. Keep the cache for the next slice and
    the next cycle.
    """
    part = Slice(world, policy, now, cursor, cache, forecasts)
    part.take_turn(budget)
    return part.plan()


def has_nothing_to_plan(world: World) -> bool:
    """Return True if no plan of this World has decisions: no task may start now or later, no pledge may end,
    and no running gang lacks ranks. Most cycles only take reports of runs, while nothing waits."""
    queue = world.queue
    return not (queue.groups or queue.delayed or world.pledges or world.growable)


class Slice:
    """A part of a cycle, planned in one turn or several, whose decisions are committed together. Between two
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
        """True if a turn may end before a task is decided on. That needs a cache, which keeps what the turn
        has found. Without a cache each slice would begin at the same task and never get past it."""
        # Begin the cycle, or go on where the last slice ended.
        self._cache = PlanCache() if cache is None else cache
        self._cursor = cursor or self._begin_cycle(world, policy, now, forecasts)
        self._now = now
        # Learn what changed since the last slice, and collect what a decision looks at.
        self._cache.open(world, policy, now, self._cursor.began_at, self._cursor.scores)
        self._order = self._open_order(world, policy)
        self._rooms, self._view = _view_of(world, policy, now, self._cursor, self._cache, self._order)
        self._refusals = RefusalCache(self._cache.refusals, self._view, self._cache.revisions)
        self._after = self._cursor.after
        self._decisions: list[Decision] = []
        self.is_searching = False
        """True if the last turn ended in the middle of a search."""
        self.is_last = False
        """True if no task is left to be examined."""
        self._work: Steps[None] | None = self._examine()

    def take_turn(self, budget: float = TURN_PROBES) -> None:
        """Examine tasks until `budget` probes are spent. A turn may end in the middle of a search, and the
        next turn continues that search. Probes are counted nowhere else."""
        assert self._work is not None, "the slice has not ended"
        spent, before = 0.0, self._after
        for cost in self._work:
            spent += cost
            if spent >= budget and (self._may_pause or self._after is not before):
                return
        self.is_last = True

    def plan(self) -> Plan:
        """End the slice, and return the plan that is to be committed now. A search under way is finished
        first."""
        assert self._work is not None, "a slice ends once"
        while self.is_searching:  # if it ended later, it would look at nodes that the commit has changed
            next(self._work)
        self._work = None  # break the reference cycle with the generator, so that the slice is freed at once
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
        """Examine every task that may find a way, in five steps. Each decision enters the draft, so that the
        next decision builds on it."""
        world = self._view.draft.world
        # 1. End the pledges of tasks that no longer wait for them.
        self._decisions += self._withdraw()
        # 2. Take the next task in order that may find a way.
        while (head := (yield from self._order.next(self._refusals))) is not None:
            # 3. Find a way for the task.
            self.is_searching, task = True, world.tasks[head.task]
            way = yield from self._way_of(task)
            # 4. Decide.
            self._after, self.is_searching = head.key, False
            self._decisions += self._decide(task, way)
            yield PROBE_DECIDED
        # 5. Give what no task could take to running gangs that lack ranks.
        self._decisions += more_ranks(self._view, self._refusals)

    def _begin_cycle(
        self, world: World, policy: Policy, now: Instant, forecasts: Iterable[Forecast]
    ) -> Cursor:
        world.enter_due(now)
        self._cache.order = None  # drop the order of a cycle that was given up
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
            return []  # the first slice of the cycle has done this
        return [withdraw(draft, task) for task in sorted(draft.pledged()) if not self._awaits_room(task)]

    def _awaits_room(self, task: TaskId) -> bool:
        """Return True if the task is in the queue, or is being moved to room that is kept for it."""
        world = self._view.draft.world
        row = world.tasks.get(task)
        return task in world.queue or (row is not None and row.is_moving)

    def _way_of(self, task: Task) -> Steps[Way]:
        if self._view.draft.pledges_of(task.id):
            # What is pledged to a task is free for that task alone, so answers about equal tasks do not
            # apply.
            return (yield from search_way(task, self._view))
        remembered = self._refusals.recall(task)
        if remembered is not None:
            return remembered
        way = yield from search_way(task, self._view, self._refusals.nodes_to_search(task))
        if isinstance(way, Wait):
            self._refusals.remember(task, way)
        return way

    def _decide(self, task: Task, way: Way) -> list[Decision]:
        """Return the decision, if the task need not wait, and requeue the tasks whose refusal it may
        change."""
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
        """Return True if the decision takes room on a node where tasks wait for room that is being given
        back."""
        awaited = self._cache.refusals.awaited
        return any(nodes_of(write.task) & awaited for write in decision.tasks)

    def _admit(self, task: Task, way: Start) -> Decision:
        node = way.places[0].node
        since, draft = self._cache.revisions.changes.at(node), self._view.draft
        was_closed = draft.background.is_closed(node)
        decision = admit(draft, task, way.places, self._now)
        has_closed = draft.background.is_closed(node) is not was_closed
        # The answers kept about the node are adjusted, instead of dropped, only if the placement is all that
        # changed on the node: the end of a pledge and the closing of a node matter to some priorities only.
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
