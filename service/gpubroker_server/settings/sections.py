"""The sections of the settings, with types, bounds and defaults. config.example.yaml explains each
setting."""

import contextlib
import math
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from gpubroker import units
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode

from gpubroker_server.core.domain.device import SHIPPED_KINDS
from gpubroker_server.core.domain.policy import BAND_NAMES


def comma_separated(value: Any) -> Any:
    """A list from the environment is one text: words separated by commas."""
    if not isinstance(value, str):
        return value
    return [word.strip() for word in value.split(",") if word.strip()]


def band_value(value: Any) -> Any:
    if not isinstance(value, str) or value.isdecimal():
        return value
    if value not in BAND_NAMES:
        raise ValueError(f"must be 0 to 100 or one of {', '.join(BAND_NAMES)}; found {value!r}")
    return BAND_NAMES[value]


PriorityValue = Annotated[int, Field(ge=0, le=100), BeforeValidator(band_value)]
"""A number, or a band's name, which stands for its middle."""
Words = Annotated[list[str], NoDecode, BeforeValidator(comma_separated)]


def in_its_unit(name: str, value: Any) -> Any:
    """`16GiB` or `7d` as a number in the unit at the end of the setting's name; by name if it holds several.
    What is neither stays, and is refused where the setting's type is known."""
    if isinstance(value, dict):
        return {key: in_its_unit(name, one) if isinstance(one, str) else one for key, one in value.items()}
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        if name.endswith("_mb"):
            return math.ceil(units.size_bytes(value, plain=2**20) / 2**20)
        if name.endswith("_bytes"):
            return math.ceil(units.size_bytes(value, plain=1))
        if name.endswith("_seconds"):
            return units.seconds(value)
    return value


