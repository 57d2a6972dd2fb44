"""The decision about one task: start, preempt or wait. The cycle, explain, what-if and fit use it."""

from collections.abc import Mapping, Set
from enum import StrEnum
from itertools import islice
from typing import ClassVar

from msgspec import Struct

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import rank_task
from gpubroker_server.core.domain.task import StopReason, Task
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.planning.budget import CLOSE_LOOK, Steps, finish
from gpubroker_server.core.planning.forecasts.limits import LimitReservations
from gpubroker_server.core.planning.forecasts.reservations import Reservations
from gpubroker_server.core.planning.gangs.gang_search import Gang
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.offers import Offers
from gpubroker_server.core.planning.nodes.victims import Together
from gpubroker_server.core.planning.places import Found, Places
from gpubroker_server.core.planning.preemption.eviction import (
    Eviction,
    RoomBeingFreed,
    clear_of_idle_work,
    could_make_room,
    is_coming,
    may_preempt,
    search_eviction,
)
from gpubroker_server.core.planning.preemption.gang_eviction import choose_for_gang
from gpubroker_server.core.planning.preemption.reclaim import (
    evict_above_floors,
    evict_within_borrower_rule,
    make_room_in_limit,
    make_room_in_quota,
    reclaim,
    reclaim_for_gang,
)
from gpubroker_server.core.planning.tenants.guarantees import Guarantees
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.background import IDLE_TOP


class View(Struct, frozen=True):
    """Everything that a decision about one task looks at, in one draft."""

    draft: Draft
    policy: Policy
    now: Instant
    quotas: Quotas
    guarantees: Guarantees
    reservations: Reservations
    limits: LimitReservations
    places: Places
    offers: Offers
    most_nodes: int | None = None
    """The greatest number of nodes that are searched for victims; None for all nodes."""

    def is_short_of_limits(self, task: Task) -> bool:
        """Return True if a limit of the whole cluster has too little left for the task, whatever the nodes
        have."""
        return bool(self.draft.short_of(task, self.policy.custom_limits))


class Start(Struct, frozen=True):
    """The task starts now."""

    places: Gang
    """The place of the task; of a gang, one place for each rank."""
    eviction: ClassVar[None] = None


class Evict(Struct, frozen=True):
    """The task starts when the victims have left."""

    eviction: Eviction
    places: ClassVar[None] = None


class WaitReason(StrEnum):
    """Reasons for which a task can neither start nor make room."""

    NO_ROOM = "no_room"
    """No node has room, and none would have it without the runs that may be preempted."""
    COMING = "coming"
    """Room for the task is being given back; no run is stopped for it."""
    RESERVED = "reserved"
    """The room that the task could use is reserved for tasks ahead of it."""
    LIMIT = "limit"
    """A limit of the cluster has too little left, or tasks ahead of this one wait for the same limit or
    quota."""
    QUOTA = "quota"
    """The task's tenant has what it may have, and no run of its own that could give way."""
    GUARANTEE = "guarantee"
    """The task's tenant would borrow, and what it could preempt is guaranteed to others."""
    PLEDGED = "pledged"
    """The victims of the task have not left yet."""


class Wait(Struct, frozen=True):
    reason: WaitReason
    coming_on: tuple[NodeName, ...] = ()
    """Nodes on which room for the task is being given back, or is reserved."""
    by_tenant: bool = False
    """True if a quota or a guarantee had a part in the answer: an equal task of another tenant may find a
    way."""
    places: ClassVar[None] = None
    eviction: ClassVar[None] = None


Way = Start | Evict | Wait


