"""The offers of nodes to a preemptor: the room being released, and the runs that may be preempted."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.node_capacity import NodeHeadroom
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.node_room import NodeRooms
from gpubroker_server.core.planning.nodes.shields import stops_below
from gpubroker_server.core.planning.nodes.victims import (
    NO_COST,
    Candidate,
    Cost,
    PossibleVictim,
    cheapest_first,
    cost_of,
)
from gpubroker_server.core.world.ledger import DeviceLedger


class Site(Struct, frozen=True):
    """One device. All sizes are for a task without pledges of its own."""

    device: Device
    free_mb: int
    """The memory that is free now."""
    free_after_releases_mb: int
    """The memory that will be free after all releases under way."""
    holders: tuple[Candidate, ...]
    """The possible victims on the device, cheapest first."""
    most_mb: int
    """The memory that would be free if all `holders` left too."""

    def least_cost(self, missing_mb: int) -> Cost:
        """Return a lower bound of the cost of freeing `missing_mb` more."""
        if missing_mb <= 0:
            return NO_COST
        largest = max(candidate.frees[self.device.key] for candidate in self.holders)
        count = -(-missing_mb // largest)
        return cost_of(self.holders[:count])

    def after_mb(self, gone: Sequence[Candidate]) -> int:
        """Return the memory that is free once these victims have left, after all releases under way."""
        key = self.device.key
        return self.free_after_releases_mb + sum(candidate.frees.get(key, 0) for candidate in gone)


class Offer(Struct, frozen=True):
    node: NodeName
    room: NodeHeadroom
    """The CPU, host memory and run slots after all releases under way."""
    found: tuple[Candidate, ...]
    """The possible victims on the node, cheapest first."""
    sites: tuple[Site, ...]
    """The usable devices, in key order."""


Offered = dict[tuple[NodeName, int, int], tuple[int, Offer]]
"""Maps a node, a priority and the priority below which runs may be stopped to a revision and an offer. The
offer holds for one cycle, until the node's next revision."""


class Offers:
    """Offers of one draft, computed on demand and again when a node changes."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        began_at: Instant | None = None,
        offered: Offered | None = None,
        rooms: NodeRooms | None = None,
    ) -> None:
        """`began_at` is the instant at which the cycle began. Costs and shields are those of that instant,
        and runs that the cycle itself admitted are left alone."""
        self.draft = draft
        self.policy = policy
        self.nodes = frozenset(draft.usable_nodes())
        self._now = now
        self.began_at = now if began_at is None else began_at
        self._known: Offered = {} if offered is None else offered
        self.rooms = rooms or NodeRooms(draft, policy, now, self.began_at, {})

    def of(self, node: NodeName, task: Task) -> Offer:
        """Return the offer of the node to a task without pledges."""
        revision, below = self.draft.changes.at(node), stops_below(task)
        key = node, task.priority, below
        cached = self._known.get(key)
        if cached is None or cached[0] != revision:
            offer = self.among(node, task.priority, self.rooms.leavers(node, below))
            cached = self._known[key] = revision, offer
        return cached[1]

    def among(self, node: NodeName, priority: int, runs: Iterable[PossibleVictim]) -> Offer:
        """Return the offer of the node if only these runs may be preempted."""
        candidates = tuple(cheapest_first(runs, self.began_at))
        ledgers = self.draft.usable_ledgers(node, self.policy, self._now)
        sites = tuple(_site(ledger, priority, candidates) for ledger in ledgers)
        return Offer(node, self.rooms.soon(node, priority).beside, candidates, sites)


def _site(ledger: DeviceLedger, priority: int, found: Sequence[Candidate]) -> Site:
    key = ledger.device.key
    holders = tuple(candidate for candidate in found if key in candidate.frees)
    soon = ledger.free_after_releases_mb(priority=priority)
    most = soon + sum(candidate.frees[key] for candidate in holders)
    return Site(ledger.device, ledger.free_mb(priority=priority), soon, holders, most)
