"""When limits of the whole cluster and quotas leave enough for a task, as those leave who are there now."""

from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from service.core.departures import Departure, Departures
from service.core.draft import Draft
from service.core.policy import Policy
from service.core.quota import Quotas
from service.core.ranks import asks_for_gpus
from service.core.task import Task


class Leaver(NamedTuple):
    at: float
    run: Task
    departure: Departure


class Limits:
    """Of one draft."""

    def __init__(self, departures: Departures, quotas: Quotas) -> None:
        self._departures = departures
        self._policy = departures.policy
        self._draft = departures.draft
        self._quotas = quotas

    def opening(self, task: Task, planned: Iterable[Leaver] = ()) -> list[Leaver] | None:
        """Who must have left before none of them stands in its way, in order; empty if none does now, None if
        that is not in sight. `planned`: those who start before it."""
        balance, others = self._balance(task), list(planned)
        for other in others:
            balance.change(other.run, +1)
        gone: list[Leaver] = []
        for leaver in sorted((*self._leavers(task), *others), key=_in_order) if balance.is_short else ():
            gone.append(leaver)
            balance.change(leaver.run, -1)
            if not balance.is_short:
                break
        return None if balance.is_short or (gone and gone[-1].at == inf) else gone

    def _balance(self, task: Task) -> "_Balance":
        return _Balance(self._draft, self._policy, self._quotas, task)

    def _leavers(self, task: Task) -> Iterator[Leaver]:
        """Those who count against what the task counts against."""
        for run in self._draft.active():
            if self.shares(run, task):
                departure = self._departures.of(run)
                yield Leaver(departure.p50_at, run, departure)

    def shares(self, other: Task, task: Task) -> bool:
        """Whether what the one takes of a limit or of a quota may be lacking to the other."""
        if task.demand.counted and other.demand.counted:
            names = {name for name, _ in task.demand.counted}
            if any(name in names for name, _ in other.demand.counted):
                return True
        mine = self._policy.tenant(task.tenant)
        if mine.guaranteed_mb is None or not (asks_for_gpus(task.demand) and asks_for_gpus(other.demand)):
            return False
        cohort = self._policy.tenant(other.tenant).cohort
        return other.tenant == task.tenant or (bool(mine.cohort) and mine.cohort == cohort)


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
        held = sum(lease.mb for lease in self._draft.world.leases_of(other)) if other.is_active else 0
        mb = held or self._quotas.need_mb(other.demand)
        self._given[other.tenant] = self._given.get(other.tenant, 0) + sign * mb

    @property
    def is_short(self) -> bool:
        asked = self._task.demand.counted
        return any(amount > round(self._left[name], 6) for name, amount in asked) or self._quotas.is_short(
            self._task, self._given
        )


def _in_order(leaver: Leaver) -> tuple[float, str]:
    return leaver.at, leaver.run.id
