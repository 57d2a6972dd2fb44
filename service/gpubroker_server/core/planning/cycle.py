"""The planning cycle: take the tasks in order, find a way for each, decide."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpubroker_server.core.domain.decisions import Decision, granted_mb
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import nodes_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.planning.budget import ProbeBudget, Steps, finish
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
from gpubroker_server.core.planning.queue_order import Head, QueueOrder
from gpubroker_server.core.planning.refusal_cache import RefusalCache
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.planning.tenants.guarantees import Guarantees
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.placement_scores import PlacementScorer
from gpubroker_server.core.world.queue import OrderKey
from gpubroker_server.core.world.world import World

TURN_PROBES = 150
"""Probes of nodes before the caller gets its turn again: some milliseconds."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a cycle stands after one of its slices."""

    began_at: Instant
    """Ageing stands still during a cycle, so that every task is examined once."""
    shares: FairShares
    """What the tenants have by now; not to be changed."""
    scores: PlacementScorer | None = None
    """Of places, as they were when the cycle began."""
    after: OrderKey | None = None
    forecasts: tuple[Forecast, ...] = ()
    refused_by_reservation: int = 0
    """Tasks refused so far because of reservations."""


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
        # 1. Begin the cycle, or go on where the last slice ended.
        self._cache = PlanCache() if cache is None else cache
        self._cursor = cursor or self._begin_cycle(world, policy, now, forecasts)
        self._now = now
        # 2. What changed since then, and what a decision looks at.
        self._cache.open(world, policy, now, self._cursor.began_at, self._cursor.scores)
        self._order = self._open_order(world, policy)
        self._budget = ProbeBudget(may_pause=cache is not None)
        self._rooms, self._view = _view_of(
            world, policy, now, self._cursor, self._cache, self._order, self._budget
        )
        self._refusals = RefusalCache(self._cache.refusals, self._view, self._cache.revisions)
        # 3. Pledges of tasks that no longer wait for them are withdrawn.
        self._after = self._cursor.after
        self._decisions: list[Decision] = [] if self._after is not None else self._withdraw()
        self._under_way: tuple[Head, Task, Steps[Way]] | None = None
        self.is_last = False
        """No task is left to be examined."""

    def take_turn(self, budget: int = TURN_PROBES) -> None:
        """Examine tasks until so many probes are spent. A turn may end in the middle of a search; the next
        one goes on with it."""
        self._budget.allow(budget)
        while True:
            # 4. The next task in order that may find a way.
            if self._under_way is None and not self._next():
                return
            # 5. Find a way for it, and decide.
            if not self._search() or self._budget.is_spent:
                return

    def plan(self) -> Plan:
        """End the slice: what is to be committed now. A search under way is finished first."""
        if self._under_way is not None:
            head, task, steps = self._under_way
            self._decide(head, task, finish(steps))
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

    @property
    def is_searching(self) -> bool:
        """The last turn ended in the middle of a search."""
        return self._under_way is not None

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
        if self._cache.has_news:
            order.requeue_inadmissible()
        return order

    def _withdraw(self) -> list[Decision]:
        draft = self._view.draft
        return [withdraw(draft, task) for task in sorted(draft.pledged()) if not self._awaits_room(task)]

    def _awaits_room(self, task: TaskId) -> bool:
        """It is in the queue, or moves and then goes to the room that is kept for it."""
        world = self._view.draft.world
        row = world.tasks.get(task)
        return task in world.queue or (row is not None and row.is_moving)

    def _next(self) -> bool:
        """Begin the search for the next task; False at the end of the cycle or of the turn."""
        head = self._order.next(self._refusals)
        if head is None:
            if self._order.is_done and not self.is_last:
                # 6. What no task could take goes to running gangs that lack ranks.
                self._decisions += more_ranks(self._view, self._refusals)
                self.is_last = True
            return False
        task = self._view.draft.world.tasks[head.task]
        self._under_way = head, task, self._way_of(task)
        return True

    def _search(self) -> bool:
        """Go on with the search; False if it has to be left in the middle."""
        assert self._under_way is not None, "a search was begun"
        head, task, steps = self._under_way
        try:
            next(steps)
        except StopIteration as end:
            self._decide(head, task, end.value)
            return True
        return False

    def _way_of(self, task: Task) -> Steps[Way]:
        if self._view.draft.pledges_of(task.id):
            return (yield from search_way(task, self._view))
        known = self._refusals.recall(task)
        if known is not None:
            return known
        way = yield from search_way(task, self._view, self._refusals.nodes_to_search(task))
        if isinstance(way, Wait):
            self._refusals.remember(task, way)
        return way

    def _decide(self, head: Head, task: Task, way: Way) -> None:
        self._under_way, self._after = None, head.key
        grown = self._cache.revisions.growth.revision
        if isinstance(way, Wait):
            self._view.reservations.refused_by_reservation += way.reason is WaitReason.RESERVED
            return
        decision = self._admit(task, way) if isinstance(way, Start) else self._evict(task, way)
        self._decisions.append(decision)
        self._order.charge(task, granted_mb(decision))
        if self._cache.revisions.growth.revision > grown or self._is_awaited(decision):
            self._order.requeue_inadmissible()

    def _is_awaited(self, decision: Decision) -> bool:
        """It takes room on a node on which tasks wait for more to come."""
        awaited = self._cache.refusals.awaited
        return any(nodes_of(write.task) & awaited for write in decision.tasks)

    def _admit(self, task: Task, way: Start) -> Decision:
        node = way.places[0].node
        since, draft = self._cache.revisions.changes.at(node), self._view.draft
        was_closed = draft.background.is_closed(node)
        decision = admit(draft, task, way.places, self._now)
        has_closed = draft.background.is_closed(node) is not was_closed
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
    budget: ProbeBudget,
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
        Places(draft, policy, now, scores=cursor.scores, budget=budget, rooms=rooms, tables=cache.places),
        Offers(draft, policy, now, cursor.began_at, cache.offers, rooms),
        budget,
    )
    return rooms, view
