"""The order of tenants within a band: tenants below their guarantee come first, then the order is by
fair-share deficit."""

from typing import NamedTuple

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.queue import EVEN, Rank, TenantOrderKey
from gpubroker_server.core.world.tenant_accounts import mean_life_seconds
from gpubroker_server.core.world.world import World

STEPS = 20
"""The number of steps of a fair share. Tenants on one step are equal, so that no tiny difference decides, and
their tasks are ordered by priority and age."""


class TenantPosition(NamedTuple):
    claimed_mb: int = 0
    """The memory that the tenant holds, and that is being freed for it."""
    used: float = 0.0
    """The decayed usage of the tenant, as a share of the most that all devices could have been used."""


class FairShareLevels:
    """The level of each tenant's use of its fair share, at one instant: (usage + present claims) / weight,
    each as a share of the whole. At level 1 the tenant has had what its weight entitles it to."""

    def __init__(self, world: World, policy: Policy, now: Instant) -> None:
        self._policy = policy
        self.tenants = {*world.accounts, *world.queue.tenants}
        """The tenants that ever held memory, or have waiting tasks."""
        self._whole_mb = max(1, world.accounts.whole_mb(world.ledgers.values(), world.inventory_version))
        # Usage decays while it is added: the usage of all devices, if they were always held, approaches this.
        most = self._whole_mb * mean_life_seconds(world.accounts.half_life_seconds)
        pledged: dict[str, int] = {}
        for preemptor, pledges in world.pledges.items():
            task = world.tasks.get(preemptor)
            # A run that is being moved still holds its memory, which counts once.
            for pledge in () if task is not None and task.is_moving else pledges.values():
                pledged[pledge.tenant] = pledged.get(pledge.tenant, 0) + pledge.mb
        self._standings = {
            tenant: TenantPosition(
                world.accounts.held_mb(tenant) + pledged.get(tenant, 0),
                world.accounts.used(tenant, now) / most,
            )
            for tenant in self.tenants
        }
        # Sorted, because a sum of floats depends on its order, and that of a set differs between processes.
        self._weights = sum(policy.tenant(tenant).weight for tenant in sorted(self.tenants))

    def claimed_mb(self, tenant: str) -> int:
        return self._standings.get(tenant, TenantPosition()).claimed_mb

    def level(self, tenant: str, more_mb: int = 0) -> float:
        """Return the level of the tenant. `more_mb` is what it has claimed beyond `claimed_mb`."""
        standing = self._standings.get(tenant, TenantPosition())
        had = standing.used + (standing.claimed_mb + more_mb) / self._whole_mb
        return had * self._weights / self._policy.tenant(tenant).weight


class FairShares:
    """The ranks of tenants in one cycle, in which no rank improves. What the cycle gives a tenant counts at
    once, so that one cycle does not give everything to one tenant."""

    def __init__(self, world: World, policy: Policy, now: Instant) -> None:
        self.passed: dict[str, TenantOrderKey] = {}
        """Maps a tenant to the order key of the last task charged to it, up to which its tasks were
        examined."""
        self._charged: dict[str, int] = {}
        """Maps a tenant to the MiB given to it in this cycle."""
        self._policy = policy
        self._ranks: dict[str, Rank] = {}
        self.has_several_tenants = len({*world.accounts, *world.queue.tenants}) > 1
        self._levels = FairShareLevels(world, policy, now) if len(world.queue.tenants) > 1 else None

    @property
    def has_one_tenant(self) -> bool:
        """True if all waiting tasks belong to one tenant, so that ranks are not needed."""
        return self._levels is None

    def copy(self) -> "FairShares":
        twin = FairShares.__new__(FairShares)
        twin.__dict__.update(self.__dict__)
        twin._charged, twin.passed, twin._ranks = dict(self._charged), dict(self.passed), dict(self._ranks)
        return twin

    def is_same_moment_as(self, other: "FairShares") -> bool:
        """Return True if both are of the same moment of the same cycle."""
        return self._levels is other._levels and self.passed == other.passed

    def rank(self, tenant: str) -> Rank:
        """Return the rank of the tenant; the smallest comes first."""
        if self._levels is None:
            return EVEN
        rank = self._ranks.get(tenant)
        if rank is None:
            charged_mb = self._charged.get(tenant, 0)
            guaranteed_mb = self._policy.tenant(tenant).guaranteed_mb
            has_its_own = (
                guaranteed_mb is None or self._levels.claimed_mb(tenant) + charged_mb >= guaranteed_mb
            )
            step = int(self._levels.level(tenant, charged_mb) * STEPS)
            rank = self._ranks[tenant] = (int(has_its_own), step)
        return rank

    def charge(self, tenant: str, mb: int, passed: TenantOrderKey) -> None:
        if mb > 0 and self._levels is not None:
            self._charged[tenant] = self._charged.get(tenant, 0) + mb
            self.passed[tenant] = passed
            self._ranks.pop(tenant, None)
