"""The one cache around `find_way`: answers `Wait`, kept until something changes that could change them."""

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import NodeName, TaskId
from gpubroker_server.core.planning.budget import PROBE_SIFTED
from gpubroker_server.core.planning.find_way import View, Wait, WaitReason
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.nodes.node_revisions import NodeRevisions
from gpubroker_server.core.planning.nodes.node_room import Room
from gpubroker_server.core.planning.nodes.shields import NOTHING, victims_below
from gpubroker_server.core.planning.preemption.reclaim import may_make_room_in_limit
from gpubroker_server.core.world.queue import EquivalenceClass, QueueGroup

OWN = frozenset({WaitReason.LIMIT, WaitReason.PLEDGED})
"""Reasons that concern one task alone: nothing is remembered of them."""

SHARED = frozenset({WaitReason.NO_ROOM, WaitReason.COMING})
"""Reasons that hold for every equal task, whatever its tenant and its place in the queue."""

Likes = tuple[EquivalenceClass, int]
"""(demand, priority)"""

Key = tuple[str, int, Demand]
"""(tenant, or none where it makes no difference; priority; demand)"""


class _Answer(NamedTuple):
    wait: Wait
    grown: int
    """Revision of `growth` up to which it holds."""
    changed: int
    """Revision of `changes` up to which it holds for the nodes it watches."""
    watches: tuple[NodeName, ...] | None
    """Nodes on which any change ends it; None: all."""
    right: object = None
    """What the quotas said when it was found."""


class _Coming(NamedTuple):
    node: NodeName
    grown: int
    changed: int


class _RuledOut:
    """No node had room for such a task, or runs that may be preempted to make it."""

    __slots__ = ("at", "gpus", "mb", "probe")

    def __init__(self, probe: Task) -> None:
        """`probe`: one of these tasks, whatever its priority."""
        self.probe = probe
        self.gpus, self.mb = probe.demand.gpus, probe.demand.gpu_mb or 1
        self.at: dict[int, int] = {}
        """Priority -> revision of `growth` at which that was found."""

    def covered_at(self, priority: int) -> int:
        """The newest such revision: what was found for a higher priority covers this one. 0 if never."""
        return max([at for of, at in self.at.items() if of >= priority], default=0)


@dataclass(slots=True)
class _Ruled:
    """What is known of single tasks on a set of nodes."""

    out: dict[EquivalenceClass, _RuledOut]
    coming: dict[Likes, _Coming]
    """Those for which room is being given back on a node."""


class Refusals:
    """What is remembered from cycle to cycle."""

    def __init__(self) -> None:
        self.everywhere = _Ruled({}, {})
        self.unreserved = _Ruled({}, {})
        """On the nodes without a reservation."""
        self.answers: dict[Key, _Answer] = {}
        """Of gangs, and of tenants with quotas."""
        self.behind: dict[tuple[object, ...], _Answer] = {}
        """The same of tasks for which reservations made a difference, by what they make it depend on."""
        self.joining: dict[Demand, int] = {}
        """Demand of a rank -> revision of `growth` at which no node had room for it in a running gang."""
        self.forecasts: tuple[Forecast, ...] = ()
        self.reserved_nodes: frozenset[NodeName] = frozenset()
        """The reservations for which `behind` and `unreserved` hold."""
        self.awaited: set[NodeName] = set()
        """Nodes with room that is being given back, for which a task waits."""

    def __len__(self) -> int:
        ruled = len(self.everywhere.out) + len(self.unreserved.out)
        return ruled + len(self.answers) + len(self.behind) + len(self.joining)


