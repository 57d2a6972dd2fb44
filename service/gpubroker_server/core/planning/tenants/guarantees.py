"""Guarantees in preemption: the memory that can be reclaimed from borrowers, and the runs that are
protected."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.policy import Policy, band_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.victims import Candidate
from gpubroker_server.core.planning.tenants.quota import NO_TASK, Quotas
from gpubroker_server.core.world.queue import OrderKey

Surplus = Mapping[str, int]
"""Maps a borrower to the MiB that it holds beyond its guarantee, without runs that are leaving already."""


class BorrowerRule(Struct, frozen=True):
    """The rule that a borrower cannot preempt a tenant of its cohort that is within its guarantee. Otherwise
    the two would preempt each other in turn, one by its guarantee, the other by its priority."""

    tenant: str
    surplus: Surplus
    draft: Draft
    policy: Policy

    def protects(self, tenant: str) -> bool:
        """Return True if runs of that tenant are preempted only while the tenant is above its guarantee."""
        tenant_policy, other = self.policy.tenant(self.tenant), self.policy.tenant(tenant)
        return (
            tenant != self.tenant and other.cohort == tenant_policy.cohort and other.guaranteed_mb is not None
        )

    def together(self, found: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates that may leave together with those before them: there is an order in which
        each leaves while its tenant is above its guarantee."""
        taken = _LeavingByTenant(self.draft, self._may_lose)
        return [candidate for candidate in found if taken.takes(candidate.task, candidate.rank)]

    def allows(self, tasks: Collection[Task], ranks: Mapping[TaskId, tuple[int, ...]]) -> bool:
        """Return True if all of these tasks may leave; of gangs in `ranks`, only those ranks leave."""
        taken = _LeavingByTenant(self.draft, self._may_lose)
        return all(taken.takes(task, rank) for task in tasks for rank in ranks.get(task.id, (None,)))

    def _may_lose(self, tenant: str, total_mb: int, largest_mb: int) -> bool:
        # In the best order the largest run leaves last: the tenant must still be above its guarantee then.
        return not self.protects(tenant) or total_mb - largest_mb < self.surplus.get(tenant, 0)


class Guarantees:
    """The guarantees of the tenants in one draft."""

    def __init__(self, draft: Draft, policy: Policy, quotas: Quotas) -> None:
        self._draft = draft
        self._policy = policy
        self._quotas = quotas
        self._revision = -1
        self._surplus: dict[str | None, dict[str, int]] = {}
        self._within: dict[str | None, set[str]] = {}
        """Maps a cohort to its tenants that hold memory and are within their guarantee."""
        self._lowest: dict[str, int] | None = None
        """Maps a tenant to the lowest priority of its runs."""

    def surplus(self, tenant: str) -> Surplus:
        """Return what this tenant could reclaim if it were below its guarantee."""
        cohort = self._policy.tenant(tenant).cohort
        if not cohort:
            return {}
        if self._revision != self._draft.changes.revision:
            self._revision = self._draft.changes.revision
            self._measure()
        of_cohort = self._surplus.get(cohort, {})
        return {name: mb for name, mb in of_cohort.items() if name != tenant}

    def reclaimable(self, task: Task) -> Surplus:
        """Return what the task may reclaim, by borrower; empty if its tenant would exceed its guarantee."""
        return self.reclaimable_by(task.tenant, task.demand, task.priority, task.id)

    def reclaimable_by(self, tenant: str, demand: Demand, priority: int, task: TaskId = NO_TASK) -> Surplus:
        """Return what a task of these properties may reclaim, by borrower. NO_TASK stands for a task without
        pledges."""
        return self.surplus(tenant) if self._is_within_guarantee(tenant, demand, priority, task) else {}

    def borrower_rule_for(self, task: Task) -> BorrowerRule | None:
        """Return the rule for what the task may preempt as a borrower; None if its tenant would not borrow
        for the task, or has no cohort."""
        return self.borrower_rule(task.tenant, task.demand, task.priority, task.id)

    def borrower_rule(
        self, tenant: str, demand: Demand, priority: int, task: TaskId = NO_TASK
    ) -> BorrowerRule | None:
        """Return the rule for a task of these properties, as `borrower_rule_for` does. NO_TASK stands for a
        task without pledges."""
        borrows = self._is_within_guarantee(tenant, demand, priority, task) is False
        if not (borrows and self._policy.tenant(tenant).cohort):
            return None
        return BorrowerRule(tenant, self.surplus(tenant), self._draft, self._policy)

    def protected_tenants(self, task: Task) -> frozenset[str]:
        """Return the tenants whose runs with GPUs are not preempted for the task, whatever its priority."""
        if self.borrower_rule_for(task) is None:
            return frozenset()
        return frozenset(self._within.get(self._policy.tenant(task.tenant).cohort, ())) - {task.tenant}

    def would_be_protected(self, waiting: Task, task: Task) -> bool:
        """Return True if the waiting task, once it ran, could not be preempted for the other task."""
        rule = self.borrower_rule_for(task)
        if rule is None or not rule.protects(waiting.tenant):
            return False
        return self._is_within_guarantee(waiting.tenant, waiting.demand, waiting.priority, waiting.id) is True

    def has_lower_priority_runs(self, tenant: str, priority: int) -> bool:
        """Return True if a task of this priority could preempt a run of its own tenant."""
        if self._lowest is None:
            self._lowest = {}
            for run in map(self._draft.world.tasks.__getitem__, self._draft.world.active):
                self._lowest[run.tenant] = min(run.priority, self._lowest.get(run.tenant, run.priority))
        return self._policy.preemption and self._lowest.get(tenant, priority) < priority

    def kept_up_to(self, task: Task, place: OrderKey, *, is_shared: bool) -> int:
        """Return the highest priority that cannot take what is freed for the task, so that no task behind it
        in its band can. `is_shared` is True if tenants come before priority and age in the order of a
        band."""
        top = band_of(task.priority)[2]
        if is_shared or self._could_be_borrowed(task):
            return top
        aged_priority = -place[3]
        return min(top, aged_priority)

    def _could_be_borrowed(self, task: Task) -> bool:
        """Return True if a borrower might take the freed memory before the task starts, only to be preempted
        for the task."""
        is_owner = self._is_within_guarantee(task.tenant, task.demand, task.priority, task.id)
        return bool(is_owner and self._policy.tenant(task.tenant).cohort)

    def _is_within_guarantee(self, tenant: str, demand: Demand, priority: int, task: TaskId) -> bool | None:
        """Return True if the tenant stays within its guarantee with such a task; None without a quota."""
        if not (self._policy.has_quotas and (demand.gpus or demand.bundles)):
            return None
        allowance = self._quotas.of(tenant, priority, task)
        if allowance is None:
            return None
        return allowance.claimed_mb + self._quotas.need_mb(demand) <= allowance.guaranteed_mb

    def _measure(self) -> None:
        held = dict(self._quotas.held_mb())
        for lease in self._draft.leaving():
            held[lease.tenant] = held.get(lease.tenant, 0) - lease.mb
        self._surplus, self._within = {}, {}
        for tenant, mb in held.items():
            quota = self._policy.tenant(tenant)
            if quota.guaranteed_mb is None:
                continue
            if mb > quota.guaranteed_mb:
                self._surplus.setdefault(quota.cohort, {})[tenant] = mb - quota.guaranteed_mb
            else:
                self._within.setdefault(quota.cohort, set()).add(tenant)


