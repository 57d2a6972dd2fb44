"""What a tenant may still take: its guarantee, and what its cohort leaves of those of others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from gpubroker_server.core.domain.demand import Demand, need_mb
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId, in_gib
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World

NO_TASK = TaskId("")
NO_CHANGE: Mapping[str, int] = MappingProxyType({})

MAX_NEEDS = 10_000
"""What so many different demands count is remembered; then all is forgotten."""


class QuotaNeeds:
    """What demands count against a quota, worked out once for an inventory; gangs with the ranks that they
    need at least."""

    def __init__(self) -> None:
        self._version = -1
        self._all: list[Device] = []
        self._sorts: list[Device] = []
        """One of each sort; they stand for all unless devices are named."""
        self.known: dict[Demand, tuple[int, ...]] = {}

    def of(self, world: World, demand: Demand) -> int:
        """MiB on the largest devices that it may use, so that no place it is given exceeds a quota."""
        return sum(self.of_each(world, demand)[: demand.least_ranks or 1])

    def of_each(self, world: World, demand: Demand) -> tuple[int, ...]:
        """The same of each rank; of a demand that is no gang, of itself."""
        if self._version != world.inventory_version:
            self._version = world.inventory_version
            self.known = {}
            devices = [book.device for book in world.books.values() if book.device.present]
            self._all, self._sorts = devices, list({device.sort: device for device in devices}.values())
        known = self.known.get(demand)
        if known is None:
            if len(self.known) >= MAX_NEEDS:
                self.known.clear()
            known = self.known[demand] = tuple(map(self._most, demand.bundles or (demand,)))
        return known

    def _most(self, demand: Demand) -> int:
        devices = self._all if demand.where.devices else self._sorts
        needs = (need_mb(demand, device) or 0 for device in devices if demand.gpus)
        return demand.gpus * max(needs, default=0)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Of one tenant, as one of its tasks finds it."""

    claimed_mb: int
    """What it holds, and what is being freed for it."""
    guaranteed_mb: int
    left_mb: int
    """What it may still take; negative if it has more than it may."""

    @property
    def borrowed_mb(self) -> int:
        return max(0, self.claimed_mb - self.guaranteed_mb)

    @property
    def lent_mb(self) -> int:
        """What its cohort would lend it now, beyond what it has."""
        return max(0, self.left_mb - max(0, self.guaranteed_mb - self.claimed_mb))


