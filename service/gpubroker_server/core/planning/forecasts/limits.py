"""Forecasts of the times at which cluster-wide limits and quotas leave enough for a task, as the current runs
end."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass
from math import inf
from typing import NamedTuple

from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import counted_by, needs_gpus
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.planning.forecasts.future_capacity import ExpectedEnd, ExpectedEnds
from gpubroker_server.core.planning.forecasts.reservations import BindingOrder, Forecast
from gpubroker_server.core.planning.forecasts.run_estimates import whole_run_seconds
from gpubroker_server.core.planning.forecasts.waiting import quota_line
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants.quota import QuotaNeeds, Quotas
from gpubroker_server.core.world.queue import OrderKey


class EndingRun(NamedTuple):
    at: float
    run: Task
    expected_end: ExpectedEnd


def share_a_limit(taker: Task, task: Task, policy: Policy) -> bool:
    """Return True if both tasks count against one limit or one quota."""
    if task.demand.counted and taker.demand.counted:
        names = {name for name, _ in task.demand.counted}
        if any(name in names for name, _ in taker.demand.counted):
            return True
    tenant_policy = policy.tenant(task.tenant)
    if tenant_policy.guaranteed_mb is None or not (needs_gpus(task.demand) and needs_gpus(taker.demand)):
        return False
    cohort = policy.tenant(taker.tenant).cohort
    return taker.tenant == task.tenant or (bool(tenant_policy.cohort) and tenant_policy.cohort == cohort)


class Limits:
    """Finds the runs whose ends a task waits for because of limits and quotas, in one draft."""

    def __init__(self, draft: Draft, expected_ends: ExpectedEnds, needs: QuotaNeeds) -> None:
        self._draft = draft
        self._expected_ends = expected_ends
        self._policy = expected_ends.policy
        self._quotas = Quotas(draft, expected_ends.policy, needs)

    def runs_to_wait_for(self, task: Task, planned: Iterable[EndingRun] = ()) -> list[EndingRun] | None:
        """Return the runs that must end before no limit or quota stops the task, in order of their ends.

        The list is empty if the task may start now, and None if no end is in sight. Leases in RELEASING count
        as free. `planned` has the tasks that start before this one.
        """
        balance = _LimitBalance(self._draft, self._policy, self._quotas, task)
        others = [
            reservation for reservation in planned if share_a_limit(reservation.run, task, self._policy)
        ]
        for other in others:
            balance.change(other.run, +1)
        ended: list[EndingRun] = []
        if balance.is_short:
            balance.count_releasing()
        for run_end in (
            sorted((*self._limiting_runs(task), *others), key=_in_order) if balance.is_short else ()
        ):
            ended.append(run_end)
            balance.change(run_end.run, -1)
            if not balance.is_short:
                break
        return None if balance.is_short or (ended and ended[-1].at == inf) else ended

    def _limiting_runs(self, task: Task) -> Iterator[EndingRun]:
        """Yield the active runs that count against one of the task's limits or its quota."""
        for run in self._draft.active():
            if share_a_limit(run, task, self._policy):
                expected_end = self._expected_ends.of(run)
                yield EndingRun(expected_end.p50_at, run, expected_end)


class _LimitBalance:
    """What a task lacks of its limits and its quota as other runs begin and end."""

    def __init__(self, draft: Draft, policy: Policy, quotas: Quotas, task: Task) -> None:
        self._draft = draft
        self._quotas = quotas
        self._task = task
        self._left = draft.left_of(task, policy.custom_limits)
        self._given: dict[str, int] = {}

    def change(self, other: Task, sign: int) -> None:
        """Count the begin (`sign` +1) or the end (-1) of a run."""
        for name, amount in counted_by(other) if other.is_active else other.demand.counted:
            if name in self._left:
                self._left[name] -= sign * amount
        leases = self._draft.world.leases_of(other) if other.is_active else ()
        held = sum(lease.mb for lease in leases if lease.state is not LeaseState.RELEASING)
        self._give(other.tenant, sign * (held or self._quotas.need_mb(other.demand)))

    def count_releasing(self) -> None:
        """Count leases in RELEASING as free."""
        for lease in self._draft.leaving():
            if lease.state is LeaseState.RELEASING:
                self._give(lease.tenant, -lease.mb)

    def _give(self, tenant: str, mb: int) -> None:
        self._given[tenant] = self._given.get(tenant, 0) + mb

    @property
    def is_short(self) -> bool:
        asked = self._task.demand.counted
        return any(amount > round(self._left[name], 6) for name, amount in asked) or self._quotas.is_short(
            self._task, self._given
        )


def _in_order(run_end: EndingRun) -> tuple[float, str]:
    return run_end.at, run_end.run.id


class FirstWaiting(NamedTuple):
    """A task among the first to wait for a limit or quota. It has no room reserved yet."""

    forecast: Forecast
    task: Task


@dataclass(eq=False)
class LimitReservations:
    """Keeps limits and quotas for the first tasks that wait for them, by their forecasts."""

    draft: Draft
    policy: Policy
    now: Instant
    order: Callable[[Task], OrderKey]
    """Returns a task's present place in the queue."""
    forecasts: InitVar[Iterable[Forecast]]

    def __post_init__(self, forecasts: Iterable[Forecast]) -> None:
        forecasts = tuple(forecasts)
        self._binding = BindingOrder(self.draft.world, self.order, forecasts)
        self._first: dict[str, list[FirstWaiting]] = {}
        """Maps a limit or quota to the first tasks that wait for it."""
        self._longest: dict[tuple[object, ...], Seconds] = {}
        """Maps everything that a run time estimate depends on to the answer of `_longest_seconds`."""
        for forecast in forecasts:
            task = self.draft.world.tasks.get(forecast.task)
            if forecast.first_in and task is not None and task.state is TaskState.PENDING:
                for name in forecast.first_in:
                    self._first.setdefault(name, []).append(FirstWaiting(forecast, task))

    def on_start(self, task: TaskId) -> None:
        """Drop a task that is admitted."""
        for name, line in self._first.items():
            self._first[name] = [first for first in line if first.task.id != task]

    def ahead_of(self, task: Task) -> list[FirstWaiting]:
        """Return the tasks ahead of this one that wait for one of its limits or its quota, and are expected
        to start before it might end."""
        if not self._first:
            return []
        names = [name for name, _ in task.demand.counted]
        if needs_gpus(task.demand):
            names.append(quota_line(task.tenant))
        ahead = [first for name in names for first in self._first.get(name, ())]
        queue_place = self._binding.place_of(task) if ahead else None
        ahead = [first for first in ahead if queue_place and self._binding.binds(first.task, queue_place)]
        ends_at = self.now + (self._longest_seconds(task) if ahead else 0.0)
        return [first for first in ahead if ends_at > first.forecast.start_at]

    def _longest_seconds(self, task: Task) -> Seconds:
        """Return the 90th percentile of the task's run time on the slowest usable kind; infinite if
        unknown."""
        stated = task.expected_seconds, task.timeout_seconds, task.grace_seconds
        equivalence = task.tenant, task.subject, needs_gpus(task.demand), *stated
        if equivalence not in self._longest:
            kinds = {kind for node in self.draft.usable_nodes() for kind in self.draft.kinds_for(node, task)}
            sketches = self.draft.world.learned.sketches
            self._longest[equivalence] = whole_run_seconds(task, sketches, self.policy, kinds)[1]
        return self._longest[equivalence]
