"""Ask the planner what-if questions about one draft."""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import TypeVar

from msgspec.structs import replace

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import rank_task
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, NodeName, in_time
from gpubroker_server.core.explain.blockers import Blocker, task_label
from gpubroker_server.core.explain.survey import Survey
from gpubroker_server.core.planning.budget import finish
from gpubroker_server.core.planning.find_way import (
    View,
    Wait,
    Way,
    beside_reservations,
    find_way,
    place,
)
from gpubroker_server.core.planning.forecasts.limits import FirstWaiting, LimitReservations
from gpubroker_server.core.planning.forecasts.reservations import Forecast, Reservation, Reservations
from gpubroker_server.core.planning.gangs.gang_search import Gang
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.node_room import Known, NodeRooms
from gpubroker_server.core.planning.nodes.offers import Offers
from gpubroker_server.core.planning.places import Places, scores_of
from gpubroker_server.core.planning.preemption.eviction import could_make_room, may_preempt
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.planning.tenants.guarantees import Guarantees
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.queue import OrderKey, order_key

T = TypeVar("T")


class WhatIf:
    """Answers questions about one draft. What was found out about a node is kept until the node changes."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        forecasts: Sequence[Forecast] = (),
        known: Known | None = None,
    ) -> None:
        """`forecasts` reserve room. `known` has what earlier questions found out about the nodes."""
        self._shares = shares = _LazyShares(draft, policy, now)
        order = shares.key_of
        quotas = Quotas(draft, policy)
        guarantees = Guarantees(draft, policy, quotas)
        rooms = NodeRooms(draft, policy, now, now, {} if known is None else known)
        self.rooms = rooms
        self.view = View(
            draft,
            policy,
            now,
            quotas,
            guarantees,
            Reservations(draft, policy, now, guarantees, order, tuple(forecasts)),
            LimitReservations(draft, policy, now, order, forecasts),
            Places(draft, policy, now, scores=scores_of(draft.world, policy), rooms=rooms),
            Offers(draft, policy, now, rooms=rooms),
        )

    def way(self, task: Task, most_nodes: int | None = None) -> Way:
        """Return the planner's decision about the task. With `most_nodes`, victims are looked for on at most
        this many nodes."""
        view = replace(self.view, most_nodes=most_nodes)

        def nodes(way: Way) -> set[NodeName]:
            return _nodes_of(way.places) | ({way.eviction.node} if way.eviction else set())

        return self._to_its_depth(task, lambda: find_way(task, view), nodes)

    def places(self, task: Task) -> Gang | None:
        """Return the places at which the task would start now; None if it would not start."""
        if self._is_held_back(task):
            return None
        return self._to_its_depth(task, lambda: finish(place(task, self.view))[0], _nodes_of)

    def places_on(self, nodes: Set[NodeName], task: Task) -> Gang | None:
        """Return the place at which a single task would start now if there were only these nodes; None if it
        would not start."""
        if self._is_held_back(task) or self.view.draft.short_of(task, self.view.policy.custom_limits):
            return None
        on = self.view.places.on
        table = {node: placement for node in nodes if (placement := on(node, task)) is not None}
        if not table:
            return None
        return self._to_its_depth(task, lambda: beside_reservations(task, self.view, table), _nodes_of)

    def _is_held_back(self, task: Task) -> bool:
        """Return True if the task is held back by its quota, or by a limit for which tasks ahead of it
        wait."""
        has_pledges = bool(self.view.draft.pledges_of(task.id))
        return self.view.quotas.is_short(task) or (not has_pledges and bool(self.view.limits.ahead_of(task)))

    def reserved_from(self, task: Task) -> Sequence[Reservation | FirstWaiting]:
        """Return the reservations that keep the task from a place that it would otherwise take; empty if none
        does."""
        view = self.view
        if view.draft.pledges_of(task.id) or view.quotas.is_short(task):
            return ()
        places, unreserved = self.places(task), finish(place(task, view))[1]
        ahead = view.limits.ahead_of(task)
        if unreserved is None or (places is not None and not ahead):
            return ()
        nodes = {placement.node for placement in unreserved}
        on = sorted(nodes & view.reservations.on.keys())
        delayed = [
            reservation
            for node in on
            for reservation in view.reservations.delayed_by(task, node, all_reservations=False)
        ]
        if not delayed and self._is_beyond_depth(task, nodes):
            delayed = [reservation for node in on for reservation in view.reservations.on[node]]
        return ahead or tuple(delayed)

    def keeps_from_preempting(self, task: Task) -> Sequence[Reservation]:
        """Return the reservations that are ahead of the task on nodes where runs could make room for it. If
        none is ahead, return all reservations on these nodes: then the task is kept out because the planner
        tries no more than `backfill_depth` tasks on nodes with reservations."""
        reservations, offers = self.view.reservations, self.view.offers
        parts = [rank_task(task, rank) for rank in range(len(task.demand.bundles))] or [task]
        nodes = [
            node
            for node in sorted(reservations.on)
            if any(could_make_room(offers, part, node) for part in parts)
        ]
        closing = [reservation for node in nodes for reservation in reservations.closing(node, task)]
        return closing or [reservation for node in nodes for reservation in reservations.on[node]]

    def _is_beyond_depth(self, task: Task, nodes: Set[NodeName]) -> bool:
        """Return True if one of these nodes has reservations, and so many tasks are ahead of the task that
        the planner may have reached `backfill_depth` before it."""
        view = self.view
        if not nodes & view.reservations.on.keys() or view.draft.pledges_of(task.id):
            return False
        return self._shares.count_ahead(task) >= view.policy.backfill_depth

    def _to_its_depth(self, task: Task, ask: Callable[[], T], nodes_of: Callable[[T], Set[NodeName]]) -> T:
        """Return the answer of `ask`. If the planner would have reached `backfill_depth` before the task on
        the nodes of that answer, ask again as if it had."""
        answer, reservations = ask(), self.view.reservations
        if self._is_beyond_depth(task, nodes_of(answer)):
            reservations.refused_by_reservation = self.view.policy.backfill_depth
            answer = ask()
            reservations.refused_by_reservation = 0
        return answer

    def may_have(self, node: NodeName, task: Task) -> bool:
        """Return True if the node has room for the task, or could make room, whatever its tenant may take."""
        if self.view.places.on(node, task) is not None:
            return True
        may_stop = task.demand.gpus > 0 and may_preempt(self.view.offers, task)
        return may_stop and could_make_room(self.view.offers, task, node)

    def steps(self, nodes: Iterable[NodeName]) -> set[int]:
        """Return the priorities at which a task may begin to have more room on one of these nodes."""
        return {step + 1 for node in nodes for step in self.rooms.steps(node)}

    def could_start(self, task: Task) -> bool:
        """Return True if a way to start the task exists, or may exist. The answer is cheap, and False is
        certain."""
        view = self.view
        if task.demand.bundles:
            return not isinstance(self.way(task), Wait)
        if view.quotas.is_short(task):
            return view.guarantees.has_lower_priority_runs(task.tenant, task.priority)
        if may_preempt(view.offers, task) and any(
            could_make_room(view.offers, task, node) for node in view.offers.nodes
        ):
            return True
        return self.places(task) is not None or bool(view.guarantees.reclaimable(task))


def _nodes_of(places: Gang | None) -> set[NodeName]:
    return {placement.node for placement in places or ()}


def places_text(draft: Draft, places: Gang) -> str:
    """Return the text for places, such as `n1`, `n1/gpu0,3` or `n1/gpu0 and n2/gpu0`."""
    indexes_by_node: dict[NodeName, set[int]] = {}
    for placement in places:
        indexes = {draft.ledger(device).device.index for device, _ in placement.devices}
        indexes_by_node.setdefault(placement.node, set()).update(indexes)
    return " and ".join(
        f"{node}/gpu{','.join(map(str, sorted(indexes)))}" if indexes else str(node)
        for node, indexes in indexes_by_node.items()
    )


class _LazyShares:
    """Places in the queue now, by shares of the tenants that are computed at the first question. The object
    refers to no `WhatIf`, because a cycle of references would wait for the garbage collector, and an answer
    takes megabytes."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant) -> None:
        self._world = draft.world
        self._policy = policy
        self._now = now
        self._fair_shares: FairShares | None = None

    def key_of(self, task: Task) -> OrderKey:
        own_order = self._world.queue.order_within_tenant(task, self._now, self._policy)
        return order_key(own_order, self._shares().rank(task.tenant))

    def count_ahead(self, task: Task) -> int:
        """Return how many tasks in the queue are ahead of the task."""
        queue, rank = self._world.queue, self._shares().rank
        if len(queue) <= self._policy.backfill_depth:
            return 0
        return queue.count_until(self.key_of(task), rank, self._now, self._policy) - (task.id in queue)

    def _shares(self) -> FairShares:
        if self._fair_shares is None:
            self._fair_shares = FairShares(self._world, self._policy, self._now)
        return self._fair_shares


def reservation_blockers(survey: Survey) -> list[Blocker]:
    """Return a blocker for the reservations that keep a task from room that exists; empty if none do."""
    what_if = WhatIf(survey.draft, survey.policy, survey.now, survey.forecasts, survey.known)
    keepers = what_if.reserved_from(survey.task)
    if not keepers:
        return []
    first = min(keepers, key=lambda reservation: (reservation.forecast.start_at, reservation.task.id))
    name, start = task_label(first.task.id, first.task.tenant, survey.task), seconds_until(first, survey)
    more = f" and {len(keepers) - 1} more" if len(keepers) > 1 else ""
    if isinstance(first, FirstWaiting):
        reserved = f"the limit that it needs is left to {name}{more}, expected to start"
    else:
        reserved = f"it has room, which is reserved for {name}{more}, expected to start on {first.node}"
    message = f"{reserved} in {in_time(start)}; this task is not known to end by then"
    return [Blocker(Reason.BEHIND_HIGHER_PRIORITY, message)]


def seconds_until(reservation: Reservation | FirstWaiting, survey: Survey) -> float:
    return max(0.0, reservation.forecast.start_at - survey.now)
