"""Fleet health: targets, background work, idle devices, backpressure, work streams and disks."""

import os
from itertools import pairwise
from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from gpubroker_server.settings.sections import Section

Percent = Annotated[float, Field(ge=0, le=100)]
Duration = Annotated[float, Field(ge=0)]

SHORT_VARIABLES: Final = {
    "target_util_min": ("fleet", "target_util_min_percent"),
    "target_util_max": ("fleet", "target_util_max_percent"),
    "max_disk_percent": ("fleet", "max_disk_percent"),
    "idle_check_interval": ("fleet", "idle_check_seconds"),
    "idle_gpu_threshold": ("fleet", "idle_below_percent"),
    "idle_grace_period": ("fleet", "idle_grace_seconds"),
    "memory_limit_gb": ("ray", "process_memory_mb"),
}
"""Short names of environment variables, after the prefix, and the settings that they are."""


def _check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    if low >= high:
        raise ValueError(f"{low_name} {low:g} is not below {high_name} {high:g}; make it smaller")


class TargetSettings(Section):
    scope: str
    measure: Literal["gpu_utilization", "gpu_memory", "host_memory", "disk"] = "gpu_utilization"
    min_percent: Percent = 0.0
    max_percent: Percent = 100.0

    @field_validator("scope")
    @classmethod
    def _scope_is_a_part(cls, scope: str) -> str:
        kind, _, name = scope.partition(":")
        if scope != "all" and not (kind in ("pool", "label", "node") and name):
            raise ValueError(
                f"{scope!r} is no part of the fleet; write all, pool:NAME, label:KEY=VALUE or node:NAME"
            )
        if kind == "label" and "=" not in name:
            raise ValueError(f"{scope!r} has no value; write label:KEY=VALUE")
        return scope

    @model_validator(mode="after")
    def _least_is_below_most(self) -> Self:
        _check_order("min_percent", self.min_percent, "max_percent", self.max_percent)
        return self


class GainSettings(Section):
    proportional: Annotated[float, Field(ge=0)] = 0.1
    integral: Annotated[float, Field(ge=0)] = 0.01
    derivative: Annotated[float, Field(ge=0)] = 0.05
    smoothing_seconds: Duration = 60.0
    filter_seconds: Duration = 20.0
    most_step: Annotated[float, Field(gt=0, le=1)] = 0.05


class ThresholdSettings(Section):
    high: Annotated[float, Field(gt=0)]
    low: Annotated[float, Field(ge=0)]
    seconds: Duration = 10.0

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        _check_order("low", self.low, "high", self.high)
        return self


class BackpressureSettings(Section):
    queue_length: ThresholdSettings | None = ThresholdSettings(high=400_000, low=300_000)
    tenant_queue_length: ThresholdSettings | None = None
    admission_seconds: ThresholdSettings | None = None
    store_seconds: ThresholdSettings | None = ThresholdSettings(high=2.0, low=0.5)
    disk_percent: ThresholdSettings | None = ThresholdSettings(high=95, low=90)
    host_memory_percent: ThresholdSettings | None = ThresholdSettings(high=95, low=90)
    next_band_seconds: Duration = 60.0
    retry_after_seconds: Annotated[float, Field(ge=1, le=3600)] = 30.0


class OverloadSettings(Section):
    cpu_percent: ThresholdSettings | None = ThresholdSettings(high=95, low=85, seconds=300)
    host_memory_percent: ThresholdSettings | None = ThresholdSettings(high=90, low=85, seconds=60)


class ThroughputSettings(Section):
    seconds: Annotated[float, Field(ge=1)] = 300.0
    change_percent: Percent = 50.0
    least_per_second: Annotated[float, Field(gt=0)] = 0.1


class DiskLevelSettings(Section):
    warn_percent: Percent = 60.0
    clean_percent: Percent = 65.0
    block_percent: Percent = 70.0

    @model_validator(mode="after")
    def _levels_rise(self) -> Self:
        _check_order("warn_percent", self.warn_percent, "clean_percent", self.clean_percent)
        _check_order("clean_percent", self.clean_percent, "block_percent", self.block_percent)
        return self


COORDINATORS: Final = "label:role=coordinator"
COORDINATOR_LEVELS: Final = DiskLevelSettings(warn_percent=40, clean_percent=45, block_percent=50)


