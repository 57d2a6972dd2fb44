"""Which tenant comes first within a band: one below its guarantee, then the one furthest behind its share."""

from collections.abc import Mapping
from typing import NamedTuple

from service.core.accounts import life_seconds
from service.core.ordering import EVEN, OwnKey, Rank
from service.core.policy import Policy
from service.core.units import Instant
from service.core.world import World

STEPS = 20
"""Into so many steps a fair share is divided. Tenants on the same step are equal, so that no tiny difference
decides: then their tasks go by priority and age."""


class Standing(NamedTuple):
    """Of a tenant, when the cycle began."""

    claimed_mb: int = 0
    """What it holds, and what is being freed for it."""
    used: float = 0.0
    """Its usage, as a share of what all devices together could ever come to."""


class Shares:
    """How tenants stand in one cycle: as they did when it began, and what it has given them since.

    A tenant's level is what it has used plus what it claims now, both as shares of all memory, divided by its
    fair share: at 1 it has had all that its weight entitles it to. What a cycle gives counts at once, so that
    one cycle does not hand everything to one tenant. Within a cycle no rank gets better.
    """

    def __init__(self, world: World, policy: Policy, now: Instant) -> None:
        self.charged: dict[str, int] = {}
        """Tenant -> MiB that this cycle has given it."""
        self.passed: dict[str, OwnKey] = {}
        """Tenant -> the task for which it was charged last: its tasks up to there have had their turn."""
        self._policy = policy
        self._ranks: dict[str, Rank] = {}
        self._standings: Mapping[str, Standing] = {}
        self.is_even = len(world.queue.tenants) < 2
        """Nobody has to be ranked: all that wait belong to one tenant."""
        if not self.is_even:
            self._measure(world, now)

    def _measure(self, world: World, now: Instant) -> None:
        tenants = {*world.accounts, *world.queue.tenants}
        self._whole_mb = max(1, world.accounts.whole_mb(world.books.values(), world.inventory_version))
        most = self._whole_mb * life_seconds(world.accounts.half_life_seconds)
        pledged: dict[str, int] = {}
        for mine in world.pledges.values():
            for pledge in mine.values():
                pledged[pledge.tenant] = pledged.get(pledge.tenant, 0) + pledge.mb
        self._standings = {
            tenant: Standing(
                world.accounts.held_mb(tenant) + pledged.get(tenant, 0),
                world.accounts.used(tenant, now) / most,
            )
            for tenant in tenants
        }
        self._weights = sum(self._policy.tenant(tenant).weight for tenant in sorted(tenants))

    def copy(self) -> "Shares":
        twin = Shares.__new__(Shares)
        twin.__dict__.update(self.__dict__)
        twin.charged, twin.passed, twin._ranks = dict(self.charged), dict(self.passed), dict(self._ranks)
        return twin

    def is_as(self, other: "Shares") -> bool:
        """Whether both tell of the same moment of the same cycle."""
        return self._standings is other._standings and self.passed == other.passed

    def rank(self, tenant: str) -> Rank:
        """Smallest first."""
        if self.is_even:
            return EVEN
        rank = self._ranks.get(tenant)
        if rank is None:
            claimed_mb = self._claimed_mb(tenant)
            guaranteed_mb = self._policy.tenant(tenant).guaranteed_mb
            above = guaranteed_mb is None or claimed_mb >= guaranteed_mb
            rank = self._ranks[tenant] = (int(above), int(self.level(tenant) * STEPS))
        return rank

    def level(self, tenant: str) -> float:
        """1: it has had its fair share. Only where tenants are ranked."""
        used = self._standings.get(tenant, Standing()).used + self._claimed_mb(tenant) / self._whole_mb
        return used * self._weights / self._policy.tenant(tenant).weight

    def charge(self, tenant: str, mb: int, passed: OwnKey) -> None:
        if mb > 0 and not self.is_even:
            self.charged[tenant] = self.charged.get(tenant, 0) + mb
            self.passed[tenant] = passed
            self._ranks.pop(tenant, None)

    def _claimed_mb(self, tenant: str) -> int:
        return self._standings.get(tenant, Standing()).claimed_mb + self.charged.get(tenant, 0)
