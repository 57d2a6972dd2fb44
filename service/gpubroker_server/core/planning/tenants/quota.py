"""Quotas: the memory that a tenant may still take, of its guarantee and of what its cohort does not use."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from types import MappingProxyType

from gpubroker.wire.policy import Cohort
from msgspec import Struct

from gpubroker_server.core.domain.demand import Demand, need_mb
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId, in_gib
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World

NO_TASK = TaskId("")
NO_CHANGE: Mapping[str, int] = MappingProxyType({})

MAX_NEEDS = 10_000
"""The number of cached demands above which the cache is emptied."""


class QuotaNeeds:
    """The amounts of demands that count against a quota, cached for one inventory. A gang counts its required
    ranks."""

    def __init__(self) -> None:
        self._version = -1
        self._all: list[Device] = []
        self._sorts: list[Device] = []
        """One device of each sort, which is enough unless a demand names devices."""
        self.known: dict[Demand, tuple[int, ...]] = {}

    def of(self, world: World, demand: Demand) -> int:
        """Return the MiB that the demand needs on the largest devices that it may use, so that no placement
        exceeds the quota."""
        return sum(self.of_each(world, demand)[: demand.least_ranks or 1])

    def of_each(self, world: World, demand: Demand) -> tuple[int, ...]:
        """Return the MiB that each rank needs on the largest devices that it may use; one entry for a single
        task."""
        if self._version != world.inventory_version:
            self._version = world.inventory_version
            self.known = {}
            devices = [ledger.device for ledger in world.ledgers.values() if ledger.device.present]
            self._all, self._sorts = devices, list({device.sort: device for device in devices}.values())
        needs_mb = self.known.get(demand)
        if needs_mb is None:
            if len(self.known) >= MAX_NEEDS:
                self.known.clear()
            needs_mb = self.known[demand] = tuple(map(self._most, demand.bundles or (demand,)))
        return needs_mb

    def _most(self, demand: Demand) -> int:
        devices = self._all if demand.where.devices else self._sorts
        needs = (need_mb(demand, device) or 0 for device in devices if demand.gpus)
        return demand.gpus * max(needs, default=0)


class Allowance(Struct, frozen=True):
    """The quota of one tenant from the view of one of its tasks."""

    claimed_mb: int
    """The memory that the tenant holds, and that is being freed for its other tasks."""
    guaranteed_mb: int
    left_mb: int
    """The memory that the tenant may still take; negative above its quota."""

    @property
    def borrowed_mb(self) -> int:
        return max(0, self.claimed_mb - self.guaranteed_mb)

    @property
    def lent_mb(self) -> int:
        """The memory that the tenant's cohort would lend it now, on top of what it has."""
        return max(0, self.left_mb - max(0, self.guaranteed_mb - self.claimed_mb))


def cohort_holdings(held: Mapping[str, int], policy: Policy) -> list[Cohort]:
    """Return the cohorts that hold something or are guaranteed something, by name. `held` maps a tenant to
    the MiB that it holds."""
    members: dict[str, list[str]] = {rule.cohort: [] for rule in policy.tenants if rule.cohort}
    for tenant in sorted(held):
        if cohort := policy.tenant(tenant).cohort:
            members[cohort].append(tenant)
    cohorts = []
    for cohort in sorted(members):
        guaranteed_mb, held_mb = policy.guaranteed_mb(cohort), sum(held[name] for name in members[cohort])
        message = None
        if held_mb > guaranteed_mb:
            over = {name: held[name] - (policy.tenant(name).guaranteed_mb or 0) for name in members[cohort]}
            borrowed = ", ".join(f"{name} {in_gib(mb)}" for name, mb in over.items() if mb > 0)
            message = (
                f"cohort {cohort} holds {in_gib(held_mb - guaranteed_mb)} more than the "
                f"{in_gib(guaranteed_mb)} that its members are guaranteed together: {borrowed} borrowed, and "
                "the lenders have taken their own guarantee since. A task within its tenant's guarantee that "
                "finds no other room has them stopped"
            )
        cohorts.append(Cohort(cohort, guaranteed_mb, held_mb, message))
    return cohorts


