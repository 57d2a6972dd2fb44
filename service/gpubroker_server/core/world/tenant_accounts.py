"""The memory that each tenant holds and has used, in GPU-MiB-seconds that decay with a half-life."""

from collections.abc import Iterable, Iterator
from heapq import nlargest
from math import log
from typing import NamedTuple

from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS, Policy
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.ledger import DeviceLedger


class TenantUsage(NamedTuple):
    """A tenant's use up to its last change of leases. Since then it uses what its leases say."""

    tenant: str
    mb_seconds: float
    at: Instant


def decayed(
    mb_seconds: float, held_mb: int, seconds: float, half_life_seconds: Seconds = HALF_LIFE_SECONDS
) -> float:
    """Return the usage after some seconds of constantly holding `held_mb`, exactly and not by samples. With
    time it approaches `held_mb * mean_life_seconds(half_life_seconds)`."""
    left: float = 0.5 ** (max(0.0, seconds) / half_life_seconds)
    return mb_seconds * left + held_mb * mean_life_seconds(half_life_seconds) * (1.0 - left)


def mean_life_seconds(half_life_seconds: Seconds) -> float:
    """Return the mean time for which a second of use counts."""
    return half_life_seconds / log(2.0)


class Account:
    __slots__ = ("at", "held_mb", "mb_seconds")

    def __init__(self, held_mb: int = 0, mb_seconds: float = 0.0, at: Instant = Instant(0.0)) -> None:
        self.held_mb = held_mb
        """The MiB of the tenant's unreleased leases, whatever their state."""
        self.mb_seconds = mb_seconds
        self.at = at
        """The instant for which `mb_seconds` holds."""


class Accounts:
    """The accounts of all tenants that ever held memory. They depend on the events alone, to the last bit."""

    def __init__(self, half_life_seconds: Seconds = HALF_LIFE_SECONDS) -> None:
        self.half_life_seconds = half_life_seconds
        self.revision = 0
        """A number that rises with every change of what a tenant holds."""
        self._known: dict[str, Account] = {}
        self._whole: tuple[int, int] = (-1, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def copy(self) -> "Accounts":
        twin = Accounts(self.half_life_seconds)
        twin._known = {
            name: Account(account.held_mb, account.mb_seconds, account.at)
            for name, account in self._known.items()
        }
        return twin

    def change(self, tenant: str, mb: int, at: Instant) -> None:
        self.revision += 1
        account = self._known.setdefault(tenant, Account())
        account.mb_seconds = self._used(account, at)
        account.at = max(account.at, at)  # an earlier instant would count the seconds in between twice
        account.held_mb += mb

    def restore(self, usage: TenantUsage) -> None:
        """Enter the row of a tenant whose leases are entered already."""
        account = self._known.setdefault(usage.tenant, Account())
        account.mb_seconds, account.at = usage.mb_seconds, usage.at

    def rows(self) -> list[TenantUsage]:
        """Return the usage of all tenants, sorted by tenant."""
        known = sorted(self._known.items())
        return [TenantUsage(tenant, account.mb_seconds, account.at) for tenant, account in known]

    def held_mb(self, tenant: str) -> int:
        account = self._known.get(tenant)
        return 0 if account is None else account.held_mb

    def held(self) -> list[tuple[str, int]]:
        return [(name, account.held_mb) for name, account in self._known.items() if account.held_mb]

    def largest(self, most: int) -> list[tuple[str, int]]:
        """Return the tenants that hold the most, and the MiB that each holds."""
        held = nlargest(most, ((account.held_mb, name) for name, account in self._known.items()))
        return [(name, mb) for mb, name in held]

    def used(self, tenant: str, now: Instant) -> float:
        """Return the tenant's use in GPU-MiB-seconds, decayed to now."""
        account = self._known.get(tenant)
        return 0.0 if account is None else self._used(account, now)

    def whole_mb(self, ledgers: Iterable[DeviceLedger], version: int) -> int:
        """Return the MiB that all devices together can lease. `version` is that of the devices."""
        if self._whole[0] != version:
            self._whole = version, sum(ledger.device.allocatable_mb for ledger in ledgers)
        return self._whole[1]

    def _used(self, account: Account, now: Instant) -> float:
        return decayed(account.mb_seconds, account.held_mb, now - account.at, self.half_life_seconds)


def guarantees(policy: Policy, tenants: Iterable[str], most: int) -> dict[str, int]:
    """Return the guaranteed MiB of at most `most` tenants. Tenants that the operator names come first, so
    that unused guarantees are among them, then those in `tenants`."""
    named = (tenant.name for tenant in policy.tenants if tenant.name != "*")
    chosen = list(dict.fromkeys((*named, *tenants)))[:most]
    guaranteed = {tenant: policy.tenant(tenant).guaranteed_mb for tenant in chosen}
    return {tenant: mb for tenant, mb in guaranteed.items() if mb is not None}