class _Sums:
    """MiB by tenant, and of tenants with a cohort by that."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.by_tenant: dict[str, int] = {}
        self.by_cohort: dict[str, int] = {}

    def add(self, amounts: Iterable[tuple[str, int]]) -> None:
        for tenant, mb in amounts:
            self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + mb
            cohort = self._policy.tenant(tenant).cohort
            self.by_cohort[cohort] = self.by_cohort.get(cohort, 0) + mb


class Quotas:
    """Of one draft. A guarantee is granted whatever others hold; only borrowing depends on them."""

    def __init__(self, draft: Draft, policy: Policy, needs: QuotaNeeds | None = None) -> None:
        self._draft = draft
        self._policy = policy
        self._needs = QuotaNeeds() if needs is None else needs
        self._sums = _Sums(policy)
        """What was held in the World at that revision, and the first so much of what the draft has given."""
        self._revision = -1
        self._counted = 0
        self._claims: dict[int, tuple[int, _Sums]] = {}
        """Priority -> (revision of the draft's changes, what is kept from those who have no pledges)."""

    def held_mb(self) -> Mapping[str, int]:
        """Tenant -> what it holds in the draft; of who holds nothing there may be nothing."""
        return self._held().by_tenant

    def need_mb(self, demand: Demand) -> int:
        return self._needs.of(self._draft.world, demand)

    def max_ranks(self, task: Task) -> int:
        """How many ranks of a gang its tenant may have now; at least those without which it does not run."""
        demand = task.demand
        allowance = self.of(task.tenant, task.priority, task.id) if self._policy.has_quotas else None
        if allowance is None:
            return len(demand.bundles)
        needs = accumulate(self._needs.of_each(self._draft.world, demand))
        return max(demand.least_ranks, sum(need <= allowance.left_mb for need in needs))

    def is_short(self, task: Task, given: Mapping[str, int] = NO_CHANGE) -> bool:
        """Whether its tenant may not take so much now, whatever is free. `given`: tenant -> MiB that it has
        besides, or (negative) has given back."""
        return self.is_short_for(task.tenant, task.demand, task.priority, task.id, given)

    def is_short_for(
        self,
        tenant: str,
        demand: Demand,
        priority: int,
        task: TaskId = NO_TASK,
        given: Mapping[str, int] = NO_CHANGE,
    ) -> bool:
        """The same for a task that is not named, or has no pledges."""
        if not (self._policy.has_quotas and (demand.gpus or demand.bundles)):
            return False
        left_mb = self._left_mb(tenant, priority, task, given)
        return left_mb is not None and self.need_mb(demand) > left_mb

    def missing_mb(self, task: Task) -> int:
        """What its tenant must still give back, so that it may take so much, once those have left who are
        leaving anyway."""
        given: dict[str, int] = {}
        for lease in self._draft.leaving():
            given[lease.tenant] = given.get(lease.tenant, 0) - lease.mb
        allowance = self.of(task.tenant, task.priority, task.id, given)
        return 0 if allowance is None else max(0, self.need_mb(task.demand) - allowance.left_mb)

    def of(
        self, name: str, priority: int, task: TaskId = NO_TASK, given: Mapping[str, int] = NO_CHANGE
    ) -> Allowance | None:
        """None if this tenant has no quota. What is being freed for tasks of lower priority counts as free,
        and for this task."""
        guaranteed_mb = self._policy.tenant(name).guaranteed_mb
        left_mb = self._left_mb(name, priority, task, given)
        if guaranteed_mb is None or left_mb is None:
            return None
        claimed_mb = _claimed_mb(name, self._held(), self._claims_on(task, priority), given)
        return Allowance(claimed_mb, guaranteed_mb, left_mb)

    def _left_mb(self, name: str, priority: int, task: TaskId, given: Mapping[str, int]) -> int | None:
        """What this tenant may still take; None if it has no quota. Thousands of tenants are asked about in
        each cycle."""
        mine = self._policy.tenant(name)
        if mine.guaranteed_mb is None:
            return None
        held, claims = self._held(), self._claims_on(task, priority)
        own_left = mine.guaranteed_mb - _claimed_mb(name, held, claims, given)
        if not mine.cohort:
            return own_left
        left = self._policy.guaranteed_mb(mine.cohort) - held.by_cohort.get(mine.cohort, 0)
        left -= claims.by_cohort.get(mine.cohort, 0)
        if given:
            left -= sum(mb for other, mb in given.items() if self._policy.tenant(other).cohort == mine.cohort)
        if mine.borrow_mb is not None:
            left = min(left, own_left + mine.borrow_mb)
        return max(own_left, left)

    def _claims_on(self, task: TaskId, priority: int) -> _Sums:
        """What is kept for others. Added up anew only when the draft has changed: thousands of tenants ask in
        between."""
        if self._draft.pledges_of(task):
            return self._add_up(task, priority)
        known = self._claims.get(priority)
        if known is None or known[0] != self._draft.changes.revision:
            sums = self._add_up(NO_TASK, priority)
            known = self._claims[priority] = self._draft.changes.revision, sums
        return known[1]

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


def check_quota(demand: Demand, need_mb: int, tenant: str, policy: Policy) -> Refusal | None:
    """Why a task of this tenant could never have what it counts, or None."""
    most = max_mb(policy, tenant)
    if most is None or need_mb <= most:
        return None
    message = (
        f"the task counts {in_gib(need_mb)} of GPU memory (on the largest GPUs that it may use), and tenant "
        f"{tenant} may have {in_gib(most)} at most, guaranteed and borrowed; "
        "ask for less, or for smaller kinds"
    )
    return Refusal("exceeds-quota", message, "gpu_mb" if demand.gpu_mb is not None else "gpus")


def max_mb(policy: Policy, tenant: str) -> int | None:
    """The most that it could ever hold; None if it has no quota."""
    mine = policy.tenant(tenant)
    if mine.guaranteed_mb is None or not mine.cohort:
        return mine.guaranteed_mb
    others = policy.guaranteed_mb(mine.cohort) - mine.guaranteed_mb
    return mine.guaranteed_mb + (others if mine.borrow_mb is None else min(others, mine.borrow_mb))