class _Sums:
    """Sums of MiB by tenant and by cohort."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.by_tenant: dict[str, int] = {}
        self.by_cohort: dict[str | None, int] = {}

    def add(self, amounts: Iterable[tuple[str, int]]) -> None:
        for tenant, mb in amounts:
            self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + mb
            cohort = self._policy.tenant(tenant).cohort
            self.by_cohort[cohort] = self.by_cohort.get(cohort, 0) + mb


class Quotas:
    """The quotas in one draft. A guarantee holds whatever other tenants use; only borrowing depends on their
    use."""

    def __init__(self, draft: Draft, policy: Policy, needs: QuotaNeeds | None = None) -> None:
        self._draft = draft
        self._policy = policy
        self._needs = QuotaNeeds() if needs is None else needs
        self._sums = _Sums(policy)
        """The sums of what is held in the World at `_revision`, and of the first `_counted` entries of the
        draft's `given`."""
        self._revision = -1
        self._counted = 0
        self._claims: dict[int, tuple[int, _Sums]] = {}
        """Maps a priority to a revision of the draft and the sums of the pledges that bind tasks of this
        priority without pledges of their own."""

    def held_mb(self) -> Mapping[str, int]:
        """Return the MiB held in the draft by tenant; tenants that hold nothing may be missing."""
        return self._held().by_tenant

    def need_mb(self, demand: Demand) -> int:
        return self._needs.of(self._draft.world, demand)

    def max_ranks(self, task: Task) -> int:
        """Return how many ranks of a gang its quota allows now, but at least the required ones."""
        demand = task.demand
        allowance = self.of(task.tenant, task.priority, task.id) if self._policy.has_quotas else None
        if allowance is None:
            return len(demand.bundles)
        needs = accumulate(self._needs.of_each(self._draft.world, demand))
        return max(demand.least_ranks, sum(need <= allowance.left_mb for need in needs))

    def is_short(self, task: Task, given: Mapping[str, int] = NO_CHANGE) -> bool:
        """Return True if the quota forbids the task now. `given` maps a tenant to the MiB to add to what it
        holds; a negative number is given back."""
        return self.is_short_for(task.tenant, task.demand, task.priority, task.id, given)

    def is_short_for(
        self,
        tenant: str,
        demand: Demand,
        priority: int,
        task: TaskId = NO_TASK,
        given: Mapping[str, int] = NO_CHANGE,
    ) -> bool:
        """Return True if the quota forbids a task of these properties now. The pledges of `task` count as
        free. `given` maps a tenant to the MiB to add to what it holds."""
        if not (self._policy.has_quotas and (demand.gpus or demand.bundles)):
            return False
        left_mb = self._left_mb(tenant, priority, task, given)
        return left_mb is not None and self.need_mb(demand) > left_mb

    def missing_mb(self, task: Task) -> int:
        """Return the MiB that the task's tenant must free for it, beyond the leases that are leaving
        already."""
        given: dict[str, int] = {}
        for lease in self._draft.leaving():
            given[lease.tenant] = given.get(lease.tenant, 0) - lease.mb
        allowance = self.of(task.tenant, task.priority, task.id, given)
        return 0 if allowance is None else max(0, self.need_mb(task.demand) - allowance.left_mb)

    def of(
        self, name: str, priority: int, task: TaskId = NO_TASK, given: Mapping[str, int] = NO_CHANGE
    ) -> Allowance | None:
        """Return the allowance of the tenant; None without a quota. Memory that is being freed for this task,
        or for lower priorities, counts as free."""
        guaranteed_mb = self._policy.tenant(name).guaranteed_mb
        left_mb = self._left_mb(name, priority, task, given)
        if guaranteed_mb is None or left_mb is None:
            return None
        claimed_mb = _claimed_mb(name, self._held(), self._claims_on(task, priority), given)
        return Allowance(claimed_mb, guaranteed_mb, left_mb)

    def _left_mb(self, name: str, priority: int, task: TaskId, given: Mapping[str, int]) -> int | None:
        """Return the MiB that the tenant may still take; None without a quota. A cycle calls this for
        thousands of tenants."""
        tenant_policy = self._policy.tenant(name)
        if tenant_policy.guaranteed_mb is None:
            return None
        held, claims = self._held(), self._claims_on(task, priority)
        own_left = tenant_policy.guaranteed_mb - _claimed_mb(name, held, claims, given)
        if not tenant_policy.cohort:
            return own_left
        left = self._policy.guaranteed_mb(tenant_policy.cohort) - held.by_cohort.get(tenant_policy.cohort, 0)
        left -= claims.by_cohort.get(tenant_policy.cohort, 0)
        if given:
            left -= sum(
                mb for other, mb in given.items() if self._policy.tenant(other).cohort == tenant_policy.cohort
            )
        if tenant_policy.borrow_mb is not None:
            left = min(left, own_left + tenant_policy.borrow_mb)
        # Up to its guarantee a tenant takes what is free, even if its cohort has borrowed all of it (ADR 38).
        return max(own_left, left)

    def _claims_on(self, task: TaskId, priority: int) -> _Sums:
        """Return the sums of pledges to other tasks, cached until the draft changes."""
        if self._draft.pledges_of(task):
            return self._add_up(task, priority)
        cached = self._claims.get(priority)
        if cached is None or cached[0] != self._draft.changes.revision:
            sums = self._add_up(NO_TASK, priority)
            cached = self._claims[priority] = self._draft.changes.revision, sums
        return cached[1]

    def _add_up(self, task: TaskId, priority: int) -> _Sums:
        sums = _Sums(self._policy)
        sums.add(self._draft.claimed(task, priority))
        return sums

    def _held(self) -> _Sums:
        accounts, given = self._draft.world.accounts, self._draft.given
        if self._revision != accounts.revision:
            self._revision, self._counted, self._sums = accounts.revision, 0, _Sums(self._policy)
            self._sums.add(accounts.held())
        if len(given) > self._counted:
            self._sums.add(given[self._counted :])
            self._counted = len(given)
        return self._sums


def _claimed_mb(name: str, held: _Sums, claims: _Sums, given: Mapping[str, int]) -> int:
    return held.by_tenant.get(name, 0) + claims.by_tenant.get(name, 0) + given.get(name, 0)
