"""What each node could offer a preemptor: room that is coming, and runs that may be stopped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.node_capacity import Headroom
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.node_room import Outlooks
from gpubroker_server.core.planning.nodes.victims import (
    NO_COST,
    Candidate,
    Cost,
    Stoppable,
    cheapest_first,
    cost_of,
)
from gpubroker_server.core.world.ledger import Book


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
        if missing_mb <= 0:
            return NO_COST
        largest = max(candidate.frees[self.device.key] for candidate in self.holders)
        count = -(-missing_mb // largest)
        return cost_of(self.holders[:count])

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


Offered = dict[tuple[NodeName, int], tuple[int, Offer]]
"""(node, priority) -> (revision, offer): holds for one cycle, and until the node is marked as changed."""


class Offers:
    """The offers of one draft, worked out when asked for and again when something changed on the node."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        began_at: Instant | None = None,
        offered: Offered | None = None,
        outlooks: Outlooks | None = None,
    ) -> None:
        """`began_at`: of the cycle. Costs and shields are those of that moment, and what the cycle has
        admitted itself may begin before anybody asks it to stop."""
        self.draft = draft
        self.policy = policy
        self.nodes = frozenset(draft.usable_nodes())
        self._now = now
        self.began_at = now if began_at is None else began_at
        self._known: Offered = {} if offered is None else offered
        self.outlooks = outlooks or Outlooks(draft, policy, now, self.began_at, {})

    def of(self, node: NodeName, priority: int) -> Offer:
        """What a usable node offers to a task of this priority that has no pledges."""
        revision = self.draft.changes.at(node)
        known = self._known.get((node, priority))
        if known is None or known[0] != revision:
            known = self._known[node, priority] = revision, self._offer(node, priority)
        return known[1]

    def _offer(self, node: NodeName, priority: int) -> Offer:
        return self.among(node, priority, self.outlooks.leavers(node, priority))

    def stoppable(self, node: NodeName) -> Iterable[Stoppable]:
        """Every task with a run there that could be stopped for somebody, in no particular order."""
        return self.outlooks.stoppable(node)

    def among(self, node: NodeName, priority: int, runs: Iterable[Stoppable]) -> Offer:
        """What the node offers if just these may be stopped."""
        found = tuple(cheapest_first(runs, self.began_at))
        books = self.draft.usable_books(node, self.policy, self._now)
        sites = tuple(_site(book, priority, found) for book in books)
        return Offer(node, self.outlooks.soon(node, priority).beside, found, sites)


def _site(book: Book, priority: int, found: Sequence[Candidate]) -> Site:
    key = book.device.key
    holders = tuple(candidate for candidate in found if key in candidate.frees)
    soon = book.soon_mb(priority=priority)
    most = soon + sum(candidate.frees[key] for candidate in holders)
    return Site(book.device, book.free_mb(priority=priority), soon, holders, most)
