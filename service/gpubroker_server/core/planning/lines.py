"""Limits and quotas for which somebody waits, and who may take of them all the same."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import asks_for_gpus
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.planning.backfill import Forecast
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.run_estimates import whole_run_seconds
from gpubroker_server.core.planning.waiting import line_of_quota
from gpubroker_server.core.world.queue import OrderKey, reserves_before


class First(NamedTuple):
    """Of those who are in a line: it takes no room yet."""

    forecast: Forecast
    task: Task


class Lines:
    """In one draft those lines of which forecasts tell who are the first."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        order: Callable[[Task], OrderKey],
        forecasts: Iterable[Forecast],
    ) -> None:
        """`order`: a task's place in the queue now."""
        self._draft = draft
        self._policy = policy
        self._now = now
        self._order = order
        self._first: dict[str, list[First]] = {}
        """Limit or quota -> who are the first to wait for it."""
        self._longest: dict[tuple[object, ...], Seconds] = {}
        """Of tasks that differ in nothing by which run times are told."""
        for forecast in forecasts:
            task = draft.world.tasks.get(forecast.task)
            if forecast.first_in and task is not None and task.state is TaskState.PENDING:
                for name in forecast.first_in:
                    self._first.setdefault(name, []).append(First(forecast, task))

    def started(self, task: TaskId) -> None:
        """The task is admitted, and stands in no line any more: whoever comes next in it is the first."""
        for name, line in self._first.items():
            self._first[name] = [first for first in line if first.task.id != task]

    def ahead_of(self, task: Task) -> list[First]:
        """Those ahead of the task who wait for a limit, or for the quota, of which it would take, if it might
        not be done by the time at which they are to start."""
        if not self._first:
            return []
        names = [name for name, _ in task.demand.counted]
        if asks_for_gpus(task.demand):
            names.append(line_of_quota(task.tenant))
        ahead = [first for name in names for first in self._first.get(name, ())]
        mine = self._order(task) if ahead else None
        ahead = [first for first in ahead if mine and reserves_before(self._order(first.task), mine)]
        ends_at = self._now + (self._longest_seconds(task) if ahead else 0.0)
        return [first for first in ahead if ends_at > first.forecast.start_at]

    def _longest_seconds(self, task: Task) -> Seconds:
        """Nine in ten of its runs are over by then, wherever it comes to; infinite if nobody knows."""
        said = task.expected_seconds, task.timeout_seconds, task.grace_seconds
        likes = task.tenant, task.subject, asks_for_gpus(task.demand), *said
        if likes not in self._longest:
            kinds = {
                kind for node in self._draft.usable_nodes() for kind in self._draft.kinds_for(node, task)
            }
            sketches = self._draft.world.learned.sketches
            self._longest[likes] = whole_run_seconds(task, sketches, self._policy, kinds)[1]
        return self._longest[likes]