def within_surplus(found: Sequence[Candidate], surplus: Surplus, draft: Draft) -> Sequence[Candidate]:
    """Return the candidates that may leave together with those before them without putting any tenant below
    its guarantee."""
    taken = _LeavingByTenant(draft, lambda tenant, total_mb, _largest_mb: total_mb <= surplus[tenant])
    return [candidate for candidate in found if taken.takes(candidate.task, candidate.rank)]


def leased_mb(gone: Iterable[Candidate], draft: Draft) -> int:
    """Return the MiB that these runs count against quotas."""
    taken = _LeavingByTenant(draft, lambda *_: True)
    for candidate in gone:
        taken.takes(candidate.task, candidate.rank)
    return sum(total for total, _ in taken.by_tenant.values())


class _LeavingByTenant:
    """The losses of tenants as runs leave one after the other. Single ranks of a gang leave before its
    rest."""

    def __init__(self, draft: Draft, may: Callable[[str, int, int], bool]) -> None:
        """`may` takes a tenant, its loss in MiB and its largest single loss, and returns True if the tenant
        may lose this."""
        self._draft = draft
        self._may = may
        self._alone: dict[TaskId, int] = {}
        """Maps a gang to the MiB of its leaving ranks."""
        self.by_tenant: dict[str, tuple[int, int]] = {}
        """Maps a tenant to its loss and its largest single loss, in MiB."""

    def takes(self, run: Task, rank: int | None) -> bool:
        """Let the run, or one of its ranks, leave if its tenant may lose the memory, and return whether it
        did. A run without leases always may leave."""
        mb = _held_mb(run, rank, self._draft)
        before, largest = self.by_tenant.get(run.tenant, (0, 0))
        total = before + mb - (self._alone.get(run.id, 0) if rank is None else 0)
        largest = max(largest, mb)
        if mb and not self._may(run.tenant, total, largest):
            return False
        self.by_tenant[run.tenant] = total, largest
        if rank is not None:
            self._alone[run.id] = self._alone.get(run.id, 0) + mb
        return True


def _held_mb(run: Task, rank: int | None, draft: Draft) -> int:
    """Return the MiB held by the run, or by one of its ranks, without leases that are leaving already."""
    leases = draft.world.leases_of(run)
    holdings = [draft.ledger(lease.device).holdings.get(lease.key) for lease in leases]
    remaining = [holding.lease for holding in holdings if holding is not None and not holding.is_leaving]
    return sum(lease.mb for lease in remaining if rank is None or lease.rank == rank)
