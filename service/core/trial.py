"""Whether one task would start if the planner looked at it now, and what that would take. Changes nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from math import inf

from service.core.draft import Draft
from service.core.gang import Gang
from service.core.gang_eviction import choose_for_gang
from service.core.looks import Looks
from service.core.offers import Offers
from service.core.outlook import Outlooks
from service.core.placement import Places, worth_of
from service.core.policy import Policy
from service.core.preemption import Eviction, Search, could_make_room, is_coming, may_preempt
from service.core.quota import Quotas
from service.core.reclaim import Claims, reclaim
from service.core.task import Task
from service.core.units import Instant, NodeName


@dataclass(frozen=True, slots=True)
class Trial:
    """At most one of the three is there; none: it waits, and nothing that is known is coming."""

    places: Gang | None = None
    """It starts here: one place, of a gang one for each rank."""
    eviction: Eviction | None = None
    """These would be asked to leave, and it starts when they have."""
    coming_on: tuple[NodeName, ...] = ()
    """Room is being given back on these nodes; nobody is stopped for it."""

    @property
    def is_way(self) -> bool:
        """It starts, at once or when the victims have left."""
        return self.places is not None or self.eviction is not None


class Planner:
    """Asks of one draft, as often as one likes, what the planner would make of it; what it works out about a
    node serves all questions until the draft changes there."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant) -> None:
        self._draft = draft
        self._now = now
        outlooks = Outlooks(draft, policy, now, now, {})
        worth = worth_of(draft.world, policy)
        self._places = Places(draft, policy, now, worth=worth, outlooks=outlooks)
        self._offers = Offers(draft, policy, now, outlooks=outlooks)
        self._quotas = Quotas(draft, policy)
        self._claims = Claims(draft, policy, self._quotas)

    def is_over_quota(self, task: Task) -> bool:
        """Its tenant may take no more for such a task now. What is being freed for it counts already."""
        if self._draft.pledges_of(task.id):
            return False
        return self._quotas.falls_short(task.tenant, task.demand, task.priority)

    def place(self, task: Task) -> Gang | None:
        """Where it would be put now."""
        if self.is_over_quota(task):
            return None
        if task.demand.bundles:
            return self._places.gang(task)
        found = self._places.best(task)
        return None if found is None else (found,)

    def place_on(self, nodes: Iterable[NodeName], task: Task) -> Gang | None:
        """The same if it had only these nodes; a gang has all."""
        if self.is_over_quota(task):
            return None
        if task.demand.bundles or self._draft.short_of(task, self._offers.policy.custom_limits):
            return self.place(task)
        found = [option for node in nodes if (option := self._places.on(node, task)) is not None]
        return (min(found)[1],) if found else None

    def may_have(self, node: NodeName, task: Task) -> bool:
        """Whether the node has room for it, or could if everybody left who may be stopped for it; whatever
        its tenant may take."""
        if self._places.on(node, task) is not None:
            return True
        return may_preempt(self._offers, task) and could_make_room(self._offers, task, node)

    def could_start(self, task: Task) -> bool:
        """Whether `attempt` finds a place, or may find a way to one."""
        if self.is_over_quota(task):
            return False
        if may_preempt(self._offers, task) and any(
            could_make_room(self._offers, task, node) for node in self._offers.nodes
        ):
            return True
        return self.place(task) is not None or bool(self._claims.of(task))

    def attempt(self, task: Task, most_nodes: int | None = None) -> Trial:
        """What would be decided for this task, as one that waits and may be planned, of any id.

        The tasks ahead of it are taken to have been looked at and to wait on, as they do between two cycles.
        With `most_nodes`, victims are looked for on so many nodes only.
        """
        places = self.place(task)
        if places is not None or self._draft.pledges_of(task.id) or self.is_over_quota(task):
            return Trial(places)
        if task.demand.bundles:
            way = choose_for_gang(self._offers, task, self._now)
            if isinstance(way, Eviction):
                return Trial(eviction=way)
            return Trial(coming_on=way.nodes if way else ())
        if not may_preempt(self._offers, task):
            return Trial()
        if (taken_back := self._reclaim(task)) is not None:
            return Trial(eviction=taken_back)
        nodes = self._offers.nodes
        if most_nodes is not None:
            hopeful = (node for node in sorted(nodes) if could_make_room(self._offers, task, node))
            nodes = frozenset(islice(hopeful, most_nodes))
        search = Search(task, nodes)
        search.go_on(self._offers, Looks(inf))
        coming_on = () if search.coming_on is None else (search.coming_on,)
        return Trial(eviction=search.eviction(self._offers, self._now), coming_on=coming_on)

    def _reclaim(self, task: Task) -> Eviction | None:
        surplus, nodes = self._claims.of(task), self._offers.nodes
        if not surplus or any(is_coming(self._offers, task, node) for node in nodes):
            return None
        return reclaim(self._offers, task, surplus, self._now, nodes)
