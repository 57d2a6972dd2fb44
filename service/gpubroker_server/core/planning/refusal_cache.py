"""The cache of refusals: `Wait` answers of `find_way`, kept until a change could make them wrong."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import inf
from typing import NamedTuple, TypeGuard

from msgspec.structs import replace

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import NodeName, TaskId
from gpubroker_server.core.planning.find_way import View, Wait, WaitReason
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.nodes.node_revisions import NodeRevisions
from gpubroker_server.core.planning.nodes.node_room import Room
from gpubroker_server.core.planning.nodes.shields import NOTHING, victims_below
from gpubroker_server.core.planning.preemption.reclaim import may_make_room_in_limit
from gpubroker_server.core.world.queue import EquivalenceClass, QueueGroup

OWN = frozenset({WaitReason.LIMIT, WaitReason.PLEDGED})
"""Reasons that concern one task alone. Refusals for these reasons are not remembered."""

SHARED = frozenset({WaitReason.NO_ROOM, WaitReason.COMING})
"""Reasons that hold for every equal task, whatever its tenant and its place in the queue."""

ClassAndPriority = tuple[EquivalenceClass, int]
"""An equivalence class and the priority of some of its tasks."""

Key = tuple[str, int, Demand]
"""The tenant, priority and demand of equal tasks. The tenant is empty where it makes no difference."""


class _Answer(NamedTuple):
    wait: Wait
    grown: int
    """The revision of `growth` up to which the answer holds."""
    changed: int
    """The revision of `changes` up to which the answer holds for the nodes in `watches`."""
    watches: tuple[NodeName, ...] | None
    """The nodes on which any change ends the answer; None for all nodes."""
    right: object = None
    """What quotas and guarantees allowed the task when the answer was found (`RefusalCache._right`)."""


class _Coming(NamedTuple):
    node: NodeName
    grown: int
    changed: int


class _Hope(NamedTuple):
    """A node that may have room for a task, or runs that may be preempted for it."""

    node: NodeName
    changed: int
    """The node's revision of `changes`, until whose next one the hope holds."""
    is_free: bool
    """True if the room is free now."""


class _RuledOut:
    """The finding that no node had room for a task of one equivalence class, nor runs that may be preempted
    for it."""

    __slots__ = ("cpu", "gpus", "hopes", "mb", "memory_mb", "probe", "steps")

    def __init__(self, probe: Task, revision: int) -> None:
        """`probe` is one of these tasks, and was ruled out at this revision of `growth`."""
        self.probe = probe
        self.gpus, self.mb = probe.demand.gpus, probe.demand.gpu_mb or 1
        # What is not asked for is never lacking, even on a node where it is overcommitted.
        self.cpu, self.memory_mb = probe.demand.cpu or -inf, probe.demand.memory_mb or -inf
        self.steps = [(probe.priority, revision)]
        """The priorities that were ruled out, each with the revision of `growth` at which it was. Priorities
        fall, revisions rise."""
        self.hopes: dict[int, _Hope] = {}
        """Maps a priority to a node that has grown since and may have room."""

    def rule_out(self, priority: int, revision: int) -> None:
        """Note that no node has anything at the newest revision for tasks of this priority. The finding
        covers every lower priority too, so it replaces the older findings for those."""
        steps = self.steps
        while steps and steps[-1][0] <= priority:
            steps.pop()
        steps.append((priority, revision))
        if self.hopes:
            self.hopes.clear()

    def covered_at(self, priority: int) -> int:
        """Return the newest revision at which this priority was ruled out, by itself or by a higher one; 0 if
        it never was."""
        steps = self.steps
        if steps[-1][0] >= priority:
            return steps[-1][1]
        return next((revision for covered, revision in reversed(steps) if covered >= priority), 0)