class DiskRootSettings(Section):
    path: str
    holds: Literal["logs", "databases", "checkpoints", "redundant"] = Field(alias="class")
    sync_command: list[str] = Field(default_factory=list)
    sync_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0

    @field_validator("path")
    @classmethod
    def _path_is_a_directory_of_its_own(cls, path: str) -> str:
        if not path.startswith("/") or os.path.normpath(path) in ("/", "//"):
            raise ValueError(f"{path!r} is no directory to clean; write its whole path, and not /")
        return os.path.normpath(path)

    @model_validator(mode="after")
    def _what_is_redundant_is_synced(self) -> Self:
        if (self.holds == "redundant") is not bool(self.sync_command):
            raise ValueError(
                f"{self.path}: class redundant needs a sync_command, a list of a program and its arguments, "
                "and no other class has one"
            )
        return self


class DiskSettings(DiskLevelSettings):
    overrides: dict[str, DiskLevelSettings] = Field(
        default_factory=lambda: {COORDINATORS: COORDINATOR_LEVELS}
    )
    old_seconds: Annotated[float, Field(ge=3600)] = 7 * 86_400.0
    clean_every_seconds: Annotated[float, Field(ge=60)] = 600.0
    roots: list[DiskRootSettings] = Field(default_factory=list)

    @field_validator("overrides")
    @classmethod
    def _of_nodes_or_labels(cls, given: dict[str, DiskLevelSettings]) -> dict[str, DiskLevelSettings]:
        for scope in given:
            kind, _, name = scope.partition(":")
            if not (kind == "node" and name) and not (kind == "label" and "=" in name):
                raise ValueError(f"{scope!r} names no nodes; write node:NAME or label:KEY=VALUE")
        return {COORDINATORS: COORDINATOR_LEVELS, **given}

    @model_validator(mode="after")
    def _roots_are_apart(self) -> Self:
        paths = sorted(f"{root.path}/" for root in self.roots)
        for one, other in pairwise(paths):
            if other.startswith(one):
                raise ValueError(f"root {other[:-1]} is in root {one[:-1]}; give each file one class")
        return self


class StreamSettings(Section):
    velocity_gain: Annotated[float, Field(ge=0, le=1000)] = 0.01
    least_velocity_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    most_velocity_factor: Annotated[float, Field(ge=1, le=1000)] = 2.0
    velocity_seconds: Annotated[float, Field(gt=0)] = 3600.0
    stale_seconds: Annotated[float, Field(gt=0)] = 3600.0
    most_staleness_factor: Annotated[float, Field(ge=1, le=1000)] = 3.0
    least_quality_factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    least_share: Annotated[float, Field(gt=0, le=1)] = 0.1


class FleetSettings(Section):
    target_util_min_percent: Percent = 60.0
    target_util_max_percent: Percent = 80.0
    max_gpu_memory_percent: Percent = 80.0
    max_memory_percent: Percent = 80.0
    max_disk_percent: Percent = 70.0
    targets: list[TargetSettings] = Field(default_factory=list)
    constraint_seconds: Duration = 60.0
    controller: bool = False
    gains: GainSettings = Field(default_factory=GainSettings)
    watched_directories: list[str] = Field(default_factory=list)
    idle_check_seconds: Annotated[float, Field(gt=0)] = 60.0
    idle_below_percent: Percent = 5.0
    idle_grace_seconds: Duration = 300.0
    backpressure: BackpressureSettings = Field(default_factory=BackpressureSettings)
    overload: OverloadSettings = Field(default_factory=OverloadSettings)
    throughput: ThroughputSettings = Field(default_factory=ThroughputSettings)
    disk: DiskSettings = Field(default_factory=DiskSettings)
    streams: StreamSettings = Field(default_factory=StreamSettings)

    @field_validator("watched_directories")
    @classmethod
    def _directories_are_absolute(cls, directories: list[str]) -> list[str]:
        for one in directories:
            if not one.startswith("/"):
                raise ValueError(f"{one!r} is not the path of a directory on the nodes; write it from / on")
        return directories

    @model_validator(mode="after")
    def _least_is_below_most(self) -> Self:
        _check_order(
            "target_util_min_percent", self.target_util_min_percent,
            "target_util_max_percent", self.target_util_max_percent,
        )  # fmt: skip
        return self
