"""The choice of the runs to stop, on several nodes, so that a gang can start or a quota has room."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from gpubroker_server.core.domain.ranks import needs_gpus, rank_task
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, node_key
from gpubroker_server.core.planning.gangs.gang_nodes import GangNode
from gpubroker_server.core.planning.gangs.gang_search import Gang, place_ranks
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.offers import Offer, Offers
from gpubroker_server.core.planning.nodes.victims import (
    EXACT_LIMIT,
    Candidate,
    Suffices,
    Together,
    all_of,
    cheapest,
    costliest_first,
    named,
)
from gpubroker_server.core.planning.preemption.eviction import (
    Eviction,
    RoomBeingFreed,
    deadlines_of_leavers,
    may_preempt,
    offer_above,
)

NO_FLOORS: Mapping[NodeName, int] = MappingProxyType({})

EXACT_NODES = 4_096
"""The number of node probes up to which every subset of the candidates is tried."""


def choose_for_gang(
    offers: Offers,
    task: Task,
    now: Instant,
    nodes: Collection[NodeName],
    together: Together = tuple,
    floors: Mapping[NodeName, int] = NO_FLOORS,
) -> Eviction | RoomBeingFreed | None:
    """Find runs of strictly lower priority that make room, on these nodes, for all ranks that the gang needs.

    Return None if the gang would still not fit. A victim gang gives way as a whole, on all its nodes.
    `floors` has more nodes, with the floors of `Reservations.victim_floors`.
    """
    if not may_preempt(offers, task):
        return None
    offers_on = [
        offer_above(offers, task, node, floors[node]) if node in floors else offers.of(node, task)
        for node in sorted({*nodes, *floors})
    ]
    return choose_among(offers_on, offers.draft, task, now, together=together)


def choose_among(
    offers: Sequence[Offer],
    draft: Draft,
    task: Task,
    now: Instant,
    *,
    together: Together = tuple,
    gives_enough: Suffices | None = None,
) -> Eviction | RoomBeingFreed | None:
    """Choose among these offers the victims that make room for the task.

    A single task counts as a gang of one rank. `together` says which victims may leave together.
    `gives_enough` returns True if victims free enough of what the task needs besides places, such as its
    tenant's quota.
    """
    site = _Site(offers, draft, task, gives_enough)
    if (coming := site.places(())) is not None:
        return RoomBeingFreed(tuple(sorted({place.node for place in coming})))
    way = site.cheapest(together)
    return None if way is None else site.eviction(*way, now)


class _Site:
    """The offers of several nodes to a gang, taken together."""

    def __init__(
        self, offers: Sequence[Offer], draft: Draft, task: Task, gives_enough: Suffices | None
    ) -> None:
        self._gives_enough = gives_enough
        self._task = task
        self._draft = draft
        self._offers = {offer.node: offer for offer in offers}
        self._devices = {
            offer.node: {site.device.key: site.device for site in offer.sites} for offer in offers
        }
        names = {candidate.key: candidate for offer in offers for candidate in offer.found}
        self._found = sorted(names.values(), key=lambda candidate: candidate.order)
        """The possible victims, cheapest first."""

    def cheapest(self, together: Together) -> tuple[list[Candidate], Gang] | None:
        """Return the victims, and the places of the gang once they have left; None if there is no way.

        With few candidates on few nodes, the set is the cheapest. With more, the candidates are taken in
        order of cost, with fill-back, and the set is minimal by inclusion.
        """
        found = self._found
        if len(found) <= EXACT_LIMIT and len(self._offers) << len(found) <= EXACT_NODES:
            found = (
                cheapest(found, lambda removed: self.places(removed) is not None, may_leave=all_of(together))
                or []
            )
            gang = self.places(found) if found else None
            return None if gang is None else (found, gang)
        leavers = together(found)
        gang = self.places(leavers)
        # More victims never leave less room, so a binary search finds the shortest list.
        few, many = 0, len(leavers)
        while gang is not None and many - few > 1:
            middle = (few + many) // 2
            fewer = self.places(leavers[:middle])
            few, many, gang = (middle, many, gang) if fewer is None else (few, middle, fewer)
        return None if gang is None else self._only_needed(leavers[:many], gang)

    def places(self, gone: Sequence[Candidate]) -> Gang | None:
        """Return the places at which the gang could run once these victims, and all leaving runs, have left;
        None if there are none."""
        if self._gives_enough is not None and not self._gives_enough(gone):
            return None
        gang_nodes = self._gang_nodes(self._offers, gone)
        return place_ranks(self._task, self._task.demand.least_ranks or 1, gang_nodes)

    def _gang_nodes(self, nodes: Iterable[NodeName], removed: Iterable[Candidate]) -> list[GangNode]:
        """Return these nodes as they are once the victims have left."""
        room = {node: self._offers[node].room for node in nodes}
        free = {
            node: {site.device.key: site.free_after_releases_mb for site in self._offers[node].sites}
            for node in room
        }
        for candidate in removed:
            for node, part in candidate.runs:
                if node in room:
                    room[node] = room[node].with_room_of(part)
            for key, mb in candidate.frees.items():
                free_mb = free.get(self._draft.ledger(key).device.node, {})
                if key in free_mb:
                    free_mb[key] += mb
        nodes_of, holders = self._draft.world.nodes, self._holders(free, removed)
        return [
            GangNode(nodes_of[node], room[node], free[node], self._devices[node], holders=holders[node])
            for node in room
        ]

    def _holders(
        self, free: Mapping[NodeName, Mapping[DeviceKey, int]], removed: Iterable[Candidate]
    ) -> dict[NodeName, dict[DeviceKey, int]]:
        """Count the holders of each device once these victims, and all leaving runs, have left."""
        left = Counter(key for candidate in removed for key in candidate.frees)
        return {
            node: {
                key: sum(not holding.is_leaving for holding in self._draft.ledger(key).holdings.values())
                - left[key]
                for key in devices
            }
            for node, devices in free.items()
        }

    def _only_needed(self, removed: Sequence[Candidate], gang: Gang) -> tuple[list[Candidate], Gang]:
        """Return only victims that the gang needs, and its places. First the victims that these places do not
        need are put back; then, if few are left, those without which the gang has other places."""
        victims = self._needed_for(gang, removed)
        if len(victims) > EXACT_LIMIT:
            return victims, gang
        for victim in costliest_first(victims):
            rest = [other for other in victims if other is not victim]
            if (other_places := self.places(rest)) is not None:
                victims, gang = rest, other_places
        return victims, gang

    def _needed_for(self, gang: Gang, removed: Sequence[Candidate]) -> list[Candidate]:
        """Return the victims that must leave so that these places are free; the costliest is put back first.
        To put a victim back, only its own nodes are examined again, since there may be thousands of
        victims."""
        ranks: dict[NodeName, list[int]] = {}
        for rank, place in enumerate(gang):
            ranks.setdefault(place.node, []).append(rank)
        candidates: dict[NodeName, list[Candidate]] = {node: [] for node in ranks}
        for candidate in removed:
            for node in {node for node, _ in candidate.runs} & ranks.keys():
                candidates[node].append(candidate)
        helpers = (
            removed if self._gives_enough else [c for c in removed if any(n in ranks for n, _ in c.runs)]
        )
        taken = {candidate.key: candidate for candidate in helpers}

        def put_back(candidate: Candidate) -> bool:
            del taken[candidate.key]
            for node in {node for node, _ in candidate.runs} & ranks.keys():
                leave = [other for other in candidates[node] if other.key in taken]
                if not self._has_room(gang, node, ranks[node], leave):
                    break
            else:
                if self._gives_enough is None or self._gives_enough(tuple(taken.values())):
                    return True
            taken[candidate.key] = candidate
            return False

        for candidate in costliest_first(taken.values()):
            put_back(candidate)
        return list(taken.values())

    def _has_room(
        self, gang: Gang, node: NodeName, ranks: Iterable[int], removed: Iterable[Candidate]
    ) -> bool:
        """Return True if these places on a node are free once these victims have left."""
        [gang_node] = self._gang_nodes((node,), removed)
        for rank in ranks:
            place, part = gang[rank], rank_task(self._task, rank)
            if not gang_node.room.fits(part) or any(gang_node.free[key] < mb for key, mb in place.devices):
                return False
            gang_node.add(rank, part, place.devices)
        return True

    def eviction(self, victims: Sequence[Candidate], gang: Gang, now: Instant) -> Eviction:
        needs: dict[DeviceKey, Mib] = {}
        ranks: dict[DeviceKey, tuple[int, ...]] = {}
        for rank, place in enumerate(gang):
            whole_node = () if needs_gpus(self._task.demand) else ((node_key(place.node), Mib(0)),)
            for key, mb in place.devices or whole_node:
                needs[key] = Mib(needs.get(key, 0) + mb)
                if self._task.demand.bundles:
                    ranks[key] = (*ranks.get(key, ()), rank)
        runs, surplus = named(victims)
        deadlines = [now + run.grace_seconds for run in runs]
        for site in (
            site for offer in self._offers.values() for site in offer.sites if site.device.key in needs
        ):
            if site.after_mb(victims) - site.free_after_releases_mb + site.free_mb < needs[site.device.key]:
                deadlines += deadlines_of_leavers(self._draft, site.device.key)
        return Eviction(
            gang[0].node, tuple(sorted(needs.items())), runs, Instant(max(deadlines)), ranks, surplus
        )
