"""What the naive planner makes of tenants: their order, quotas and claims, from flat lists."""

from collections import Counter
from math import log
from typing import Any

from service.core.lease import Lease, Pledge
from service.core.policy import Policy
from service.core.task import Task
from service.core.units import Instant
from service.core.world import World


class NaiveTenants:
    policy: Policy
    now: float
    tasks: dict[str, Task]
    books: list[Any]
    leases: list[Lease]
    pledges: list[Pledge]
    waits: Any
    needs: Any

    def rank(self, tenant: str) -> tuple[bool, int]:
        """Whether it has what it is guaranteed, and how many twentieths of its fair share it has had."""
        claimed = self.claimed[tenant] + self.given[tenant]
        mine = self.policy.tenant(tenant)
        above = mine.guaranteed_mb is None or claimed >= mine.guaranteed_mb
        level = (self.used[tenant] + claimed / self.whole) * self.weights / mine.weight
        return above, int(level * 20)

    def weigh(self, world: World) -> None:
        """How the tenants stand when the cycle begins."""
        self.whole = max(1, sum(book.device.allocatable_mb for book in self.books if book.device.present))
        life = world.accounts.half_life_seconds / log(2.0)
        self.used, self.claimed, self.given = Counter[str](), Counter[str](), Counter[str]()
        for row in (*self.leases, *self.pledges):
            self.claimed[row.tenant] += row.mb
        for tenant in world.accounts:
            self.used[tenant] = world.accounts.used(tenant, Instant(self.now)) / (self.whole * life)
        waiting = {task.tenant for task in self.tasks.values() if self.waits(task)}
        self.weights = sum(self.policy.tenant(t).weight for t in sorted({*world.accounts, *waiting}))

    # Quotas

    def claims_of(self, tenant: str, task: Task) -> int:
        """Held, or being freed for others of its tasks that this one must respect."""
        pledges = [p for p in self.pledges if p.preemptor != task.id and p.priority >= task.priority]
        return sum(row.mb for row in (*self.leases, *pledges) if row.tenant == tenant)

    def over_quota(self, task: Task) -> bool:
        mine = self.policy.tenant(task.tenant)
        if mine.guaranteed_mb is None or not task.demand.gpus:
            return False
        need = task.demand.gpus * max(self.needs(task.demand, book.device) or 0 for book in self.books)
        claimed = self.claims_of(task.tenant, task)
        if claimed + need <= mine.guaranteed_mb:
            return False
        if not mine.cohort or (
            mine.borrow_mb is not None and claimed + need > mine.guaranteed_mb + mine.borrow_mb
        ):
            return True
        everybody = {row.tenant for row in (*self.leases, *self.pledges)} | {task.tenant}
        members = [name for name in everybody if self.policy.tenant(name).cohort == mine.cohort]
        there_is = sum(t.guaranteed_mb or 0 for t in self.policy.tenants if t.cohort == mine.cohort)
        return sum(self.claims_of(name, task) for name in members) + need > there_is
