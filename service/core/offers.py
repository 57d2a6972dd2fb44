"""What each node could offer a preemptor: room that is coming, and runs that may be stopped."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from service.core.device import Device
from service.core.draft import Draft, Headroom
from service.core.ledger import Book
from service.core.policy import Policy
from service.core.units import Instant, NodeName
from service.core.victims import Candidate, Cost, candidates, may_be_stopped


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


class Offers:
    """The offers of one draft, worked out when asked for and again when something changed on the node."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant) -> None:
        self.draft = draft
        self.policy = policy
        self.nodes = sorted(draft.usable_nodes())
        self._now = now
        self._candidates: dict[NodeName, tuple[int, list[Candidate]]] = {}
        self._offers: dict[tuple[NodeName, int], tuple[int, Offer]] = {}

    @cached_property
    def lowest_priority(self) -> int:
        """Nobody who could be stopped has a lower one; 101 if there is nobody."""
        runs = (run.priority for node in self.nodes for run in self.draft.runs_on(node))
        return min(runs, default=101)

    def of(self, node: NodeName, priority: int) -> Offer:
        """What a node offers to a task of this priority that has no pledges."""
        revision = self.draft.revision(node)
        known = self._offers.get((node, priority))
        if known is None or known[0] != revision:
            known = self._offers[node, priority] = revision, self._offer(node, priority)
        return known[1]

    def _offer(self, node: NodeName, priority: int) -> Offer:
        found = tuple(
            candidate
            for candidate in self._candidates_on(node)
            if may_be_stopped(candidate.task, priority, self.policy, self._now)
        )
        books = self.draft.usable_books(node, self.policy, self._now)
        sites = tuple(_site(book, priority, found) for book in books)
        return Offer(node, self.draft.headroom_soon(node, priority=priority), found, sites)

    def _candidates_on(self, node: NodeName) -> list[Candidate]:
        revision = self.draft.revision(node)
        known = self._candidates.get(node)
        if known is None or known[0] != revision:
            known = self._candidates[node] = revision, candidates(self.draft, node, self._now)
        return known[1]


def _site(book: Book, priority: int, found: Sequence[Candidate]) -> Site:
    key = book.device.key
    holders = tuple(candidate for candidate in found if key in candidate.frees)
    soon = book.soon_mb(priority=priority)
    most = soon + sum(candidate.frees[key] for candidate in holders)
    return Site(book.device, book.free_mb(priority=priority), soon, holders, most)
