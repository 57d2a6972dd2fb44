"""The planner's memory of a World from slice to slice and from cycle to cycle."""

from collections.abc import Iterable

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.nodes.node_revisions import NodeRevisions
from gpubroker_server.core.planning.nodes.node_room import Known
from gpubroker_server.core.planning.nodes.offers import Offered
from gpubroker_server.core.planning.places import PlaceTables
from gpubroker_server.core.planning.queue_order import QueueOrder
from gpubroker_server.core.planning.refusal_cache import Refusals
from gpubroker_server.core.planning.tenants.quota import QuotaNeeds
from gpubroker_server.core.world.placement_scores import PlacementScorer
from gpubroker_server.core.world.world import World

MAX_UNASKED = 10_000
"""The number of answers about demands that no task has any more above which all answers are dropped."""


class PlanCache:
    """A pure cache: a plan made with it equals the plan made without it. An entry about a node is valid until
    the node's next revision; a refusal is valid until a node grows. Another World, another policy or an
    earlier time empties the cache."""

    def __init__(self) -> None:
        self._forget(World(), Policy())

    def _forget(self, world: World, policy: Policy) -> None:
        self._world = world
        self._cycle_at: Instant | None = None
        self._scores: PlacementScorer | None = None
        self.revisions = NodeRevisions(world, policy)
        self.rooms: Known = {}
        self.offers: Offered = {}
        self.places: PlaceTables = {}
        self.refusals = Refusals()
        self.needs = QuotaNeeds()
        self.order: QueueOrder | None = None
        """The order of a cycle that is not finished."""
        self.has_grown = False
        """True if a node grew since the last slice, so that any refusal may no longer hold."""
        self.has_news = False
        """True if a node changed on which a task waits for room."""

    def open(
        self, world: World, policy: Policy, now: Instant, cycle_at: Instant, scores: PlacementScorer | None
    ) -> None:
        """Begin a slice. `cycle_at` is the instant at which its cycle began, and `scores` are those of the
        cycle."""
        if not self.revisions.are_of(world, policy, now):
            self._forget(world, policy)
        if scores is not self._scores:  # the best places may change, but refusals still hold
            self.places.clear()
            self._scores = scores
        if cycle_at != self._cycle_at:  # costs of victims are those of the beginning of a cycle
            self.offers.clear()
            self._cycle_at = cycle_at
        changed, grown = self.revisions.open(now, cycle_at)
        self.has_grown = bool(grown)
        self.has_news = bool(changed & self.refusals.awaited)
        self.refusals.awaited -= changed
        if len(self.places) + len(self.refusals) > 4 * len(world.queue.classes) + MAX_UNASKED:
            self.places.clear()
            self.refusals = Refusals()

    def close(self, decisions: Iterable[Decision]) -> None:
        """End a slice. The next slice checks whether these decisions were committed."""
        self.revisions.close(decisions)
