"""Tasks that forecasts keep away: so are their likes, as long as nothing changes."""

from operator import ge

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import asks_for_gpus
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.planning.backfill import Guards
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.memory import Keepers
from gpubroker_server.core.planning.run_estimates import whole_run_seconds
from gpubroker_server.core.planning.shields import first_up_to
from gpubroker_server.core.world.queue import Kin

Lengths = tuple[Seconds, ...]
"""By kind of device: nine in ten of its runs take no longer; infinite if nobody knows."""


class KeptAway:
    """In one draft. Of tasks of one demand and priority that stand behind the same forecasts and are shielded
    alike, from the same ones, who takes longer is kept away from no less."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant, guards: Guards) -> None:
        self._draft = draft
        self._policy = policy
        self._now = now
        self._guards = guards
        self._kinds = sorted({book.device.kind for node in guards.on for book in draft.books_on(node)})
        self._changed = -1
        """Revision of changes of which `_known` tells."""
        self._known: dict[tuple[object, ...], Lengths] = {}
        """Of such tasks, those of one that was kept away."""
        self._lengths: dict[tuple[object, ...], Lengths] = {}
        """Of tasks that differ in nothing by which run times are told."""

    def includes(self, task: Task, kin: Kin) -> bool:
        """Whether it is known that the task has neither room that it may have, nor a way to make it; then it
        is counted."""
        if self._changed != self._draft.changes.revision:
            return False
        known = self._known.get(self._likes(task, kin))
        is_known = known is not None and all(map(ge, self._lengths_of(task), known))
        self._guards.kept_away += is_known
        return is_known

    def add(self, task: Task, kin: Kin) -> None:
        """Forecasts keep it from all that there is."""
        self._guards.kept_away += 1
        if self._changed != self._draft.changes.revision:
            self._changed = self._draft.changes.revision
            self._known.clear()
        self._known.setdefault(self._likes(task, kin), self._lengths_of(task))

    def keepers(self, task: Task) -> Keepers:
        """Who keep room from it, now and later."""
        guards, sort = self._guards, (*self._sort_of(task), *self._kinds)
        ahead, lengths = guards.ahead_of(task), self._lengths_of(task)
        return Keepers(guards.forecasts, guards.is_tired, ahead, sort, lengths)

    def _likes(self, task: Task, kin: Kin) -> tuple[object, ...]:
        return kin, task.priority, *self._sort_of(task), self._guards.ahead_of(task)

    def _sort_of(self, task: Task) -> tuple[object, ...]:
        is_shielded = task.preemptions >= self._policy.preemption_budget
        return is_shielded, self._first_up_to(task), task.tenant if self._policy.has_quotas else ""

    def _first_up_to(self, task: Task) -> int:
        """The highest priority of those with forecasts before whom it has its turn; 0 if there are none."""
        until = first_up_to(task, self._policy, self._now)
        if until == task.priority:
            return 0
        planned = {one.task.priority for on in self._guards.on.values() for one in on}
        return max((priority for priority in planned if task.priority < priority <= until), default=0)

    def _lengths_of(self, task: Task) -> Lengths:
        said = task.expected_seconds, task.timeout_seconds, task.grace_seconds
        likes = task.tenant, task.subject, asks_for_gpus(task.demand), *said
        if likes not in self._lengths:
            kinds = self._kinds if asks_for_gpus(task.demand) else [""]
            sketches, policy = self._draft.world.learned.sketches, self._policy
            self._lengths[likes] = tuple(
                whole_run_seconds(task, sketches, policy, (kind,))[1] for kind in kinds
            )
        return self._lengths[likes]
