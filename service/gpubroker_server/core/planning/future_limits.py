"""When limits of the whole cluster and quotas leave enough for a task, as those leave who are there now."""

from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import asks_for_gpus
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.expected_ends import Departure, Departures
from gpubroker_server.core.planning.quota import Needs, Quotas


class Leaver(NamedTuple):
    at: float
    run: Task
    departure: Departure


def share_a_limit(taker: Task, task: Task, policy: Policy) -> bool:
    """Whether what the first takes of a limit or of a quota may be lacking to the second."""
    if task.demand.counted and taker.demand.counted:
        names = {name for name, _ in task.demand.counted}
        if any(name in names for name, _ in taker.demand.counted):
            return True
    mine = policy.tenant(task.tenant)
    if mine.guaranteed_mb is None or not (asks_for_gpus(task.demand) and asks_for_gpus(taker.demand)):
        return False
    cohort = policy.tenant(taker.tenant).cohort
    return taker.tenant == task.tenant or (bool(mine.cohort) and mine.cohort == cohort)


class Limits:
    """When they open for one task after another, as things are at one moment."""

    def __init__(self, draft: Draft, departures: Departures, needs: Needs) -> None:
        """`draft`: of that moment; whoever was admitted since an older one is not counted in that."""
        self._draft = draft
        self._departures = departures
        self._policy = departures.policy
        self._quotas = Quotas(draft, departures.policy, needs)

    def opening(self, task: Task, planned: Iterable[Leaver] = ()) -> list[Leaver] | None:
        """Who must have left before none of them stands in its way, in order; empty if none does now, None if
        that is not in sight. What runs that are over still hold counts as given back. `planned`: those who
        start before it."""
        balance = _Balance(self._draft, self._policy, self._quotas, task)
        others = [one for one in planned if share_a_limit(one.run, task, self._policy)]
        for other in others:
            balance.change(other.run, +1)
        gone: list[Leaver] = []
        if balance.is_short:
            balance.receive()
        for leaver in sorted((*self._leavers(task), *others), key=_in_order) if balance.is_short else ():
            gone.append(leaver)
            balance.change(leaver.run, -1)
            if not balance.is_short:
                break
        return None if balance.is_short or (gone and gone[-1].at == inf) else gone

    def _leavers(self, task: Task) -> Iterator[Leaver]:
        """Those who count against what the task counts against."""
        for run in self._draft.active():
            if share_a_limit(run, task, self._policy):
                departure = self._departures.of(run)
                yield Leaver(departure.p50_at, run, departure)


class _Balance:
    """What a task lacks of limits and of its quota while others come and go."""

    def __init__(self, draft: Draft, policy: Policy, quotas: Quotas, task: Task) -> None:
        self._draft = draft
        self._quotas = quotas
        self._task = task
        self._left = draft.left_of(task, policy.custom_limits)
        self._given: dict[str, int] = {}

    def change(self, other: Task, sign: int) -> None:
        """It comes (+1) or goes (-1)."""
        for name, amount in other.demand.counted:
            if name in self._left:
                self._left[name] -= sign * amount
        leases = self._draft.world.leases_of(other) if other.is_active else ()
        held = sum(lease.mb for lease in leases if lease.state is not LeaseState.RELEASING)
        self._give(other.tenant, sign * (held or self._quotas.need_mb(other.demand)))

    def receive(self) -> None:
        """What runs that are over still hold."""
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


def _in_order(leaver: Leaver) -> tuple[float, str]:
    return leaver.at, leaver.run.id
