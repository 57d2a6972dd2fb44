"""What each node could offer a preemptor: room that is coming, and runs that may be stopped."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core.device import Device
from service.core.draft import Draft, Headroom
from service.core.ledger import Book
from service.core.need import Ceiling, ceiling
from service.core.policy import Policy
from service.core.task import TaskState
from service.core.units import Instant, NodeName
from service.core.victims import Candidate, Cost, after, candidates, is_old_enough, may_be_stopped


@dataclass(frozen=True, slots=True)
class Site:
    """One device as it could be cleared. All sizes are for a task without pledges of its own."""

    device: Device
    free_mb: int
    """What it could have now."""
    soon_mb: int
    """What it could have once everybody who is leaving has left."""
    holders: tuple[Candidate, ...]
    """Who may be stopped here, cheapest first."""
    most_mb: int
    """What it could have if all of them were stopped."""

    def least_cost(self, missing_mb: int) -> Cost:
        """No choice among the holders that gives back so much costs less."""
        largest = max(candidate.frees[self.device.key] for candidate in self.holders)
        count = max(1, -(-missing_mb // largest))
        return sum(candidate.lost for candidate in self.holders[:count]), count

    def after_mb(self, gone: Sequence[Candidate]) -> int:
        """What it could have once these, and everybody who is leaving, have left."""
        key = self.device.key
        return self.soon_mb + sum(candidate.frees.get(key, 0) for candidate in gone)


@dataclass(frozen=True, slots=True)
class Offer:
    node: NodeName
    room: Headroom
    """CPU, host memory and run slots once everybody who is leaving has left."""
    found: tuple[Candidate, ...]
    """Who may be stopped on the node, cheapest first."""
    sites: tuple[Site, ...]
    """Its usable devices, in key order."""
    most: Ceiling
    """What they would offer if all of those were stopped."""
    most_room: Headroom


class Offered:
    """What was worked out so far; holds for a node until it is marked as changed."""

    def __init__(self) -> None:
        self.hopes: dict[NodeName, tuple[int, int]] = {}
        """Node -> (revision, the lowest priority of a run that may be stopped; -1 if somebody is leaving)."""
        self.candidates: dict[NodeName, tuple[int, list[Candidate]]] = {}
        self.offers: dict[tuple[NodeName, int], tuple[int, Offer]] = {}

    def forget_costs(self) -> None:
        """They are those of one cycle."""
        self.candidates.clear()
        self.offers.clear()


class Offers:
    """The offers of one draft, worked out when asked for and again when something changed on the node."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        began_at: Instant | None = None,
        offered: Offered | None = None,
    ) -> None:
        """`began_at`: of the cycle. Costs and shields are those of that moment, and what the cycle has
        admitted itself may begin before anybody asks it to stop."""
        self.draft = draft
        self.policy = policy
        self.nodes = sorted(draft.usable_nodes())
        self._now = now
        self._began_at = now if began_at is None else began_at
        self._known = Offered() if offered is None else offered

    def has_hope(self, node: NodeName, priority: int) -> bool:
        """Whether anybody on the node is leaving, or could be stopped for a task of this priority if nothing
        shields it. Without hope the node offers no more than is free now."""
        revision = self.draft.changes.at(node)
        known = self._known.hopes.get(node)
        if known is None or known[0] != revision:
            known = self._known.hopes[node] = revision, self._lowest_on(node)
        return known[1] < priority

    def _lowest_on(self, node: NodeName) -> int:
        """-1 if somebody is leaving."""
        lowest = 101
        for run in self.draft.runs_on(node):
            if run.state is TaskState.STOPPING:
                return -1
            if is_old_enough(run, self._began_at):
                lowest = min(lowest, run.priority)
        leaving = any(
            holding.is_leaving for book in self.draft.books_on(node) for holding in book.holdings.values()
        )
        return -1 if leaving else lowest

    def of(self, node: NodeName, priority: int) -> Offer:
        """What a node offers to a task of this priority that has no pledges."""
        revision = self.draft.changes.at(node)
        known = self._known.offers.get((node, priority))
        if known is None or known[0] != revision:
            known = self._known.offers[node, priority] = revision, self._offer(node, priority)
        return known[1]

    def _offer(self, node: NodeName, priority: int) -> Offer:
        found = tuple(
            candidate
            for candidate in self._candidates_on(node)
            if may_be_stopped(candidate.task, priority, self.policy, self._began_at)
        )
        books = self.draft.usable_books(node, self.policy, self._now)
        sites = tuple(_site(book, priority, found) for book in books)
        room = self.draft.headroom_soon(node, priority=priority)
        most = ceiling((site.device, site.most_mb) for site in sites)
        return Offer(node, room, found, sites, most, after(room, found))

    def _candidates_on(self, node: NodeName) -> list[Candidate]:
        revision = self.draft.changes.at(node)
        known = self._known.candidates.get(node)
        if known is None or known[0] != revision:
            known = self._known.candidates[node] = revision, candidates(self.draft, node, self._began_at)
        return known[1]


def _site(book: Book, priority: int, found: Sequence[Candidate]) -> Site:
    key = book.device.key
    holders = tuple(candidate for candidate in found if key in candidate.frees)
    soon = book.soon_mb(priority=priority)
    most = soon + sum(candidate.frees[key] for candidate in holders)
    return Site(book.device, book.free_mb(priority=priority), soon, holders, most)
