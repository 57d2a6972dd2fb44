"""The sections of the settings that are not defined in the core. config.example.yaml explains each
setting."""

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Final

from gpubroker.wire.bounds import Count
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from gpubroker_server.core.admission.defaults import Profile
from gpubroker_server.core.domain.device import SHIPPED_KINDS
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool, TenantPolicy
from gpubroker_server.core.domain.setting_marks import by_name, check
from gpubroker_server.core.domain.suggestions import did_you_mean

SizeMb = Annotated[int, Meta(gt=0, le=4_194_304)]


class SimulatedInstance(Struct, frozen=True, kw_only=True):
    """A part of a simulated device that has its own leases, as a MIG instance has."""

    kind: str = "simulated instance"
    memory_mb: SizeMb
    count: Annotated[int, Meta(gt=0, le=7)] = 1


class SimulatedDevice(Struct, frozen=True, kw_only=True):
    """A device that exists only in the ledger. If it has instances, they are leased instead of it."""

    kind: str = "simulated"
    memory_mb: SizeMb
    count: Annotated[int, Meta(gt=0, le=1024)] = 1
    instances: tuple[SimulatedInstance, ...] = ()


def _labels_have_values(labels: dict[str, int]) -> dict[str, int]:
    for label in labels:
        if not all(label.partition("=")):
            raise ValueError(f"{label!r} is not a label with a value; write key=value or key=*")
    return labels


class RunningLimits(Struct, frozen=True):
    """The number of tasks that may run at once. Labels are `key=value` or `key=*`."""

    tenants: Mapping[str, Count] = field(default_factory=dict)
    labels: Annotated[Mapping[str, Count], check(_labels_have_values)] = field(default_factory=dict)


def _checked_tenants(tenants: tuple[TenantPolicy, ...]) -> tuple[TenantPolicy, ...]:
    for tenant in tenants:
        if tenant.name == "*" and tenant.cohort and tenant.guaranteed_mb:
            raise ValueError(
                '"*" stands for any number of tenants, so their guarantees have no sum in a cohort; '
                "give it guaranteed_mb: 0, or no cohort, or list the tenants"
            )
    return tuple(
        tenant if tenant.cohort else replace(tenant, cohort=None) for tenant in tenants
    )  # "" is no cohort


class PolicySettings(Policy, frozen=True, kw_only=True):
    """The section `policy`. `limits_with` adds the limits of running tasks and pools to its limits."""

    tenants: Annotated[tuple[TenantPolicy, ...], by_name(), check(_checked_tenants)] = ()
    max_running: RunningLimits = RunningLimits()

    def __post_init__(self) -> None:
        """Refuse a limit for a tenant that is not among those listed. Raises ValueError."""
        # If tenants are listed, another name is probably misspelled.
        known = {tenant.name for tenant in self.tenants} - {"*"}
        for name in sorted(self.max_running.tenants.keys() - {*known, "*"}) if known else ():
            suggestion = did_you_mean(name, known)
            raise ValueError(
                f'max_running.tenants names "{name}", which policy.tenants does not list; '
                f"{f'{suggestion} If' if suggestion else 'if'} it is a tenant, add it there: {name}: {{}}"
            )

    def limits_with(self, pools: tuple[Pool, ...]) -> tuple[CustomLimit, ...]:
        """Return all limits, sorted: those of custom resources, of running tasks, and of the pools."""
        running = self.max_running
        slots = chain(
            ((f"tenant:{name}", limit) for name, limit in running.tenants.items()),
            ((f"label:{label}", limit) for label, limit in running.labels.items()),
            ((f"pool:{pool.name}:{field}", limit) for pool in pools for field, limit in pool.amounts()),
        )
        return tuple(sorted([*self.custom_limits, *(CustomLimit(name, limit) for name, limit in slots)]))


def kinds_over_the_shipped(kinds: Any) -> Any:
    return _over({kind.name: {"power": kind.power} for kind in SHIPPED_KINDS}, kinds)


def _over(shipped: dict[str, dict[str, Any]], given: Any) -> Any:
    """Return the shipped values with the given changes. Fields that a change leaves out stay; null removes a
    name."""
    if not isinstance(given, dict):
        return given
    merged: dict[Any, Any] = dict(shipped)
    for name, settings in given.items():
        merged[name] = {**merged.get(name, {}), **settings} if isinstance(settings, dict) else settings
    return {name: settings for name, settings in merged.items() if settings is not None}


SHIPPED_PROFILES: Final[dict[str, dict[str, Any]]] = {
    "rollout_worker": {"cpu": 1.0, "gpus": 0, "max_concurrency": 100},
    "trainer": {"cpu": 4.0, "gpus": 1, "max_concurrency": 1},
    "trainer_remote": {"cpu": 1.0, "gpus": 0, "max_concurrency": 10},
    "trajectory_pool": {"cpu": 1.0, "gpus": 0, "max_concurrency": 100},
    "data_loader": {"cpu": 1.0, "gpus": 0, "max_concurrency": 10},
    "weight_sync": {"cpu": 1.0, "gpus": 0, "max_concurrency": 10},
    "validator": {"cpu": 1.0, "gpus": 0, "max_concurrency": 10},
    "colocated": {"max_concurrency": 10},
}
"""The settings of the shipped profiles. `colocated` has no sizes, because those of its roles apply."""


def profiles_over_the_shipped(profiles: Any) -> Any:
    return _over(SHIPPED_PROFILES, profiles)


def shipped_profiles() -> dict[str, Profile]:
    return {name: Profile(**settings) for name, settings in SHIPPED_PROFILES.items()}
