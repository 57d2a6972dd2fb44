"""What guarantees ask of preemption: what may be taken back from borrowers, what left alone."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from service.core.demand import Demand
from service.core.draft import Draft
from service.core.policy import Policy, band_of
from service.core.quota import NOBODY, Quotas
from service.core.task import Task
from service.core.units import TaskId
from service.core.victims import Candidate, named

Surplus = Mapping[str, int]
"""Borrower -> MiB beyond its guarantee that are not leaving yet."""


@dataclass(frozen=True, slots=True)
class Restraint:
    """Of a task whose tenant would borrow: nobody of its cohort that has no more than it is guaranteed is
    stopped for it. Else the two would stop each other in turn, the one by right of its guarantee, the other
    by its priority."""

    tenant: str
    surplus: Surplus
    draft: Draft
    policy: Policy

    def lets_go(self, gone: Sequence[Candidate]) -> bool:
        return self.allows(*named(gone))

    def allows(self, tasks: Collection[Task], ranks: Mapping[TaskId, tuple[int, ...]]) -> bool:
        """Whether there is an order in which each of them is beyond the guarantee when it is its turn."""
        cohort = self.policy.tenant(self.tenant).cohort
        taken: dict[str, list[int]] = {}
        for tenant, mb in _taken(tasks, ranks, self.draft):
            whose = self.policy.tenant(tenant)
            if tenant != self.tenant and whose.cohort == cohort and whose.guaranteed_mb is not None:
                taken.setdefault(tenant, []).append(mb)
        return all(sum(mbs) - max(mbs) < self.surplus.get(name, 0) for name, mbs in taken.items())


class Claims:
    """Of the tenants of one draft."""

    def __init__(self, draft: Draft, policy: Policy, quotas: Quotas) -> None:
        self._draft = draft
        self._policy = policy
        self._quotas = quotas
        self._revision = -1
        self._surplus: dict[str, dict[str, int]] = {}
        self._lowest: dict[str, int] | None = None
        """Tenant -> the lowest priority of its runs."""

    def surplus(self, tenant: str) -> Surplus:
        """Of those from whom this tenant could take back, were it below its guarantee."""
        cohort = self._policy.tenant(tenant).cohort
        if not cohort:
            return {}
        if self._revision != self._draft.changes.revision:
            self._revision = self._draft.changes.revision
            self._surplus = self._measure()
        found = self._surplus.get(cohort, {})
        return {name: mb for name, mb in found.items() if name != tenant}

    def of(self, task: Task) -> Surplus:
        """From whom this task may take back, and how much; empty if its tenant has what it is guaranteed, or
        would have more with this task, or if nobody borrows."""
        return self.of_any(task.tenant, task.demand, task.priority, task.id)

    def of_any(self, tenant: str, demand: Demand, priority: int, task: TaskId = NOBODY) -> Surplus:
        """The same for a task that is not named, or has no pledges."""
        return self.surplus(tenant) if self._is_entitled(tenant, demand, priority, task) else {}

    def restraint_on(self, task: Task) -> Restraint | None:
        """None if its tenant would not borrow for it, or could not."""
        return self.restraint(task.tenant, task.demand, task.priority, task.id)

    def restraint(
        self, tenant: str, demand: Demand, priority: int, task: TaskId = NOBODY
    ) -> Restraint | None:
        """The same for a task that is not named, or has no pledges."""
        borrows = self._is_entitled(tenant, demand, priority, task) is False
        if not (borrows and self._policy.tenant(tenant).cohort):
            return None
        return Restraint(tenant, self.surplus(tenant), self._draft, self._policy)

    def may_yield(self, tenant: str, priority: int) -> bool:
        """Whether the tenant has runs of lower priority that might be stopped for its own task."""
        if self._lowest is None:
            self._lowest = {}
            for run in map(self._draft.world.tasks.__getitem__, self._draft.world.active):
                self._lowest[run.tenant] = min(run.priority, self._lowest.get(run.tenant, run.priority))
        return self._policy.preemption and self._lowest.get(tenant, priority) < priority

    def kept_up_to(self, task: Task) -> int:
        """Up to which priority nobody takes what is freed for the task. Within its tenant's guarantee it is
        kept from the whole band: who borrows might take it before the task can start, and be made to give
        it back."""
        is_owner = self._is_entitled(task.tenant, task.demand, task.priority, task.id)
        is_lent = bool(self._policy.tenant(task.tenant).cohort)
        return band_of(task.priority)[2] if is_owner and is_lent else task.priority

    def _is_entitled(self, tenant: str, demand: Demand, priority: int, task: TaskId) -> bool | None:
        """Whether with such a task the tenant has no more than it is guaranteed; None if it has no quota."""
        if not (self._policy.has_quotas and (demand.gpus or demand.bundles)):
            return None
        allowance = self._quotas.of(tenant, priority, task)
        if allowance is None:
            return None
        return allowance.claimed_mb + self._quotas.need_mb(demand) <= allowance.guaranteed_mb

    def _measure(self) -> dict[str, dict[str, int]]:
        held = dict(self._quotas.held_mb())
        for lease in self._draft.leaving():
            held[lease.tenant] = held.get(lease.tenant, 0) - lease.mb
        found: dict[str, dict[str, int]] = {}
        for tenant, mb in held.items():
            whose = self._policy.tenant(tenant)
            if whose.guaranteed_mb is not None and mb > whose.guaranteed_mb:
                found.setdefault(whose.cohort, {})[tenant] = mb - whose.guaranteed_mb
        return found


def leaves_guarantees(gone: Sequence[Candidate], surplus: Surplus, draft: Draft) -> bool:
    """Whether nobody is left with less than it is guaranteed."""
    taken: dict[str, int] = {}
    for tenant, mb in _taken(*named(gone), draft):
        taken[tenant] = taken.get(tenant, 0) + mb
    return all(mb <= surplus[tenant] for tenant, mb in taken.items())


def leased_mb(gone: Sequence[Candidate], draft: Draft) -> int:
    """What they have of quotas."""
    return sum(mb for _, mb in _taken(*named(gone), draft))


def _taken(
    tasks: Collection[Task], ranks: Mapping[TaskId, tuple[int, ...]], draft: Draft
) -> Iterator[tuple[str, int]]:
    """(tenant, MiB) of each run that goes, and of each rank that goes alone, but for what leaves anyway."""
    for task in tasks:
        leases = draft.world.leases_of(task)
        holdings = [draft.book(lease.device).holdings.get(lease.key) for lease in leases]
        stay = [holding.lease for holding in holdings if holding is not None and not holding.is_leaving]
        if task.id not in ranks:
            yield task.tenant, sum(lease.mb for lease in stay)
        for rank in ranks.get(task.id, ()):
            yield task.tenant, sum(lease.mb for lease in stay if lease.rank == rank)
