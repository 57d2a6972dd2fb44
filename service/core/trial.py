"""Whether one task would start if the planner looked at it now, and what that would take. Changes nothing."""

from dataclasses import dataclass
from math import inf

from service.core.draft import Draft
from service.core.gang import Gang
from service.core.gang_eviction import choose_for_gang
from service.core.looks import Looks
from service.core.offers import Offers
from service.core.placement import Places, worth_of
from service.core.policy import Policy
from service.core.preemption import Eviction, Search, may_preempt
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


def place(draft: Draft, task: Task, policy: Policy, now: Instant) -> Gang | None:
    """Where the planner would put it now."""
    places = Places(draft, policy, now, worth=worth_of(draft.world, policy))
    if task.demand.bundles:
        return places.gang(task)
    found = places.best(task)
    return None if found is None else (found,)


def attempt(draft: Draft, task: Task, policy: Policy, now: Instant) -> Trial:
    """What the planner would decide for this task, as one that waits and may be planned, of any id.

    The tasks ahead of it are taken to have been looked at and to wait on, as they do between two cycles.
    """
    places = place(draft, task, policy, now)
    if places is not None or draft.pledges_of(task.id):
        return Trial(places)
    offers = Offers(draft, policy, now)
    if task.demand.bundles:
        way = choose_for_gang(offers, task, now)
        return Trial(eviction=way) if isinstance(way, Eviction) else Trial(coming_on=way.nodes if way else ())
    if not may_preempt(offers, task):
        return Trial()
    search = Search(task, offers.nodes)
    search.go_on(offers, Looks(inf))
    coming_on = () if search.coming_on is None else (search.coming_on,)
    return Trial(eviction=search.eviction(offers, now), coming_on=coming_on)
