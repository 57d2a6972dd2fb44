"""Questions about one World, asked one after the other: what is known of a node serves the next one, too."""

from collections.abc import Iterable

from service.core.backfill import Forecast
from service.core.draft import Draft
from service.core.memory import Memory
from service.core.placement import worth_of
from service.core.policy import Policy
from service.core.survey import Survey, survey
from service.core.task import Task
from service.core.units import Instant
from service.core.world import World


class Asking:
    """A pure cache: an answer found with it is the answer found without. What it keeps of a node holds until
    that changes, or the passing of time makes a difference to it: as the planner's memory, which it uses."""

    def __init__(self) -> None:
        self._memory = Memory()

    def survey(
        self, world: World, task: Task, policy: Policy, now: Instant, forecasts: Iterable[Forecast] = ()
    ) -> Survey:
        """For one answer, to be found before the World changes; nothing may be decided in its draft."""
        memory = self._memory
        memory.open(world, policy, now, now, worth_of(world, policy))
        draft = Draft(world, memory.changes, memory.growth)
        return survey(draft, task, policy, now, forecasts, memory.outlooks)
