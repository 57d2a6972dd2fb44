"""What a tenant may still take: its guarantee, and what its cohort leaves of those of others."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from service.core.admission import Refusal
from service.core.demand import Demand
from service.core.device import Device
from service.core.draft import Draft
from service.core.need import need_mb
from service.core.policy import Policy
from service.core.task import Task
from service.core.units import TaskId, in_gib
from service.core.world import World

NOBODY = TaskId("")
NOTHING: Mapping[str, int] = MappingProxyType({})

MOST_NEEDS = 10_000
"""What so many different demands count is remembered; then all is forgotten."""


class Needs:
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
            sorts = {
                (d.kind, d.power, d.physical_mb, d.allocatable_mb, d.context_mb, bool(d.parent)): d
                for d in devices
            }
            self._all, self._sorts = devices, list(sorts.values())
        known = self.known.get(demand)
        if known is None:
            if len(self.known) >= MOST_NEEDS:
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


class _Claimed(NamedTuple):
    """What a draft has given and keeps for preemptors, as one of its tasks finds it, in MiB."""

    revision: int
    """Of the draft's changes of which this tells."""
    by_tenant: dict[str, int]
    by_cohort: dict[str, int]


class Quotas:
    """Of one draft. A guarantee is granted whatever others hold; only borrowing depends on them."""

    def __init__(self, draft: Draft, policy: Policy, needs: Needs | None = None) -> None:
        self._draft = draft
        self._policy = policy
        self._needs = Needs() if needs is None else needs
        self._held: dict[str, int] | None = None
        """Cohort -> what its members hold in the World."""
        self._claims: dict[int, _Claimed] = {}
        """Priority -> what those may not have who have no pledges."""

    def need_mb(self, demand: Demand) -> int:
        return self._needs.of(self._draft.world, demand)

    def most_ranks(self, task: Task) -> int:
        """How many ranks of a gang its tenant may have now; at least those without which it does not run."""
        demand = task.demand
        allowance = self.of(task.tenant, task.priority, task.id) if self._policy.has_quotas else None
        if allowance is None:
            return len(demand.bundles)
        needs = accumulate(self._needs.of_each(self._draft.world, demand))
        return max(demand.least_ranks, sum(need <= allowance.left_mb for need in needs))

    def is_short(self, task: Task, given: Mapping[str, int] = NOTHING) -> bool:
        """Whether its tenant may not take so much now, whatever is free. `given`: tenant -> MiB that it has
        besides, or (negative) has given back."""
        return self.falls_short(task.tenant, task.demand, task.priority, task.id, given)

    def falls_short(
        self,
        tenant: str,
        demand: Demand,
        priority: int,
        task: TaskId = NOBODY,
        given: Mapping[str, int] = NOTHING,
    ) -> bool:
        """The same for a task that is not named, or has no pledges."""
        if not (self._policy.has_quotas and (demand.gpus or demand.bundles)):
            return False
        allowance = self.of(tenant, priority, task, given)
        return allowance is not None and self.need_mb(demand) > allowance.left_mb

    def lacks_mb(self, task: Task) -> int:
        """What its tenant must still give back, so that it may take so much, once those have left who are
        leaving anyway."""
        given: dict[str, int] = {}
        for lease in self._draft.leaving():
            given[lease.tenant] = given.get(lease.tenant, 0) - lease.mb
        allowance = self.of(task.tenant, task.priority, task.id, given)
        return 0 if allowance is None else max(0, self.need_mb(task.demand) - allowance.left_mb)

    def of(
        self, name: str, priority: int, task: TaskId = NOBODY, given: Mapping[str, int] = NOTHING
    ) -> Allowance | None:
        """None if this tenant has no quota. What is being freed for tasks of lower priority counts as free,
        and for this task."""
        mine = self._policy.tenant(name)
        if mine.guaranteed_mb is None:
            return None
        new = self._newly_claimed(task, priority)
        claimed = self._draft.world.accounts.held_mb(name) + new.by_tenant.get(name, 0) + given.get(name, 0)
        own_left = mine.guaranteed_mb - claimed
        if not mine.cohort:
            return Allowance(claimed, mine.guaranteed_mb, own_left)
        left = self._policy.guaranteed_mb(mine.cohort) - self._held_in(mine.cohort)
        left -= new.by_cohort.get(mine.cohort, 0)
        left -= sum(mb for other, mb in given.items() if self._policy.tenant(other).cohort == mine.cohort)
        if mine.borrow_mb is not None:
            left = min(left, own_left + mine.borrow_mb)
        return Allowance(claimed, mine.guaranteed_mb, max(own_left, left))

    def _newly_claimed(self, task: TaskId, priority: int) -> "_Claimed":
        """Added up anew only when the draft has changed: thousands of tenants ask in between."""
        if self._draft.pledges_of(task):
            return self._add_up(task, priority)
        known = self._claims.get(priority)
        if known is None or known.revision != self._draft.changes.revision:
            known = self._claims[priority] = self._add_up(NOBODY, priority)
        return known

    def _add_up(self, task: TaskId, priority: int) -> "_Claimed":
        claimed = _Claimed(self._draft.changes.revision, {}, {})
        for tenant, mb in self._draft.newly_claimed(task, priority):
            claimed.by_tenant[tenant] = claimed.by_tenant.get(tenant, 0) + mb
            cohort = self._policy.tenant(tenant).cohort
            claimed.by_cohort[cohort] = claimed.by_cohort.get(cohort, 0) + mb
        return claimed

    def _held_in(self, cohort: str) -> int:
        if self._held is None:
            self._held = {}
            accounts = self._draft.world.accounts
            for tenant in accounts:
                name = self._policy.tenant(tenant).cohort
                self._held[name] = self._held.get(name, 0) + accounts.held_mb(tenant)
        return self._held.get(cohort, 0)


def check_quota(demand: Demand, need_mb: int, tenant: str, policy: Policy) -> Refusal | None:
    """Why a task of this tenant could never have what it counts, or None."""
    most = most_mb(policy, tenant)
    if most is None or need_mb <= most:
        return None
    message = (
        f"the task counts {in_gib(need_mb)} of GPU memory (on the largest GPUs that it may use), and tenant "
        f"{tenant} may have {in_gib(most)} at most, guaranteed and borrowed; "
        "ask for less, or for smaller kinds"
    )
    return Refusal("exceeds-quota", message, "gpu_mb" if demand.gpu_mb is not None else "gpus")


def most_mb(policy: Policy, tenant: str) -> int | None:
    """The most that it could ever hold; None if it has no quota."""
    mine = policy.tenant(tenant)
    if mine.guaranteed_mb is None or not mine.cohort:
        return mine.guaranteed_mb
    others = policy.guaranteed_mb(mine.cohort) - mine.guaranteed_mb
    return mine.guaranteed_mb + (others if mine.borrow_mb is None else min(others, mine.borrow_mb))