class _GrownRooms:
    """The rooms, for tasks of one priority, of the nodes that grew, the newest first. A room says what its
    node has, or could have after preemption. Rooms are worked out only as far back as a caller asks."""

    __slots__ = ("_at", "_bounds", "_counts", "_grown", "_next", "_room_of", "_rooms", "bounds")

    def __init__(self, grown: Iterator[tuple[NodeName, int]], room_of: Callable[[NodeName], Room]) -> None:
        """`grown` yields nodes and the revisions at which they grew, the newest first."""
        self._grown = grown
        self._next = next(grown, None)
        self._room_of = room_of
        self._rooms: list[tuple[NodeName, Room]] = []
        self._at: list[int] = []
        """The revisions of `_rooms`, negated so that they rise."""
        self._bounds: list[tuple[int, ...]] = [()]
        """Entry n is the bound of the first n rooms: the most MiB that any of them has on each number of
        devices."""
        self._counts: dict[int, int] = {}
        """Maps a revision to the number of leading rooms whose nodes grew after that revision."""
        self.bounds: dict[int, tuple[int, ...]] = {}
        """The answers of `bound` by revision."""

    def fitting(self, since: int, known: "_RuledOut") -> NodeName | None:
        """Return a node that grew after the revision `since` and has room for a task of the class that
        `known` describes; None if there is none."""
        gpus, mb, cpu, memory_mb = known.gpus, known.mb, known.cpu, known.memory_mb
        for node, room in self._rooms[: self._counts[since]]:
            amounts, beside = room.ceiling.amounts, room.beside
            if (
                beside.cpu >= cpu
                and beside.memory_mb >= memory_mb
                and (not gpus or (gpus <= len(amounts) and amounts[gpus - 1] >= mb))
                and room.fits(known.probe)
            ):
                return node
        return None

    def bound(self, since: int) -> tuple[int, ...]:
        """Return the most MiB that any node that grew after the revision `since` has on each number of
        devices."""
        count = self._counts[since] = self._count_since(since)
        bound = self.bounds[since] = self._bounds[count]
        return bound

    def _count_since(self, revision: int) -> int:
        while self._next is not None and self._next[1] > revision:
            node, grown_at = self._next
            room, bound = self._room_of(node), self._bounds[-1]
            self._rooms.append((node, room))
            self._at.append(-grown_at)
            self._bounds.append(tuple(map(max, zip_longest(bound, room.ceiling.amounts, fillvalue=0))))
            self._next = next(self._grown, None)
        return bisect_left(self._at, -revision)


@dataclass(slots=True)
class _Ruled:
    """Refusals of single tasks on a set of nodes."""

    out: dict[EquivalenceClass, _RuledOut]
    coming: dict[ClassAndPriority, _Coming]
    """The tasks for which room is being given back on a node, with that node."""


class Refusals:
    """The refusals that are remembered from cycle to cycle."""

    def __init__(self) -> None:
        self.everywhere = _Ruled({}, {})
        self.unreserved = _Ruled({}, {})
        """Refusals on the nodes without a reservation."""
        self.answers: dict[Key, _Answer] = {}
        """The refusals of gangs, and those in which a quota or a guarantee had a part."""
        self.behind: dict[tuple[object, ...], _Answer] = {}
        """Refusals that depended on backfill reservations, keyed by the inputs of that decision."""
        self.joining: dict[Demand, int] = {}
        """Maps the demand of a rank to the revision of `growth` at which no node had room for another such
        rank of a running gang."""
        self.forecasts: tuple[Forecast, ...] = ()
        """The forecasts for which `behind` holds."""
        self.reserved_nodes: frozenset[NodeName] = frozenset()
        """The nodes with reservations for which `unreserved` holds."""
        self.awaited: set[NodeName] = set()
        """The nodes on which a task waits for room that is being given back."""

    def __len__(self) -> int:
        ruled_out = len(self.everywhere.out) + len(self.unreserved.out)
        return ruled_out + len(self.answers) + len(self.behind) + len(self.joining)