def find_way(task: Task, view: View, nodes: Set[NodeName] | None = None) -> Way:
    """Return the decision for a pending task. Changes nothing.

    The tasks ahead of this one are assumed to be decided already, and to wait. All nodes outside `nodes` are
    known to offer nothing, neither room nor victims. These steps are tried in this order:

    1. If a limit of the whole cluster is used up, runs that use the custom resource make room for a critical
       task; any other task waits. A task also waits if tasks ahead of it wait for the limit.
    2. If the tenant's quota is used up, runs of the tenant make room, or the task waits.
    3. The task starts at a place that delays no reservation ahead of it.
    4. Borrowers give back what the task's tenant is guaranteed.
    5. Runs of lower priority are preempted where no reservation is in the way. Idle work is preempted at the
       place that the task would take if there were no idle work, provided that this makes enough room.
    6. Runs of lower priority are preempted on nodes with reservations of tasks ahead, if those tasks may not
       preempt the runs themselves.

    A task with pledges waits for its victims. If too little will be released, because a victim is in
    quarantine, another way is looked for from step 2 on, and the task keeps its pledges until it has one.
    """
    return finish(search_way(task, view, nodes))


def search_way(task: Task, view: View, nodes: Set[NodeName] | None = None) -> Steps[Way]:
    """Decide like `find_way`, but in steps, each of which yields its cost."""
    has_pledges = bool(view.draft.pledges_of(task.id))
    if not has_pledges and view.limits.ahead_of(task):
        return Wait(WaitReason.LIMIT)
    if not has_pledges and view.is_short_of_limits(task):
        return (yield from _make_room_in_limit(task, view))
    if view.quotas.is_short(task):
        return Wait(WaitReason.PLEDGED) if has_pledges else (yield from _make_room_in_quota(task, view))
    places, unreserved = yield from place(task, view, nodes)
    if places is not None:
        return Start(places)
    if has_pledges:
        return (yield from _other_way(task, view))
    if task.demand.bundles:
        if unreserved is not None:
            return Wait(WaitReason.RESERVED, tuple(placement.node for placement in unreserved))
        return (yield from _make_room_for_gang(task, view))
    if unreserved is None:
        eviction = yield from _reclaim(task, view)
        if eviction is not None:
            return Evict(eviction)
    return (yield from _preempt(task, view, nodes, has_room=unreserved is not None))


def _other_way(task: Task, view: View) -> Steps[Way]:
    """Look for another way for a task with pledges, as if it had none. If no way is found, the pledges stay:
    releasing them would let another task start on that memory, only to be preempted again."""
    draft = view.draft
    if draft.is_room_coming(task.id):
        return Wait(WaitReason.PLEDGED)
    ended_pledges = draft.end_pledges(task.id)
    way = yield from search_way(task, view)
    for pledge in ended_pledges:
        draft.put_pledge(pledge)
    return Wait(WaitReason.PLEDGED) if isinstance(way, Wait) else way


def place(
    task: Task, view: View, nodes: Set[NodeName] | None = None
) -> Steps[tuple[Gang | None, Gang | None]]:
    """Return where the task may start now, and where it would start if nothing were reserved. Quotas are
    ignored. All nodes outside `nodes` are known to have no room."""
    has_pledges = bool(view.draft.pledges_of(task.id))
    if task.demand.bundles:
        yield CLOSE_LOOK * len(view.offers.nodes)
        gang = view.places.gang(task)
        return gang if gang is None or has_pledges else _gang_beside_reservations(task, view, gang), gang
    if has_pledges and task.stop_reason is StopReason.MOVE:
        # A move takes nothing from other tasks, so a moved run starts where room is kept for it, or not yet.
        reserved_place = view.places.kept(task)
        places = None if reserved_place is None else (reserved_place,)
        return places, places
    table = yield from view.places.table(task, nodes)
    if not table:
        return None, None
    best = (min(table.values())[1],)
    return beside_reservations(task, view, table), best


def _gang_beside_reservations(task: Task, view: View, best: Gang) -> Gang | None:
    """Return the places where the gang delays no reservation ahead of it: `best`, or others for fewer ranks.

    Places for as many ranks as `best` that delay no reservation at all are preferred to `best`. Otherwise a
    gang that starts when its forecast says could take other places than the forecast assumed, and make a
    later forecast late.
    """
    reservations = view.reservations
    if not reservations.refuses(task, best, all_reservations=True):
        return best
    if not reservations.is_behind_all(task):
        beside_all = view.places.gang(task, reservations, all_reservations=True)
        if beside_all is not None and len(beside_all) == len(best):
            return beside_all
    if not reservations.refuses(task, best, all_reservations=False):
        return best
    return view.places.gang(task, reservations, all_reservations=False)


