"""Whether there is anything to be found for a task at all, without looking twice at what did not change."""

from collections.abc import Iterable
from dataclasses import replace

from service.core.draft import Draft
from service.core.gang import Gang
from service.core.gang_eviction import choose_for_gang
from service.core.memory import GangRefusal, Memory, Refusal, Standing
from service.core.offers import Offers
from service.core.ordering import Group, GroupKey, Kin
from service.core.placement import CLOSE_LOOK, Places
from service.core.policy import Policy
from service.core.preemption import Eviction, choose, could_make_room
from service.core.task import Placement, Task
from service.core.units import Instant, NodeName, TaskId


class Prospects:
    """Of one draft. Tasks with pledges of their own are no concern of it."""

    def __init__(
        self, draft: Draft, policy: Policy, now: Instant, memory: Memory, places: Places, offers: Offers
    ) -> None:
        self._draft = draft
        self._policy = policy
        self._now = now
        self._memory = memory
        self._places = places
        self._offers = offers

    def _probe(self, group: Group) -> Task:
        return replace(self._draft.world.tasks[group.member(0)[1]], id=TaskId(""))

    def is_refused(self, group: Group) -> bool:
        """Whether it is known, or a look at what changed tells, that there is neither room for such tasks
        now nor a way to make it. False if somebody must look."""
        if group.demand.bundles:
            return self._is_refused_gang(group)
        if self.has_nothing(group):
            return True
        known = self._memory.refusals.get(group.kin, {}).get(group.priority)
        return known is not None and known.coming_on is not None and self._still_holds(known)

    def has_nothing(self, group: Group) -> bool:
        """The same, and it is so for lower priorities as well."""
        if group.demand.counted and self._draft.short_of(self._probe(group), self._policy.custom_limits):
            return True
        refusals = self._memory.refusals.get(group.kin)
        if not refusals or group.demand.bundles:
            return False
        higher = [r for p, r in refusals.items() if p >= group.priority and r.coming_on is None]
        grown = self._memory.growth.revision
        return any(r.grown == grown for r in higher) or any(self._still_holds(r) for r in higher[:1])

    def _is_refused_gang(self, group: Group) -> bool:
        changes, growth = self._memory.changes, self._memory.growth
        known = self._memory.gangs.get(group.key)
        if known is None or known.grown != growth.revision:
            return group.demand.counted != () and self.has_nothing(group)
        if any(changes.at(node) > known.changed for node in known.coming_on):
            return False
        self._memory.awaited.update(known.coming_on)
        return True

    def gang(self, task: Task, key: GroupKey) -> Gang | Eviction | None:
        """Places for the ranks of a gang, or the best eviction if there are none; None, which is remembered,
        if there is neither, or if it need only wait."""
        found = self._places.gang(task)
        if found is not None:
            return found
        self._places.looks += CLOSE_LOOK * len(self._offers.nodes)
        way = choose_for_gang(self._offers, task, self._now)
        if isinstance(way, Eviction):
            return way
        coming_on = () if way is None else way.nodes
        changed, grown = self._memory.changes.revision, self._memory.growth.revision
        self._memory.gangs[key] = GangRefusal(changed, grown, coming_on)
        self._memory.awaited.update(coming_on)
        return None

    def place(self, task: Task, kin: Kin) -> Placement | None:
        """The best place for a task."""
        likes = (kin, task.priority)
        known, standing = self._known(kin, task.priority), self._memory.standings.get(likes)
        if known is not None and (standing is None or standing.seen < known.changed):
            self._memory.standings[likes] = Standing(known.changed)
        return self._places.best(task, likes)

    def eviction(self, task: Task, kin: Kin) -> Eviction | None:
        """The best eviction for a task for which there is no place; None, which is remembered, if there is
        none, or if it need only wait."""
        known = self._known(kin, task.priority)
        nodes: Iterable[NodeName] = self._offers.nodes
        ruled_out = 0 if known is None else known.ruled_out
        if ruled_out:
            nodes = sorted(set(self._memory.growth.since(ruled_out)).intersection(nodes))
        found = choose(self._offers, task, self._now, nodes)
        if isinstance(found, Eviction):
            return found
        changed, grown = self._memory.changes.revision, self._memory.growth.revision
        probe = replace(task, id=TaskId(""))
        refusal = Refusal(probe, changed, grown, ruled_out if found else grown, found)
        self._memory.refusals.setdefault(kin, {})[task.priority] = refusal
        if found is not None:
            self._memory.awaited.add(found)
        return None

    def _known(self, kin: Kin, priority: int) -> Refusal | None:
        """What was found at this priority, or at the next higher one at which there was nothing at all."""
        refusals = self._memory.refusals.get(kin)
        if not refusals:
            return None
        if priority in refusals:
            return refusals[priority]
        higher = [known for known, refusal in refusals.items() if known > priority and not refusal.coming_on]
        return refusals[min(higher)] if higher else None

    def _still_holds(self, known: Refusal) -> bool:
        changes, growth = self._memory.changes, self._memory.growth
        node = known.coming_on
        moved = node is not None and changes.at(node) > known.changed
        if known.grown == growth.revision and not moved:
            return True
        if moved and node is not None and not self._is_coming(node, known.probe):
            return False
        grown = growth.since(known.grown)
        for other in grown:
            if self._places.on(other, known.probe) is not None:
                return False
            if node is None:
                self._places.looks += 1
                if could_make_room(self._offers, known.probe, other):
                    self._places.looks += CLOSE_LOOK
                    return False
        if node is not None:
            self._memory.awaited.add(node)
        known.changed, known.grown = changes.revision, growth.revision
        if node is None:
            known.ruled_out = growth.revision
        return True

    def _is_coming(self, node: NodeName, probe: Task) -> bool:
        return choose(self._offers, probe, self._now, [node]) == node
