"""Whom to stop, on several nodes, so that all ranks of a gang can run, or so that a quota has room."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core.draft import Draft
from service.core.gang import Gang, place_ranks
from service.core.ground import Ground
from service.core.offers import Offer, Offers
from service.core.preemption import Eviction, deadlines_of_leavers, may_preempt
from service.core.ranks import part_of
from service.core.task import Task
from service.core.units import DeviceKey, Instant, Mib, NodeName
from service.core.victims import (
    EXACT_LIMIT,
    Candidate,
    Suffices,
    after,
    anybody,
    cheapest,
    filled_back,
    named,
)

EXACT_NODES = 4_096
"""Every subset of the candidates is considered if that is a look at no more nodes than so many."""


@dataclass(frozen=True, slots=True)
class Coming:
    """Room enough is on its way: nobody need be stopped."""

    nodes: tuple[NodeName, ...]


def choose_for_gang(
    offers: Offers, task: Task, now: Instant, may_leave: Suffices = anybody
) -> Eviction | Coming | None:
    """Runs of strictly lower priority whose memory lets all ranks run that the gang needs at least.

    Nobody is named if it would still not fit. One gang gives way as a whole, everywhere.
    """
    if not may_preempt(offers, task):
        return None
    there = [offers.of(node, task.priority) for node in sorted(offers.nodes)]
    return choose_among(there, offers.draft, task, now, may_leave=may_leave)


def choose_among(
    there: Sequence[Offer],
    draft: Draft,
    task: Task,
    now: Instant,
    *,
    may_leave: Suffices = anybody,
    suffices: Suffices = anybody,
) -> Eviction | Coming | None:
    """The same of those that these nodes offer, with such sets of victims only (and all their subsets), and
    with so many that they suffice. A task that is no gang is one of one rank."""
    site = _Site(there, draft, task, suffices)
    if (coming := site.places(())) is not None:
        return Coming(tuple(sorted({place.node for place in coming})))
    way = site.cheapest(may_leave)
    return None if way is None else site.eviction(*way, now)


class _Site:
    """What all usable nodes together could offer the gang."""

    def __init__(self, there: Sequence[Offer], draft: Draft, task: Task, suffices: Suffices) -> None:
        self._suffices = suffices
        self._task = task
        self._draft = draft
        self._offers = there
        names = {candidate.key: candidate for offer in self._offers for candidate in offer.found}
        self._found = sorted(names.values(), key=lambda candidate: candidate.order)
        """Who may be stopped, cheapest first."""

    def cheapest(self, may_leave: Suffices) -> tuple[list[Candidate], Gang] | None:
        """Whom to stop, and where the gang then runs. Of few candidates on few nodes the set that costs
        least, as for one node. Of more, the fewest in order of cost, of which then whoever is not needed is
        put back: minimal by inclusion."""
        found = self._found
        if len(found) <= EXACT_LIMIT and len(self._offers) << len(found) <= EXACT_NODES:
            found = cheapest(found, lambda gone: self.places(gone) is not None, may_leave=may_leave) or []
            gang = self.places(found) if found else None
            return None if gang is None else (found, gang)
        together: list[Candidate] = []
        for candidate in found:
            if may_leave([*together, candidate]):
                together.append(candidate)
        gang = self.places(together)
        few, many = 0, len(together)
        while gang is not None and many - few > 1:
            some = (few + many) // 2
            fewer = self.places(together[:some])
            few, many, gang = (some, many, gang) if fewer is None else (few, some, fewer)
        return None if gang is None else self._only_needed(together[:many], gang)

    def places(self, gone: Sequence[Candidate]) -> Gang | None:
        """Where the gang could run once these, and everybody who is leaving, have left."""
        if not self._suffices(gone):
            return None
        grounds = [self._ground(offer, gone) for offer in self._offers]
        return place_ranks(self._task, self._task.demand.least_ranks or 1, grounds)

    def _ground(self, offer: Offer, gone: Sequence[Candidate]) -> Ground:
        return Ground(
            self._draft.world.nodes[offer.node],
            after(offer.room, offer.node, gone),
            {site.device.key: site.after_mb(gone) for site in offer.sites},
            {site.device.key: site.device for site in offer.sites},
        )

    def _only_needed(self, gone: Sequence[Candidate], gang: Gang) -> tuple[list[Candidate], Gang]:
        """Those without whom the gang has no place: first none that these places do not need, then, where
        that is little work, none without whom there are others."""
        victims = filled_back(gone, lambda some: self._suffices(some) and self._has_room(gang, some))
        if len(victims) > EXACT_LIMIT:
            return victims, gang
        for victim in sorted(victims, key=lambda c: (c.lost, c.rank is None, c.key), reverse=True):
            rest = [other for other in victims if other is not victim]
            if (other_places := self.places(rest)) is not None:
                victims, gang = rest, other_places
        return victims, gang

    def _has_room(self, gang: Gang, gone: Sequence[Candidate]) -> bool:
        """Whether these very places are free once such candidates have left."""
        nodes = {place.node for place in gang}
        grounds = {offer.node: self._ground(offer, gone) for offer in self._offers if offer.node in nodes}
        for rank, place in enumerate(gang):
            ground, part = grounds[place.node], part_of(self._task, rank)
            if not ground.room.fits(part) or any(ground.free[key] < mb for key, mb in place.devices):
                return False
            ground.put(rank, part, place.devices)
        return True

    def eviction(self, victims: Sequence[Candidate], gang: Gang, now: Instant) -> Eviction:
        needs: dict[DeviceKey, Mib] = {}
        ranks: dict[DeviceKey, tuple[int, ...]] = {}
        for rank, place in enumerate(gang):
            for key, mb in place.devices:
                needs[key] = Mib(needs.get(key, 0) + mb)
                if self._task.demand.bundles:
                    ranks[key] = (*ranks.get(key, ()), rank)
        runs, surplus = named(victims)
        deadlines = [now + run.grace_seconds for run in runs]
        for site in (site for offer in self._offers for site in offer.sites if site.device.key in needs):
            if site.after_mb(victims) - site.soon_mb + site.free_mb < needs[site.device.key]:
                deadlines += deadlines_of_leavers(self._draft, site.device.key)
        return Eviction(
            gang[0].node, tuple(sorted(needs.items())), runs, Instant(max(deadlines)), ranks, surplus
        )
