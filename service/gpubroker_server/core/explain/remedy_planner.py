"""A change with which a task would start, tried out by planning it anew with that change."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.explain.admission import check_demand
from gpubroker_server.core.explain.explain import stands_aside
from gpubroker_server.core.explain.pools import resettled
from gpubroker_server.core.explain.survey import Survey
from gpubroker_server.core.explain.what_if import WhatIf, in_words
from gpubroker_server.core.planning.find_way import Start, Wait, Way
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining
from gpubroker_server.core.planning.gangs.gang_search import Gang
from gpubroker_server.core.planning.nodes.draft import Draft

LEAST_SHARE = 0.1
"""To ask for less than this part of what was asked is no remedy."""

Change = Mapping[str, Any]
"""Fields as a submit or a change names them, and their new values; under `bundles`, of every rank."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing that would do. It is so as of now, if nobody else is given the room first."""

    change: Change
    """What to ask for instead; empty: nothing, it is enough to wait."""
    task: Task
    """The task with that change."""
    message: str
    places: Gang | None = None
    """Where it then starts; None if runs must leave first."""
    victims: tuple[Task, ...] = ()
    """Who would be asked to leave."""
    after: Task | None = None
    """The run after whose end it starts."""
    within: Remaining | None = None
    """When that is expected; None: at once, or nobody can tell."""


class Trials:
    """Of changes to one task."""

    def __init__(self, seen: Survey, what_if: WhatIf) -> None:
        self.seen = seen
        self.what_if = what_if
        self.task = seen.task
        self.draft: Draft = seen.draft
        self.nodes = [one.node.name for one in seen.nodes if one.is_usable]
        self.stands_aside = stands_aside(seen.task)

    def has_place(self, demand: Demand) -> bool:
        """Whether there is room for such a task now, and its pool does not forbid it."""
        settled = resettled(demand, self.seen.policy)
        if isinstance(settled, Refusal):
            return False
        return self.what_if.places(replace(self.task, demand=settled)) is not None

    def placed(self, change: Change, demand: Demand, said: str) -> Remedy | None:
        """A remedy if this demand may be submitted and has room now."""
        settled = resettled(demand, self.seen.policy)
        if isinstance(settled, Refusal):
            return None
        changed = replace(self.task, demand=settled)
        places = self.what_if.places(changed)
        if places is None or self._refuses(settled):
            return None
        return self.remedy(change, changed, Start(places), said)

    def _refuses(self, demand: Demand) -> bool:
        world = self.draft.world
        devices = [book.device for book in world.books.values()]
        return check_demand(demand, devices, world.nodes.values(), self.seen.policy) is not None

    def remedy(self, change: Change, task: Task, way: Way, said: str) -> Remedy | None:
        """What to say of a change of which it is known what would be decided with it."""
        if isinstance(way, Wait):
            return None
        if isinstance(way, Start):
            where = in_words(self.draft, way.places)
            return Remedy(change, task, f"{said} it starts now on {where}", way.places)
        victims = way.eviction.victims
        seconds = way.eviction.deadline_at - self.seen.now
        who = "1 run" if len(victims) == 1 else f"{len(victims)} runs"
        nodes = {self.draft.book(device).device.node for device, _ in way.eviction.devices}
        where = f"on {' and '.join(sorted(nodes))} within {seconds:.0f} s"
        message = f"{said} {who} would be asked to leave, and it starts {where}"
        return Remedy(change, task, message, victims=victims)


def first(steps: Sequence[int], would_do: Callable[[int], bool]) -> int | None:
    """The first step that would do, where all after it do as well."""
    at = bisect_left(steps, True, key=would_do)
    return steps[at] if at < len(steps) else None
