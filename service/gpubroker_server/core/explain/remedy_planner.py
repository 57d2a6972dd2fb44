"""Plan a task again with one change, to see whether the task would start."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.admission.pools import largest_share, reapply_pool
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import in_time, node_of
from gpubroker_server.core.explain.explain import is_deferred
from gpubroker_server.core.explain.possible import check_demand
from gpubroker_server.core.explain.survey import Survey
from gpubroker_server.core.explain.what_if import WhatIf, places_text
from gpubroker_server.core.planning.find_way import Evict, Start, Wait, Way
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining
from gpubroker_server.core.planning.gangs.gang_search import Gang
from gpubroker_server.core.planning.nodes.draft import Draft

MIN_SHARE = 0.1
"""The share of the demand below which a smaller demand is not offered as a remedy."""

Change = Mapping[str, Any]
"""Field, as the API names it -> new value. Fields under `bundles` change in every rank."""


class Remedy(Struct, frozen=True):
    """One change with which the task starts, unless another task takes the room first."""

    change: Change
    """The fields to change; empty if it is enough to wait."""
    task: Task
    """The task with that change."""
    message: str
    way: Start | Evict
    """The planner's decision with the change."""
    after: Task | None = None
    """The run, or pinned model, whose end lets the task start; None if the task need not wait for one."""
    within: Remaining | None = None
    """The time until the end of `after`; None if there is no such run, or if the time is unknown."""

    @property
    def places(self) -> Gang | None:
        """The places at which the task starts with the change; None if runs must stop first."""
        return self.way.places

    @property
    def victims(self) -> tuple[Task, ...]:
        return () if self.way.eviction is None else self.way.eviction.victims


class RemedyPlanner:
    def __init__(self, survey: Survey, what_if: WhatIf) -> None:
        self.survey = survey
        self.what_if = what_if
        self.task = survey.task
        self.draft: Draft = survey.draft
        self.nodes = [finding.node.name for finding in survey.nodes if finding.is_usable]
        self.is_deferred = is_deferred(survey.task, survey.draft.world)

    def _share_of(self, demand: Demand) -> float:
        return largest_share(demand, (ledger.device for ledger in self.draft.world.ledgers.values()))

    def has_place(self, demand: Demand) -> bool:
        """Return True if the task has room now with this demand, and its pool allows it."""
        pooled = reapply_pool(demand, self.survey.policy, self._share_of)
        if isinstance(pooled, Refusal):
            return False
        return self.what_if.places(replace(self.task, demand=pooled)) is not None

    def placed(self, change: Change, demand: Demand, text: str) -> Remedy | None:
        """Return the remedy if this demand may be submitted and has room now; otherwise None."""
        pooled = reapply_pool(demand, self.survey.policy, self._share_of)
        if isinstance(pooled, Refusal):
            return None
        changed = replace(self.task, demand=pooled)
        places = self.what_if.places(changed)
        if places is None or self._refuses(pooled):
            return None
        return self.remedy(change, changed, Start(places), text)

    def _refuses(self, demand: Demand) -> bool:
        world = self.draft.world
        devices = [ledger.device for ledger in world.ledgers.values()]
        return check_demand(demand, devices, world.nodes.values(), self.survey.policy) is not None

    def remedy(self, change: Change, task: Task, way: Way, text: str) -> Remedy | None:
        """Return the remedy for a change; None if the task would still wait. `way` is the planner's decision
        with the change."""
        if isinstance(way, Wait):
            return None
        if isinstance(way, Start):
            place_names = places_text(self.draft, way.places)
            return Remedy(change, task, f"{text}, it starts now on {place_names}", way)
        victims = way.eviction.victims
        seconds = way.eviction.deadline_at - self.survey.now
        runs = "1 run" if len(victims) == 1 else f"{len(victims)} runs"
        nodes = {node_of(device) for device, _ in way.eviction.devices}
        place_names = f"on {' and '.join(sorted(nodes))} within {in_time(seconds)}"
        message = f"{text}, it preempts {runs} and starts {place_names}"
        return Remedy(change, task, message, way)


def first_step(steps: Sequence[int], helps: Callable[[int], bool]) -> int | None:
    """Return the first step that helps; None if none does. All steps after one that helps must help as
    well."""
    index = bisect_left(steps, True, key=helps)
    return steps[index] if index < len(steps) else None