class RefusalCache:
    """What is remembered, as it stands in one draft."""

    def __init__(self, known: Refusals, view: View, revisions: NodeRevisions) -> None:
        self.budget = view.budget
        self._known = known
        self._view = view
        self._revisions = revisions
        self._rooms: dict[tuple[int, int, int], list[Room]] = {}
        self._rooms_at = 0
        """Revision of `changes` for which they hold."""
        reservations = view.reservations
        if reservations.forecasts != known.forecasts:
            known.behind.clear()
            known.forecasts = reservations.forecasts
        for node in sorted(known.reserved_nodes - reservations.on.keys()):  # free for all again
            revisions.changes.mark(node)
            revisions.growth.mark(node)
        known.reserved_nodes = frozenset(reservations.on)

    def inadmissible(self, kins: Iterable[EquivalenceClass], band: int) -> Iterator[EquivalenceClass]:
        """Those demands of which every task in a band is refused, and every equal one of a lower priority.
        None with quotas: then it depends on what other tenants are given before."""
        if self._view.policy.has_quotas:
            return
        is_depth_reached = self._view.reservations.is_depth_reached
        for kin in kins:
            priority = kin.highest[band]
            if (
                self._is_ruled_out(self._known.everywhere, kin, priority)
                or (kin.demand.counted and self._is_short(kin.most_urgent_of(band)))
                or (is_depth_reached and self._is_ruled_out(self._known.unreserved, kin, priority))
            ):
                yield kin

    def is_refused(self, group: QueueGroup) -> bool:
        """Whether each of its tasks is refused. False if one of them must be examined."""
        if self._view.policy.has_quotas:
            refused = self._is_refused_by_right(group)
            if refused is not None:
                return refused
        if group.demand.counted and self._is_short(group):
            return True
        if group.demand.bundles:
            return self._holds(self._known.answers.get(("", group.priority, group.demand)))
        is_depth_reached = self._view.reservations.is_depth_reached
        return any(
            self._is_ruled_out(ruled, group.kin, group.priority) or self._is_coming(ruled, group)
            for ruled in (
                (self._known.unreserved, self._known.everywhere)
                if is_depth_reached
                else (self._known.everywhere,)
            )
        )

    def recall(self, task: Task) -> Wait | None:
        """The answer for one task behind reservations, if it still holds."""
        if not self._known.behind or not self._view.reservations.on:
            return None
        answer = self._known.behind.get(self._key_behind(task))
        if answer is None or not self._holds(answer):
            return None
        return answer.wait if answer.right == self._right(task.tenant, task.demand, task.priority) else None

    def remember(self, task: Task, wait: Wait) -> None:
        """An answer was found for a task without pledges."""
        if wait.reason in OWN:
            return
        reserved = wait.reason is WaitReason.RESERVED
        is_gang = bool(task.demand.bundles)
        if not is_gang and wait.reason in SHARED and (wait.coming_on or wait.reason is WaitReason.NO_ROOM):
            self._rule_out(self._known.everywhere, task, wait)
        on = self._view.reservations.on
        if not is_gang and reserved and not (wait.by_tenant or set(wait.coming_on) & on.keys()):
            self._rule_out(self._known.unreserved, task, wait)
        closed = wait.by_tenant and bool(self._view.reservations.nodes_closed_to(task))
        if reserved or closed or (is_gang and wait.coming_on and on):
            self._known.behind[self._key_behind(task)] = self._answer(task, wait)
        elif wait.by_tenant:
            self._known.answers[task.tenant, task.priority, task.demand] = self._answer(task, wait)
        elif is_gang:
            self._known.answers["", task.priority, task.demand] = self._answer(task, wait)

    def nodes_to_search(self, task: Task) -> Set[NodeName]:
        """The usable nodes without those that had nothing when they were last probed."""
        nodes = self._view.offers.nodes
        ruled_out = self._ruled_out_at(self._known.everywhere, task)
        beside = self._ruled_out_at(self._known.unreserved, task)
        if ruled_out:
            nodes = nodes & set(self._revisions.growth.since(ruled_out))
        if beside > ruled_out:
            nodes = nodes & {*self._view.reservations.on, *self._revisions.growth.since(beside)}
        return nodes

    def nodes_to_join(self, rank: Task) -> list[NodeName]:
        """The nodes without a reservation that have room for one more rank of a running gang. Without
        remembering that there is none, 50 such gangs cost a cycle of `bench plan --nodes 1000` a second."""
        known, revision = self._known.joining, self._revisions.growth.revision
        since = known.get(rank.demand, 0)
        nodes = self._grown(since) if since else list(self._view.offers.nodes)
        self.budget.spent += PROBE_SIFTED * len(nodes)
        reserved, rooms = self._view.reservations.on, self._view.offers.rooms
        found = [node for node in nodes if node not in reserved and rooms.now(node, rank.priority).fits(rank)]
        if not found:
            known[rank.demand] = revision
        return found

    def _ruled_out_at(self, ruled: _Ruled, task: Task) -> int:
        """0 if never."""
        known = ruled.out.get(self._view.draft.world.queue.group_of(task.id).kin)
        return known.covered_at(task.priority) if known else 0

    def _answer(self, task: Task, wait: Wait) -> _Answer:
        watches: tuple[NodeName, ...] | None = wait.coming_on
        if wait.reason is WaitReason.RESERVED:
            watches = (*wait.coming_on, *self._view.reservations.on)
        elif wait.reason is WaitReason.COMING and not wait.coming_on:
            watches = None
        self._known.awaited.update(wait.coming_on)
        right = self._right(task.tenant, task.demand, task.priority)
        return _Answer(
            wait, self._revisions.growth.revision, self._revisions.changes.revision, watches, right
        )

    def _holds(self, answer: _Answer | None) -> TypeGuard[_Answer]:
        if answer is None or answer.grown != self._revisions.growth.revision:
            return False
        changes = self._revisions.changes
        if answer.watches is None:
            return answer.changed == changes.revision
        return all(changes.at(node) <= answer.changed for node in answer.watches)

    def _is_refused_by_right(self, group: QueueGroup) -> bool | None:
        """By its tenant's quota; None if that leaves it to what all such tasks find."""
        tenant, priority, demand = group.tenant, group.priority, group.demand
        answer = self._known.answers.get((tenant, priority, demand))
        is_known = self._holds(answer) and answer.right == self._right(tenant, demand, priority)
        if self._view.quotas.is_short_for(tenant, demand, priority):
            return is_known or not self._view.guarantees.has_lower_priority_runs(tenant, priority)
        may_reclaim = bool(self._view.guarantees.reclaimable_by(tenant, demand, priority))
        return is_known if may_reclaim or is_known else None

    def _right(self, tenant: str, demand: Demand, priority: int) -> object:
        """What quotas and guarantees say of a task; None if nothing."""
        view = self._view
        if not view.policy.has_quotas:
            return None
        if view.quotas.is_short_for(tenant, demand, priority):
            return "over its quota"
        surplus = view.guarantees.reclaimable_by(tenant, demand, priority)
        if surplus:
            return "may reclaim", tuple(sorted(surplus.items()))
        rule = view.guarantees.borrower_rule(tenant, demand, priority)
        return None if rule is None else ("borrows", tuple(sorted(rule.surplus.items())))

    def _key_behind(self, task: Task) -> tuple[object, ...]:
        tenant = task.tenant if self._view.policy.has_quotas else ""
        return tenant, task.priority, task.demand, *self._view.reservations.equivalence_key(task)

    def _is_short(self, group: QueueGroup) -> bool:
        """Whether a limit of the whole cluster has too little left for such a task without pledges, and could
        not be made to have enough."""
        probe = replace(self._probe(group), id=TaskId(""))
        return self._view.is_short_of_limits(probe) and not may_make_room_in_limit(self._view.offers, probe)

    def _is_ruled_out(self, ruled: _Ruled, kin: EquivalenceClass, priority: int) -> bool:
        """Whether the nodes that grew since then have nothing for such a task either."""
        known, now = ruled.out.get(kin), self._revisions.growth.revision
        if known is None or known.at.get(priority) == now:
            return known is not None
        since = known.covered_at(priority)
        if since and since != now:
            gpus, mb = known.gpus, known.mb
            rooms = self._rooms_since(since, priority, victims_below(priority, with_gpus=gpus > 0))
            self.budget.spent += PROBE_SIFTED * len(rooms)
            for room in rooms:
                amounts = room.ceiling.amounts
                if gpus and (gpus > len(amounts) or amounts[gpus - 1] < mb):
                    continue  # the common case, first
                if room.fits(known.probe):
                    return False
        if since:
            known.at[priority] = now
        return since > 0

    def _rooms_since(self, since: int, priority: int, below: int) -> list[Room]:
        """What the nodes that grew since then have, or could have after preemption. The same for hundreds of
        demands: without remembering them `bench plan` takes twice the time for a cycle."""
        if self._rooms_at != self._revisions.changes.revision:
            self._rooms_at = self._revisions.changes.revision
            self._rooms.clear()
        key = since, priority, below
        found = self._rooms.get(key)
        if found is None:
            rooms, grown = self._view.offers.rooms, self._grown(since)
            if below > NOTHING and self._view.policy.preemption:
                found = [rooms.most(node, priority, below) for node in grown]
            else:
                found = [rooms.now(node, priority) for node in grown]
            self._rooms[key] = found
        return found

    def _grown(self, since: int) -> list[NodeName]:
        nodes = self._view.offers.nodes
        return [node for node in self._revisions.growth.since(since) if node in nodes]

    def _is_coming(self, ruled: _Ruled, group: QueueGroup) -> bool:
        """Whether the room that is being given back will still do, and there is none before."""
        likes = (group.kin, group.priority)
        coming = ruled.coming.get(likes)
        if coming is None:
            return False
        grown, changes = self._revisions.growth.revision, self._revisions.changes
        if coming.grown == grown and changes.at(coming.node) <= coming.changed:
            return True
        probe, priority, rooms = self._probe(group), group.priority, self._view.offers.rooms
        if (
            coming.node not in self._view.offers.nodes
            or not rooms.soon(coming.node, priority).fits(probe)
            or any(rooms.now(node, priority).fits(probe) for node in self._grown(coming.grown))
        ):
            del ruled.coming[likes]
            return False
        ruled.coming[likes] = _Coming(coming.node, grown, changes.revision)
        self._known.awaited.add(coming.node)
        return True

    def _rule_out(self, ruled: _Ruled, task: Task, wait: Wait) -> None:
        grown, kin = self._revisions.growth.revision, self._view.draft.world.queue.group_of(task.id).kin
        if wait.coming_on:
            [node] = wait.coming_on
            ruled.coming[kin, task.priority] = _Coming(node, grown, self._revisions.changes.revision)
            self._known.awaited.add(node)
        else:
            ruled.coming.pop((kin, task.priority), None)
            ruled.out.setdefault(kin, _RuledOut(task)).at[task.priority] = grown

    def _probe(self, group: QueueGroup) -> Task:
        """One of its tasks; which one makes no difference to a node."""
        return self._view.draft.world.tasks[group.member(0)[1]]