class RefusalCache:
    """The remembered refusals, as they hold in one draft."""

    def __init__(self, known: Refusals, view: View, revisions: NodeRevisions) -> None:
        self._known = known
        self._view = view
        self._revisions = revisions
        self._rooms: dict[tuple[int, bool], _GrownRooms] = {}
        """Maps a priority, and whether the tasks ask for GPUs, to what grown nodes have for such tasks."""
        self._rooms_at = (0, 0)
        """The revisions of `changes` and of `growth` for which `_rooms` hold."""
        reservations = view.reservations
        if reservations.forecasts != known.forecasts:
            known.behind.clear()
            known.forecasts = reservations.forecasts
        # Nodes that lost their reservation are free for all tasks again.
        for node in sorted(known.reserved_nodes - reservations.on.keys()):
            revisions.changes.mark(node)
            revisions.growth.mark(node)
        known.reserved_nodes = frozenset(reservations.on)

    def inadmissible(self, classes: Iterable[EquivalenceClass], band: int) -> list[EquivalenceClass]:
        """Return the classes of which every task in the band is refused, and every equal task of a lower
        priority. With quotas, return no class: a refusal then depends on what other tenants are given
        before."""
        if self._view.policy.has_quotas:
            return []
        everywhere, unreserved = self._known.everywhere, self._known.unreserved
        is_depth_reached = self._view.reservations.is_depth_reached
        return [
            equivalence
            for equivalence in classes
            if self._is_ruled_out(everywhere, equivalence, equivalence.highest[band])
            or (is_depth_reached and self._is_ruled_out(unreserved, equivalence, equivalence.highest[band]))
            or (
                (equivalence.demand.custom or equivalence.demand.slots)
                and self._is_short(equivalence.most_urgent_of(band))
            )
        ]

    def is_refused(self, group: QueueGroup) -> bool:
        """Return True if each task of the group is refused, False if one of them must be examined."""
        if self._view.policy.has_quotas:
            refused = self._is_refused_by_right(group)
            if refused is not None:
                return refused
        if group.demand.counted and self._is_short(group):
            return True
        if group.demand.bundles:
            return self._holds(self._known.answers.get(("", group.priority, group.demand)))
        known = self._known
        return self._is_known_to_wait(known.everywhere, group) or (
            self._view.reservations.is_depth_reached and self._is_known_to_wait(known.unreserved, group)
        )

    def _is_known_to_wait(self, ruled: _Ruled, group: QueueGroup) -> bool:
        return self._is_ruled_out(ruled, group.equivalence, group.priority) or self._is_coming(ruled, group)

    def is_refused_in(self, equivalence: EquivalenceClass, band: int) -> bool:
        """Return True if every task of the class in the band is refused, one priority after the other. A task
        of a lower priority in another band may find a way. With quotas, return False: a refusal then depends
        on what other tenants are given before."""
        if self._view.policy.has_quotas:
            return False
        for same_priority in equivalence.bands[band].values():
            group = next(iter(same_priority.values()))  # one group stands for all of its priority
            if not self.is_refused(group):
                return False
        return True

    def recall(self, task: Task) -> Wait | None:
        """Return the remembered answer for a task behind reservations; None if there is none that holds."""
        if not self._known.behind or not self._view.reservations.on:
            return None
        answer = self._known.behind.get(self._key_behind(task))
        if answer is None or not (self._holds(answer) or self._still_waits(answer, task)):
            return None
        return answer.wait if answer.right == self._right(task.tenant, task.demand, task.priority) else None

    def remember(self, task: Task, wait: Wait) -> None:
        """Remember an answer that was found for a task without pledges."""
        if wait.reason in OWN:
            return
        reserved = wait.reason is WaitReason.RESERVED
        is_gang = bool(task.demand.bundles)
        if not is_gang and wait.reason in SHARED and (wait.coming_on or wait.reason is WaitReason.NO_ROOM):
            self._rule_out(self._known.everywhere, task, wait)
        on = self._view.reservations.on
        # The answer says nothing about the nodes without a reservation if a guarantee decided, or if the room
        # that is coming is on a node with a reservation.
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
        """Return the usable nodes without those that had nothing for the task when last probed."""
        nodes = self._view.offers.nodes
        ruled_out = self._ruled_out_at(self._known.everywhere, task)
        unreserved_at = self._ruled_out_at(self._known.unreserved, task)
        if ruled_out:
            nodes = nodes & set(self._revisions.growth.since(ruled_out))
        if unreserved_at > ruled_out:
            nodes = nodes & {*self._view.reservations.on, *self._revisions.growth.since(unreserved_at)}
        return nodes

    def may_join(self, rank: Demand) -> bool:
        """Return False if it is known that no node has room for one more such rank of a running gang."""
        return self._known.joining.get(rank, -1) < self._revisions.growth.revision

    def nodes_to_join(self, rank: Task) -> list[NodeName]:
        """Return the nodes without a reservation that have room for one more rank of a running gang.

        That there is none is remembered: otherwise 50 such gangs make a cycle of `bench plan --nodes 1000` a
        second longer.
        """
        known, revision = self._known.joining, self._revisions.growth.revision
        since = known.get(rank.demand, 0)
        nodes = self._grown(since) if since else list(self._view.offers.nodes)
        reserved, rooms = self._view.reservations.on, self._view.offers.rooms
        fitting = [
            node for node in nodes if node not in reserved and rooms.now(node, rank.priority).fits(rank)
        ]
        if not fitting:
            known[rank.demand] = revision
        return fitting

    def _ruled_out_at(self, ruled: _Ruled, task: Task) -> int:
        """Return the newest revision of `growth` at which the task was ruled out; 0 if it never was."""
        known = ruled.out.get(self._view.draft.world.queue.group_of(task.id).equivalence)
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

    def _still_waits(self, answer: _Answer, task: Task) -> bool:
        """Return True if nodes grew, but none that the answer watches, and none that has anything for the
        task."""
        if answer.watches is None or answer.wait.by_tenant or task.demand.bundles:
            return False
        changes, equivalence = (
            self._revisions.changes,
            self._view.draft.world.queue.group_of(task.id).equivalence,
        )
        return all(changes.at(node) <= answer.changed for node in answer.watches) and self._is_ruled_out(
            self._known.unreserved, equivalence, task.priority
        )

    def _is_refused_by_right(self, group: QueueGroup) -> bool | None:
        """Return whether quotas and guarantees refuse the tenant's tasks of this group; None if they leave
        the answer to what equal tasks of all tenants find."""
        tenant, priority, demand = group.tenant, group.priority, group.demand
        answer = self._known.answers.get((tenant, priority, demand))
        is_known = self._holds(answer) and answer.right == self._right(tenant, demand, priority)
        if self._view.quotas.is_short_for(tenant, demand, priority):
            return is_known or not self._view.guarantees.has_lower_priority_runs(tenant, priority)
        may_reclaim = bool(self._view.guarantees.reclaimable_by(tenant, demand, priority))
        return is_known if may_reclaim or is_known else None

    def _right(self, tenant: str, demand: Demand, priority: int) -> object:
        """Return what quotas and guarantees allow a task; None if they make no difference to it."""
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
        """Return True if a limit of the whole cluster has too little left for such a task without pledges,
        and no preemption could change that."""
        probe = replace(self._probe(group), id=TaskId(""))
        return self._view.is_short_of_limits(probe) and not may_make_room_in_limit(self._view.offers, probe)

    def _is_ruled_out(self, ruled: _Ruled, equivalence: EquivalenceClass, priority: int) -> bool:
        """Return True if such a task was ruled out, and the nodes that have grown since have nothing for it
        either."""
        # Each cycle that follows a release asks this of every class, so the common answers call nothing.
        known = ruled.out.get(equivalence)
        if known is None:
            return False
        covers, since = known.steps[-1]
        if covers < priority:
            since = known.covered_at(priority)
        changed, now = self._revisions.changes.revision, self._revisions.growth.revision
        if since == now or not since:
            return since > 0
        hope = known.hopes.get(priority)
        if hope is not None and self._revisions.changes.by_node.get(hope.node) == hope.changed:
            return False  # nothing has changed there
        gpus = known.gpus
        grown = self._rooms.get((priority, gpus > 0)) if self._rooms_at == (changed, now) else None
        if grown is None:
            grown = self._grown_rooms(priority, with_gpus=gpus > 0)
        bound = grown.bounds.get(since)
        if bound is None:
            bound = grown.bound(since)
        # One comparison rules out most classes: the largest block of all these nodes is too small.
        if not gpus or (gpus <= len(bound) and bound[gpus - 1] >= known.mb):
            node = grown.fitting(since, known)
            if node is not None:
                is_free = self._view.offers.rooms.now(node, priority).fits(known.probe)
                known.hopes[priority] = _Hope(node, self._revisions.changes.at(node), is_free)
                return False
        known.rule_out(priority, now)
        return True

    def _grown_rooms(self, priority: int, *, with_gpus: bool) -> _GrownRooms:
        """Return what nodes that grew have for tasks of this priority. The rooms are remembered: otherwise a
        cycle of `bench plan` takes twice the time."""
        revisions, below = self._revisions, victims_below(priority, with_gpus=with_gpus)
        revision = revisions.changes.revision, revisions.growth.revision
        if self._rooms_at != revision:
            self._rooms_at = revision
            self._rooms.clear()
        rooms, nodes = self._view.offers.rooms, self._view.offers.nodes
        if below > NOTHING and self._view.policy.preemption:
            room_of = partial(rooms.most, priority=priority, below=below)
        else:
            room_of = partial(rooms.now, priority=priority)
        grown = (mark for mark in revisions.growth.newest_first() if mark[0] in nodes)
        grown_rooms = self._rooms[priority, with_gpus] = _GrownRooms(grown, room_of)
        return grown_rooms

    def _grown(self, since: int) -> list[NodeName]:
        nodes = self._view.offers.nodes
        return [node for node in self._revisions.growth.since(since) if node in nodes]

    def _is_coming(self, ruled: _Ruled, group: QueueGroup) -> bool:
        """Return True if the room that is being given back will be enough, and no node has room for the task
        before then."""
        key = (group.equivalence, group.priority)
        coming = ruled.coming.get(key) if ruled.coming else None
        if coming is None:
            return ruled is self._known.everywhere and self._begins_to_come(group)
        grown, changes = self._revisions.growth.revision, self._revisions.changes
        if coming.grown == grown and changes.at(coming.node) <= coming.changed:
            return True
        probe, priority, rooms = self._probe(group), group.priority, self._view.offers.rooms
        if (
            coming.node not in self._view.offers.nodes
            or not rooms.soon(coming.node, priority).fits(probe)
            or any(rooms.now(node, priority).fits(probe) for node in self._grown(coming.grown))
        ):
            del ruled.coming[key]
            return False
        self._await(ruled, key, coming.node)
        return True

    def _begins_to_come(self, group: QueueGroup) -> bool:
        """Return True if room for these tasks is being given back on the node that might have it, and no node
        has room for them now. Without quotas and limits a search would find nothing else, and would be made
        for each class for which that room is enough."""
        known, priority = self._known.everywhere.out.get(group.equivalence), group.priority
        hope = known.hopes.get(priority) if known else None
        if known is None or hope is None or hope.is_free:
            return False  # in most cases
        node, probe, rooms = hope.node, known.probe, self._view.offers.rooms
        if (
            node not in self._view.offers.nodes
            or group.demand.counted
            or self._view.policy.has_quotas
            or not rooms.soon(node, priority).fits(probe)
            or any(rooms.now(n, priority).fits(probe) for n in self._grown(known.covered_at(priority)))
        ):
            return False
        self._await(self._known.everywhere, (group.equivalence, priority), node)
        return True

    def _await(self, ruled: _Ruled, key: ClassAndPriority, node: NodeName) -> None:
        """Note that room for these tasks is being given back on the node, and that no node has room now."""
        ruled.coming[key] = _Coming(node, self._revisions.growth.revision, self._revisions.changes.revision)
        self._known.awaited.add(node)

    def _rule_out(self, ruled: _Ruled, task: Task, wait: Wait) -> None:
        grown = self._revisions.growth.revision
        equivalence = self._view.draft.world.queue.group_of(task.id).equivalence
        if wait.coming_on:
            [node] = wait.coming_on
            self._await(ruled, (equivalence, task.priority), node)
        else:
            ruled.coming.pop((equivalence, task.priority), None)
            known = ruled.out.get(equivalence)
            if known is None:
                ruled.out[equivalence] = _RuledOut(task, grown)
            else:
                known.rule_out(task.priority, grown)

    def _probe(self, group: QueueGroup) -> Task:
        """Return one task of the group; which one makes no difference to a node."""
        return self._view.draft.world.tasks[group.member(0)[1]]