def beside_reservations(task: Task, view: View, table: Mapping[NodeName, Found]) -> Gang | None:
    """Return the best place where the task delays no reservation ahead of it, and if possible none at all. A
    task with pledges gets the best place, whatever it delays."""
    reservations, best = view.reservations, min(table.values())[1]
    if view.draft.pledges_of(task.id):
        return (best,)
    for all_reservations in (False,) if reservations.is_behind_all(task) else (True, False):
        if not reservations.refuses(task, (best,), all_reservations=all_reservations):
            return (best,)
        start = view.places.best_beside(reservations, task, table, all_reservations=all_reservations)
        if start is not None:
            return (start,)
    return None


def _make_room_in_limit(task: Task, view: View) -> Steps[Way]:
    if view.quotas.is_short(task):
        return Wait(WaitReason.LIMIT)  # no run is stopped for a task that its quota would hold back next
    nodes = view.offers.nodes - view.reservations.nodes_closed_to(task)
    yield CLOSE_LOOK * len(nodes)
    eviction = make_room_in_limit(view.offers, task, view.now, nodes)
    return Evict(eviction) if isinstance(eviction, Eviction) else Wait(WaitReason.LIMIT)


def _make_room_in_quota(task: Task, view: View) -> Steps[Way]:
    missing_mb = view.quotas.missing_mb(task)
    floors = _floors(task, view)
    nodes = view.offers.nodes - view.reservations.nodes_closed_to(task) | floors.keys()
    yield CLOSE_LOOK * len(nodes)
    eviction = make_room_in_quota(view.offers, task, missing_mb, view.now, nodes, floors)
    if eviction is not None:
        return Evict(eviction)
    return Wait(WaitReason.QUOTA if missing_mb else WaitReason.COMING, by_tenant=True)


def _floors(task: Task, view: View) -> dict[NodeName, int]:
    """Return the nodes with reservations ahead of the task where runs may be preempted for it nevertheless,
    each with the lowest priority of such runs (`Reservations.victim_floors`).

    Nodes where the task, or a rank of it, would fit without a victim are left out: that room is reserved.
    """
    floors = view.reservations.victim_floors(task) if view.reservations.on else {}
    parts = [rank_task(task, rank) for rank in range(len(task.demand.bundles))] or [task]
    return {
        node: floor
        for node, floor in floors.items()
        if node in view.offers.nodes and not any(is_coming(view.offers, part, node) for part in parts)
    }


def _reclaim(task: Task, view: View) -> Steps[Eviction | None]:
    surplus = view.guarantees.reclaimable(task)
    if not surplus or not may_preempt(view.offers, task):
        return None
    yield CLOSE_LOOK * len(view.offers.nodes)
    if any(is_coming(view.offers, task, node) for node in view.offers.nodes):
        return None
    floors = _floors(task, view)
    nodes = view.offers.nodes - view.reservations.nodes_closed_to(task) | floors.keys()
    return reclaim(view.offers, task, surplus, view.now, nodes, floors)


