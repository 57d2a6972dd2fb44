"""Questions about one World, asked one after the other: what is known of a node serves the next one, too."""

from collections.abc import Iterable

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.backfill import Forecast
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.placement import worth_of
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.planning.survey import Survey, survey
from gpubroker_server.core.world.world import World


class Asking:
    """A pure cache: an answer found with it is the answer found without. What it keeps of a node holds until
    that changes, or the passing of time makes a difference to it: as the planner's memory, which it uses."""

    def __init__(self) -> None:
        self._cache = PlanCache()

    def survey(
        self, world: World, task: Task, policy: Policy, now: Instant, forecasts: Iterable[Forecast] = ()
    ) -> Survey:
        """For one answer, to be found before the World changes; nothing may be decided in its draft."""
        cache = self._cache
        cache.open(world, policy, now, now, worth_of(world, policy))
        draft = Draft(world, cache.revisions.changes, cache.revisions.growth)
        return survey(draft, task, policy, now, forecasts, cache.rooms)