class WithUnits(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _units(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: in_its_unit(str(name), value) for name, value in given.items()}


class Section(WithUnits):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SimulatedInstance(Section):
    """A part of a simulated device with leases of its own, as a MIG instance."""

    kind: str = "simulated instance"
    memory_mb: Annotated[int, Field(gt=0, le=4_194_304)]
    count: Annotated[int, Field(gt=0, le=7)] = 1


class SimulatedDevice(Section):
    """A device that exists only in the ledger. If it has instances, they are leased instead of it."""

    kind: str = "simulated"
    memory_mb: Annotated[int, Field(gt=0, le=4_194_304)]
    count: Annotated[int, Field(gt=0, le=1024)] = 1
    instances: list[SimulatedInstance] = []


def _of_each_device(value: Any) -> Any:
    """A plain size is that of each device; numbers of devices are words here."""
    if isinstance(value, dict):
        return {str(device): size for device, size in value.items()}
    return {"*": value}


class NodeSettings(Section):
    """What differs from the other nodes; null is what `ray` says, or what the node has."""

    cpu: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    max_runs: Annotated[int, Field(gt=0)] | None = None
    reserve_cpu: Annotated[float, Field(ge=0)] = 0.0
    reserve_memory_mb: Annotated[int, Field(ge=0)] = 0
    reserve_mb: Annotated[dict[str, Annotated[int, Field(ge=0)]], BeforeValidator(_of_each_device)] = {}
    labels: dict[str, str] = {}


class CustomSettings(Section):
    limit: Annotated[float, Field(ge=0)]
    per: Literal["cluster", "node"] = "cluster"
    priority_threshold: PriorityValue = 0


def _limit_alone(value: Any) -> Any:
    """A plain number is the amount of the whole cluster."""
    return {"limit": value} if isinstance(value, int | float | str) else value


class RunningSettings(Section):
    """Labels are `key=value` or `key=*`."""

    tenants: dict[str, Annotated[int, Field(ge=0)]] = {}
    labels: dict[str, Annotated[int, Field(ge=0)]] = {}

    @field_validator("labels")
    @classmethod
    def _labels_have_values(cls, labels: dict[str, int]) -> dict[str, int]:
        for label in labels:
            if not all(label.partition("=")):
                raise ValueError(f"{label!r} is not a label with a value; write key=value or key=*")
        return labels


class PoolSettings(Section):
    """Nodes and devices, amounts that they share, or both."""

    kinds: list[str] = []
    nodes: dict[str, list[str]] = {}
    fractions: bool = True
    cpu: Annotated[float, Field(ge=0)] | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_mb: Annotated[int, Field(ge=0)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    custom: dict[str, Annotated[float, Field(ge=0)]] = {}


class MaximumSettings(Section):
    """Whole GPUs and fractions are refused with a limit of `gpu_mb`: their size differs from GPU to GPU."""

    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_mb: Annotated[int, Field(gt=0)] | None = None
    cpu: Annotated[float, Field(ge=0)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    timeout_seconds: Annotated[float, Field(gt=0)] | None = None
    max_retries: Annotated[int, Field(ge=0)] | None = None
    grace_seconds: Annotated[float, Field(ge=0)] | None = None


class TenantSettings(Section):
    cohort: str = ""
    guaranteed_mb: Annotated[int, Field(ge=0)] | None = None
    borrow_mb: Annotated[int, Field(ge=0)] | None = None
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    max_priority: PriorityValue = 100

    @model_validator(mode="after")
    def _borrows_from_a_cohort(self) -> "TenantSettings":
        if self.cohort and self.guaranteed_mb is None:
            raise ValueError(f"cohort {self.cohort!r} needs guaranteed_mb (0: the tenant only borrows)")
        if self.borrow_mb is not None and not self.cohort:
            raise ValueError(f"borrow_mb {self.borrow_mb} without a cohort; name the cohort to borrow from")
        return self


class PolicySettings(Section):
    ageing_seconds_per_point: Annotated[float, Field(gt=0)] = 60.0
    placement: Literal["stranded", "fgd", "best_fit", "spread"] = "stranded"
    preemption: bool = True
    preemption_budget: Annotated[int, Field(ge=0)] = 3
    shield_seconds: Annotated[float, Field(ge=0)] = 600.0
    pledge_patience_seconds: Annotated[float, Field(gt=0)] = 600.0
    kill_patience_seconds: Annotated[float, Field(gt=0)] = 10.0
    sample_period_seconds: Annotated[float, Field(gt=0)] = 2.0
    beat_seconds: Annotated[float, Field(ge=0.1, le=60)] = 2.0
    beats_missed: Annotated[int, Field(ge=2, le=1000)] = 3
    pause_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    pause_nodes: Annotated[int, Field(ge=1)] = 2
    gang_start_seconds: Annotated[float, Field(gt=0)] = 300.0
    retry_first_seconds: Annotated[float, Field(gt=0)] = 1.0
    retry_factor: Annotated[float, Field(ge=1)] = 2.0
    retry_cap_seconds: Annotated[float, Field(gt=0)] = 300.0
    learned_margin: Annotated[float, Field(ge=0, le=10)] = 0.15
    learned_least_runs: Annotated[int, Field(ge=1, le=1000)] = 5
    overuse: Literal["report", "stop"] = "report"
    overuse_tolerance: Annotated[float, Field(ge=0, le=10)] = 0.05
    forecasts: Annotated[int, Field(ge=0, le=1000)] = 8
    backfill_depth: Annotated[int, Field(ge=1)] = 64
    consolidation: Annotated[int, Field(ge=0, le=10_000)] = 0
    custom_limits: dict[str, Annotated[CustomSettings, BeforeValidator(_limit_alone)]] = {}
    max_running: RunningSettings = RunningSettings()
    maximum: MaximumSettings = MaximumSettings()
    tenants: dict[str, TenantSettings] = {}
    usage_half_life_seconds: Annotated[float, Field(gt=0)] = 86_400.0
    streams: dict[str, Annotated[float, Field(ge=1e-6, le=1e6)]] = {}
    min_run_seconds: Annotated[float, Field(ge=0)] = 0.0

    @field_validator("tenants")
    @classmethod
    def _others_guarantee_nothing_together(
        cls, tenants: dict[str, TenantSettings]
    ) -> dict[str, TenantSettings]:
        others = tenants.get("*")
        if others is not None and others.cohort and others.guaranteed_mb:
            raise ValueError(
                '"*" stands for any number of tenants, so their guarantees have no sum in a cohort; '
                "give it guaranteed_mb: 0, or no cohort, or list the tenants"
            )
        return tenants

    @model_validator(mode="after")
    def _limits_are_of_known_tenants(self) -> Self:
        """Where tenants are listed, another name is likelier a slip."""
        known = sorted(self.tenants.keys() - {"*"})
        for name in sorted(self.max_running.tenants.keys() - {*known, "*"}) if known else ():
            near = get_close_matches(name, known, n=1)
            meant = f'did you mean "{near[0]}"? If' if near else "if"
            raise ValueError(
                f'max_running.tenants names "{name}", which policy.tenants does not list; {meant} it is a '
                f"tenant, add it there: {name}: {{}}"
            )
        return self


class LimitSettings(Section):
    head_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024
    head_seconds: Annotated[float, Field(gt=0)] = 10.0
    connections: Annotated[int, Field(gt=0)] = 2048
    unauthenticated_connections: Annotated[int, Field(gt=0)] = 256
    body_bytes: Annotated[int, Field(gt=0)] = 8 * 1024 * 1024
    batch_body_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    object_bytes: Annotated[int, Field(gt=0)] = 1024**3
    copied_object_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    tenant_object_bytes: Annotated[int, Field(ge=0)] = 4 * 1024**3
    tenant_objects: Annotated[int, Field(ge=0)] = 10_000
    tenant_pending_tasks: Annotated[int, Field(ge=0)] = 500_000
    tenant_pending_bytes: Annotated[int, Field(ge=0)] = 4 * 1024**3
    tenant_waits: Annotated[int, Field(ge=0)] = 1_000
    tenant_requests: Annotated[int, Field(ge=1)] = 4_096
    inline_bytes: Annotated[int, Field(gt=0)] = 64 * 1024
    result_bytes: Annotated[int, Field(gt=0)] = 64 * 1024 * 1024
    array_result_bytes: Annotated[int, Field(gt=0)] = 4 * 1024**3
    checkpoint_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    log_bytes: Annotated[int, Field(ge=4096, le=8 * 1024 * 1024)] = 1024 * 1024
    stale_seconds: Annotated[float, Field(gt=0)] = 30.0


class RetentionSettings(Section):
    finished_seconds: Annotated[float, Field(gt=0)] = 7 * 86400.0
    idempotency_seconds: Annotated[float, Field(gt=0)] = 86400.0
    object_seconds: Annotated[float, Field(gt=0)] = 86400.0
    audit_seconds: Annotated[float, Field(gt=0)] = 365 * 86400.0


class DefaultSettings(Section):
    priority: PriorityValue = BAND_NAMES["batch"]
    cpu: Annotated[float, Field(ge=0)] = 1.0
    max_retries: Annotated[int, Field(ge=0, le=100)] = 0
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0


class KindSettings(Section):
    power: Annotated[int, Field(ge=0)] = 0
    context_mb: Annotated[int, Field(ge=0)] = 0


Kinds = dict[str, KindSettings]


def over_the_shipped(kinds: Any) -> Any:
    """As `_over`; a number alone is the power."""
    if not isinstance(kinds, dict):
        return kinds
    whole = {name: {"power": it} if isinstance(it, int | str) else it for name, it in kinds.items()}
    return _over({kind.name: {"power": kind.power} for kind in SHIPPED_KINDS}, whole)


def _over(shipped: dict[str, dict[str, Any]], given: dict[Any, Any]) -> dict[Any, Any]:
    """What is given for a name changes that one alone and keeps what it leaves out; null removes it."""
    merged: dict[Any, Any] = dict(shipped)
    for name, own in given.items():
        merged[name] = {**merged.get(name, {}), **own} if isinstance(own, dict) else own
    return {name: own for name, own in merged.items() if own is not None}


class ModelTypeSettings(Section):
    priority: PriorityValue | None = None
    gpu_mb: Annotated[int, Field(gt=0)] | Literal["learned"] | None = None
    cpu: Annotated[float, Field(ge=0)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    timeout_seconds: Annotated[float, Field(gt=0)] | None = None
    max_retries: Annotated[int, Field(ge=0, le=100)] | None = None


class ProfileSettings(ModelTypeSettings):
    gpus: Annotated[int, Field(ge=0)] | None = None
    max_concurrency: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _sizes_are_of_gpus(self) -> Self:
        if self.gpus == 0 and self.gpu_mb is not None:
            raise ValueError(f"gpus is 0 and gpu_mb is {self.gpu_mb}; leave one of them out")
        return self


SHIPPED_PROFILES: dict[str, dict[str, Any]] = {
    "rollout_worker": {"cpu": 1, "gpus": 0, "max_concurrency": 100},
    "trainer": {"cpu": 4, "gpus": 1, "max_concurrency": 1},
    "trainer_remote": {"cpu": 1, "gpus": 0, "max_concurrency": 10},
    "trajectory_pool": {"cpu": 1, "gpus": 0, "max_concurrency": 100},
    "data_loader": {"cpu": 1, "gpus": 0, "max_concurrency": 10},
    "weight_sync": {"cpu": 1, "gpus": 0, "max_concurrency": 10},
    "validator": {"cpu": 1, "gpus": 0, "max_concurrency": 10},
    "colocated": {"max_concurrency": 10},
}
"""`colocated` has no sizes of its own: those of its roles hold."""

Profiles = dict[str, ProfileSettings]


def profiles_over_the_shipped(profiles: Any) -> Any:
    return _over(SHIPPED_PROFILES, profiles) if isinstance(profiles, dict) else profiles
