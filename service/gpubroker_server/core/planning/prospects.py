"""Whether there is anything to be found for a task at all, without looking twice at what did not change."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import part_of
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.planning.backfill import Guards
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.gang_placement import Gang
from gpubroker_server.core.planning.gang_preemption import choose_for_gang
from gpubroker_server.core.planning.guarantees import Claims, Restraint
from gpubroker_server.core.planning.kept_away import KeptAway
from gpubroker_server.core.planning.looks import Looks, Paused
from gpubroker_server.core.planning.memory import GangRefusal, Memory, Pursuit, Right, Standing
from gpubroker_server.core.planning.offers import Offers
from gpubroker_server.core.planning.placement import CLOSE_LOOK, Places
from gpubroker_server.core.planning.preemption import (
    Eviction,
    Search,
    could_make_room,
    is_coming,
    may_preempt,
)
from gpubroker_server.core.planning.quota import Quotas
from gpubroker_server.core.planning.reclaim import (
    evict_with_restraint,
    make_room_in_quota,
    reclaim,
    reclaim_for_gang,
)
from gpubroker_server.core.planning.refusals import Refusals
from gpubroker_server.core.planning.rights import Rights
from gpubroker_server.core.planning.victims import Together
from gpubroker_server.core.world.queue import Group, Kin


class Prospects:
    """Of one draft. Tasks with pledges of their own are no concern of it."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        memory: Memory,
        places: Places,
        offers: Offers,
        looks: Looks,
        quotas: Quotas,
        claims: Claims,
        guards: Guards,
    ) -> None:
        self.looks = looks
        self._guards = guards
        self._draft = draft
        self._policy = policy
        self._now = now
        self._memory = memory
        self._places = places
        self._offers = offers
        changes, growth = memory.changes, memory.growth
        self._refusals = Refusals(
            memory.refused, offers, policy, changes, growth, memory.awaited, looks, offers.nodes
        )
        self._beside = Refusals(
            memory.beside, offers, policy, changes, growth, memory.awaited, looks, offers.nodes
        )
        self._quotas = quotas
        self._claims = claims
        self._rights = Rights(draft, policy, memory, quotas, claims, guards)
        self.kept_away = KeptAway(draft, policy, now, guards)

    def has_no_right(self, group: Group) -> bool:
        return self._rights.has_none(group)

    def may_reclaim(self, group: Group) -> bool:
        return self._rights.may_reclaim(group)

    def in_quota(self, task: Task, kin: Kin) -> Eviction | None:
        """The best way to room for a task above its tenant's quota, among that tenant's own runs; None, which
        is remembered, if there is none, or if it need only wait."""
        closed = self._guards.closed_to(task)
        if self._rights.is_denied(task, kin, Right.DEBTOR, {}, closed):
            return None
        lacks_mb, nodes = self._quotas.lacks_mb(task), self._offers.nodes - closed
        self.looks.taken += CLOSE_LOOK * len(self._offers.nodes)
        found = make_room_in_quota(self._offers, task, lacks_mb, self._now, nodes)
        if found is None:
            self._rights.deny(task, kin, Right.DEBTOR, {}, passing=not lacks_mb, closed=closed)
        return found

    def reclaimed(self, task: Task, kin: Kin) -> Eviction | None:
        """The best way to take back room for a task for which there is no place; None, which is remembered,
        if there is none, or if it need only wait."""
        surplus = self._claims.of(task)
        if not surplus or not may_preempt(self._offers, task):
            return None
        closed = self._guards.closed_to(task)
        if self._rights.is_denied(task, kin, Right.OWNER, surplus, closed):
            return None
        self.looks.taken += CLOSE_LOOK * len(self._offers.nodes)
        coming = any(is_coming(self._offers, task, node) for node in self._offers.nodes)
        nodes = self._offers.nodes - closed
        found = None if coming else reclaim(self._offers, task, surplus, self._now, nodes)
        if found is None:
            self._rights.deny(task, kin, Right.OWNER, surplus, passing=coming, closed=closed)
        return found

    def shut(self) -> Mapping[Kin, int]:
        """Demand -> the priority up to which it is known that there is nothing, whoever asks."""
        if self._policy.has_quotas:
            return {}
        shut = self._refusals.shut()
        if not self._guards.is_tired:
            return shut
        beside = self._elsewhere().shut()
        return {**shut, **{kin: max(up_to, shut.get(kin, -1)) for kin, up_to in beside.items()}}

    def is_refused(self, group: Group) -> bool:
        """Whether it is known, or a look at what changed tells, that there is neither room for such tasks
        now nor a way to make it. False if somebody must look."""
        if group.demand.bundles:
            return self._is_refused_gang(group)
        if self.has_nothing(group):
            return True
        if self._guards.is_tired and self._elsewhere().is_waiting(group.kin, group.priority):
            return True
        return self._refusals.is_waiting(group.kin, group.priority)

    def has_nothing(self, group: Group) -> bool:
        """The same, and it is so for lower priorities as well."""
        if group.demand.counted and self._is_short(group):
            return True
        if self._guards.is_tired and self._elsewhere().has_nothing(group.kin, group.priority):
            return True
        return self._refusals.has_nothing(group.kin, group.priority)

    def _elsewhere(self) -> Refusals:
        """What is known of the nodes where no forecast stands. One that stands no more makes a node grow."""
        stands_on = frozenset(self._guards.on)
        if stands_on != self._memory.forecast_on:
            for node in sorted(self._memory.forecast_on - stands_on):
                self._memory.changes.mark(node)
                self._memory.growth.mark(node)
            self._memory.forecast_on = stands_on
        self._beside.nodes = self._offers.nodes - stands_on
        return self._beside

    def _is_short(self, group: Group) -> bool:
        likes, changed = (group.kin, group.priority), self._memory.changes.revision
        known = self._memory.shortages.get(likes)
        if known is None or known[0] != changed:
            probe = replace(self._draft.world.tasks[group.member(0)[1]], id=TaskId(""))
            is_short = bool(self._draft.short_of(probe, self._policy.custom_limits))
            known = self._memory.shortages[likes] = changed, is_short
        return known[1]

    def _is_refused_gang(self, group: Group) -> bool:
        known = self._memory.gangs.get((group.kin, group.priority))
        if known is None or known.grown != self._memory.growth.revision:
            return group.demand.counted != () and self.has_nothing(group)
        return known.keepers is None and self._still_holds(known)

    def gang(self, task: Task, kin: Kin) -> Gang | Eviction | None:
        """Places for the ranks of a gang, or the best eviction if there are none, where it delays nobody for
        whom there is a forecast; None, which is remembered, if there is neither, or if it need only wait."""
        known = self._memory.gangs.get((kin, task.priority))
        if known is not None and self._still_tells_of(task, known):
            self._guards.kept_away += known.is_kept
            return None
        found = self._places.gang(task)
        if found is not None:
            if not self._guards.bars(task, found, everybody=False):
                return found
            beside = self._places.gang(task, self._guards)
            if beside is None:
                self._refuse_gang(task, kin, [place.node for place in found], is_kept=True)
            return beside
        if (taken_back := self._reclaimed_gang(task, kin)) is not None:
            return taken_back
        return self._evicted_for_gang(task, kin)

    def _evicted_for_gang(self, task: Task, kin: Kin) -> Eviction | None:
        self.looks.taken += CLOSE_LOOK * len(self._offers.nodes)
        closed = self._guards.off_limits(task) & self._offers.nodes
        restraint = self._claims.restraint_on(task)
        together: Together = tuple if restraint is None else restraint.together
        way = choose_for_gang(self._offers, task, self._now, self._offers.nodes - closed, together)
        if isinstance(way, Eviction):
            return way
        ranks = {bundle: part_of(task, rank) for rank, bundle in enumerate(task.demand.bundles)}
        hopeful = (could_make_room(self._offers, rank, node) for rank in ranks.values() for node in closed)
        is_kept = way is None and any(hopeful)
        if restraint is None:
            self._refuse_gang(task, kin, () if way is None else way.nodes, is_kept=is_kept)
        elif is_kept:
            self.kept_away.add(task, kin)
        else:
            self._rights.deny(task, kin, Right.BORROWER, restraint.surplus, passing=way is not None)
        return None

    def _refuse_gang(self, task: Task, kin: Kin, on: Iterable[NodeName], *, is_kept: bool) -> None:
        """`on`: where room is coming, or kept from it; what changes there is looked at."""
        changed, grown, nodes = self._memory.changes.revision, self._memory.growth.revision, tuple(on)
        keepers = self.kept_away.keepers(task) if is_kept or (nodes and self._guards.on) else None
        self._memory.gangs[kin, task.priority] = GangRefusal(changed, grown, nodes, keepers, is_kept)
        self._memory.awaited.update(nodes)
        self._guards.kept_away += is_kept

    def _still_tells_of(self, task: Task, known: GangRefusal) -> bool:
        if not self._still_holds(known) or not known.tells_of(self.kept_away.keepers(task)):
            return False
        return not self.may_reclaim(self._draft.world.queue.group_of(task.id))

    def _still_holds(self, known: GangRefusal) -> bool:
        if known.grown != self._memory.growth.revision:
            return False
        if any(self._memory.changes.at(node) > known.changed for node in known.coming_on):
            return False
        self._memory.awaited.update(known.coming_on)
        return True

    def _reclaimed_gang(self, task: Task, kin: Kin) -> Eviction | None:
        """The best way to take back room for a gang; None, which is remembered, as for other tasks."""
        surplus = self._claims.of(task)
        if not surplus:
            return None
        closed = self._guards.closed_to(task)
        if self._rights.is_denied(task, kin, Right.OWNER, surplus, closed):
            return None
        self.looks.taken += CLOSE_LOOK * len(self._offers.nodes)
        way = reclaim_for_gang(self._offers, task, surplus, self._now, self._offers.nodes - closed)
        if isinstance(way, Eviction):
            return way
        self._rights.deny(task, kin, Right.OWNER, surplus, passing=way is not None, closed=closed)
        return None

    def place(self, task: Task, kin: Kin) -> Placement | Paused | None:
        """The best place for a task. The search for it can be left."""
        likes = (kin, task.priority)
        seen = self._refusals.seen(task, kin)
        standing = self._memory.standings.get(likes)
        if standing is None or standing.seen < seen:
            self._memory.standings[likes] = Standing(seen)
        return self._places.best_of(likes, task)

    def place_beside(self, task: Task, kin: Kin, best: Placement) -> Placement | None:
        """The best place at which a task delays nobody for whom there is a forecast; who stands ahead of it
        must be spared, and others are if possible. `best` is the best of all places."""
        likes = (kin, task.priority)
        for everybody in (False,) if self._guards.stands_behind_all(task) else (True, False):
            if not self._guards.bars(task, (best,), everybody=everybody):
                return best
            place = self._places.best_beside(self._guards, task, likes, everybody=everybody)
            if place is not None:
                return place
        return None

    def _restraint_on(self, task: Task, found: Eviction | None) -> Restraint | None:
        """If the tenant would borrow, and this way stops whom a borrower may not stop."""
        if found is None or not self._policy.has_quotas:
            return None
        restraint = self._claims.restraint_on(task)
        is_kept = restraint is not None and not restraint.allows(found.victims, found.surplus)
        return restraint if is_kept else None

    def eviction(self, task: Task, kin: Kin, *, has_room: bool = False) -> Eviction | Paused | None:
        """The best eviction where it delays no forecast, for a task for which there is no place, or none that
        it may have (`has_room`). None, which is remembered, if there is none, or if it need only wait. A
        search that is not at its end is gone on with when asked again."""
        elsewhere, restraint, is_kept = self._elsewhere(), None, has_room
        closed = self._guards.off_limits(task) & self._offers.nodes
        coming_on = elsewhere.coming_on(task, kin)
        if not has_room:
            coming = (node for node in sorted(closed) if is_coming(self._offers, task, node))
            coming_on = coming_on or self._refusals.coming_on(task, kin) or next(coming, None)
        if coming_on is None and may_preempt(self._offers, task):
            search = self._memory.resume(task, closed)
            search = search or Search(task, self._worth_a_search(task, kin) - closed)
            if not search.go_on(self._offers, self.looks):
                self._memory.pursuit = Pursuit(search, self._memory.changes.revision)
                return Paused.HERE
            found = search.eviction(self._offers, self._now)
            restraint = self._restraint_on(task, found)
            if restraint is not None:
                found = self._evict_with(restraint, task, self._offers.nodes - closed)
            if found is not None:
                return found
            coming_on = search.coming_on
            is_kept = has_room or any(could_make_room(self._offers, task, node) for node in closed)
        if is_kept and (has_room or coming_on is None):
            self.kept_away.add(task, kin)
            if restraint is None and coming_on not in self._guards.on:
                elsewhere.refuse(task, kin, coming_on)
        elif restraint is not None:
            self._rights.deny(task, kin, Right.BORROWER, restraint.surplus, passing=False)
        else:
            self._refusals.refuse(task, kin, coming_on)
        return None

    def _worth_a_search(self, task: Task, kin: Kin) -> Set[NodeName]:
        """The usable nodes without those that had nothing when they were last looked at."""
        on = self._guards.on.keys() & self._offers.nodes
        return self._refusals.worth_a_look(task, kin) & {*on, *self._elsewhere().worth_a_look(task, kin)}

    def _evict_with(self, restraint: Restraint, task: Task, nodes: Set[NodeName]) -> Eviction | None:
        self.looks.taken += CLOSE_LOOK * len(nodes)
        return evict_with_restraint(self._offers, task, restraint, self._now, nodes)