def _preempt(task: Task, view: View, nodes: Set[NodeName] | None, *, has_room: bool) -> Steps[Way]:
    """Look for runs that may be preempted for the task. `has_room` is True if there are places for the task
    that are all reserved."""
    offers, by_tenant = view.offers, bool(view.guarantees.reclaimable(task))
    closed = view.reservations.off_limits(task) & offers.nodes
    waits = WaitReason.RESERVED if has_room else WaitReason.NO_ROOM
    if not has_room:
        # The search for victims looks for room that is coming on the open nodes, so only closed ones are
        # left.
        coming_on = next((node for node in sorted(closed) if is_coming(offers, task, node)), None)
        if coming_on is not None:
            return Wait(WaitReason.COMING, (coming_on,), by_tenant)
    if not may_preempt(offers, task):
        return Wait(waits, by_tenant=by_tenant)
    open_nodes = (offers.nodes if nodes is None else nodes) - closed
    if view.most_nodes is not None:
        promising = (node for node in sorted(open_nodes) if could_make_room(offers, task, node))
        open_nodes = frozenset(islice(promising, view.most_nodes))
    found = yield from search_eviction(offers, task, open_nodes, view.now)
    if isinstance(found, RoomBeingFreed):
        return Wait(WaitReason.RESERVED if has_room else WaitReason.COMING, found.nodes, by_tenant)
    if found is not None and task.priority > IDLE_TOP:
        # Choose the place as if there were no idle work: what idle work would lose must not decide where
        # other work goes.
        place = yield from view.places.without_idle_work(task, open_nodes)
        if place is not None:
            found = clear_of_idle_work(offers, task, place, view.now) or found
    rule = None if found is None else view.guarantees.borrower_rule_for(task)
    if found is not None and rule is not None and not rule.allows(found.victims, found.surplus):
        yield CLOSE_LOOK * len(offers.nodes)
        found = evict_within_borrower_rule(offers, task, rule, view.now, offers.nodes - closed)
        waits, by_tenant = WaitReason.RESERVED if has_room else WaitReason.GUARANTEE, True
    if found is None and closed:
        found = yield from _preempt_above_floors(task, view, nodes)
    if found is not None:
        return Evict(found)
    if any(could_make_room(offers, task, node) for node in closed):
        waits = WaitReason.RESERVED
    return Wait(waits, by_tenant=by_tenant)


def _preempt_above_floors(task: Task, view: View, nodes: Set[NodeName] | None) -> Steps[Eviction | None]:
    rule = view.guarantees.borrower_rule_for(task)
    floors = _floors(task, view)
    if nodes is not None:
        floors = {node: floor for node, floor in floors.items() if node in nodes}
    if view.most_nodes is not None:
        floors = dict(islice(sorted(floors.items()), view.most_nodes))
    yield CLOSE_LOOK * len(floors)
    return evict_above_floors(view.offers, task, floors, view.now, tuple if rule is None else rule.together)


def _make_room_for_gang(task: Task, view: View) -> Steps[Way]:
    surplus = view.guarantees.reclaimable(task)
    if surplus:
        yield CLOSE_LOOK * len(view.offers.nodes)
        floors = _floors(task, view)
        nodes = view.offers.nodes - view.reservations.nodes_closed_to(task) | floors.keys()
        back = reclaim_for_gang(view.offers, task, surplus, view.now, nodes, floors)
        if isinstance(back, Eviction):
            return Evict(back)
    return (yield from _preempt_for_gang(task, view, by_tenant=bool(surplus)))


def _preempt_for_gang(task: Task, view: View, *, by_tenant: bool) -> Steps[Way]:
    offers = view.offers
    yield CLOSE_LOOK * len(offers.nodes)
    closed = view.reservations.off_limits(task) & offers.nodes
    rule = view.guarantees.borrower_rule_for(task)
    together: Together = tuple if rule is None else rule.together
    found = choose_for_gang(offers, task, view.now, offers.nodes - closed, together)
    if found is None and (floors := _floors(task, view)):
        found = choose_for_gang(offers, task, view.now, offers.nodes - closed, together, floors)
    if isinstance(found, Eviction):
        return Evict(found)
    by_tenant = by_tenant or rule is not None
    if isinstance(found, RoomBeingFreed):
        return Wait(WaitReason.COMING, found.nodes, by_tenant)
    ranks = {bundle: rank_task(task, rank) for rank, bundle in enumerate(task.demand.bundles)}
    if any(could_make_room(offers, rank, node) for rank in ranks.values() for node in closed):
        return Wait(WaitReason.RESERVED, by_tenant=by_tenant)
    return Wait(WaitReason.NO_ROOM if rule is None else WaitReason.GUARANTEE, by_tenant=by_tenant)
