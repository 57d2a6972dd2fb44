"""Fleet health: targets, background work, idle devices, backpressure, work streams and disks."""

import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Final

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from gpubroker_server.core.control.alarm import Threshold, check_order
from gpubroker_server.core.control.disk_guard import DiskGuard, DiskRules
from gpubroker_server.core.control.fleet import FleetRules
from gpubroker_server.core.control.idle import IdleRules
from gpubroker_server.core.control.targets import FleetTarget, Measure
from gpubroker_server.core.domain.device import FileClass, WatchedRoot
from gpubroker_server.core.domain.policy import StreamRules
from gpubroker_server.core.domain.setting_marks import NonNegativeSeconds, Share, check
from gpubroker_server.core.domain.units import Seconds

SHORT_VARIABLES: Final = {
    "target_util_min": ("fleet", "target_util_min_percent"),
    "target_util_max": ("fleet", "target_util_max_percent"),
    "max_disk_percent": ("fleet", "max_disk_percent"),
    "idle_check_interval": ("fleet", "idle_check_seconds"),
    "idle_gpu_threshold": ("fleet", "idle_below_percent"),
    "idle_grace_period": ("fleet", "idle_grace_seconds"),
    "memory_limit_gb": ("ray", "process_memory_mb"),
}
"""The settings that environment variables with short names set, by the name after the prefix."""


class Level(Threshold, frozen=True):
    """A threshold for which the operator need not give a duration. By default, crossing it counts after 10
    s."""

    seconds: NonNegativeSeconds = Seconds(10.0)


class BackpressureSettings(Struct, frozen=True, kw_only=True):
    queue_length: Level | None = Level(400_000, 300_000)
    tenant_queue_length: Level | None = None
    admission_seconds: Level | None = None
    store_seconds: Level | None = Level(2.0, 0.5)
    disk_percent: Level | None = Level(95, 90)
    host_memory_percent: Level | None = Level(95, 90)
    next_band_seconds: NonNegativeSeconds = Seconds(60.0)
    retry_after_seconds: Annotated[Seconds, Meta(ge=1, le=3600)] = Seconds(30.0)

    def __post_init__(self) -> None:
        """Check that a tenant is refused before all tenants are because of its tasks. Raises ValueError."""
        if self.tenant_queue_length is not None and self.queue_length is not None:
            check_order(
                "tenant_queue_length.high", self.tenant_queue_length.high,
                "queue_length.high", self.queue_length.high,
            )  # fmt: skip

    @property
    def thresholds(self) -> dict[str, Threshold]:
        named = {
            "queue_length": self.queue_length,
            "queue:*": self.tenant_queue_length,
            "admission_seconds": self.admission_seconds,
            "store_seconds": self.store_seconds,
            "disk_percent": self.disk_percent,
            "host_memory_percent": self.host_memory_percent,
        }
        return {name: threshold for name, threshold in named.items() if threshold is not None}


class OverloadSettings(Struct, frozen=True, kw_only=True):
    cpu_percent: Level | None = Level(95, 85, Seconds(300.0))
    host_memory_percent: Level | None = Level(90, 85, Seconds(60.0))

    @property
    def thresholds(self) -> dict[str, Threshold]:
        named = {"cpu": self.cpu_percent, "host_memory": self.host_memory_percent}
        return {
            name: Threshold(threshold.high / 100, threshold.low / 100, threshold.seconds)
            for name, threshold in named.items()
            if threshold is not None
        }


COORDINATORS: Final = "label:role=coordinator"
COORDINATOR_LEVELS: Final = DiskRules(0.40, 0.45, 0.50)


def _are_directories_of_their_own(roots: tuple[WatchedRoot, ...]) -> tuple[WatchedRoot, ...]:
    found = []
    for root in roots:
        path = os.path.normpath(root.path)
        if not root.path.startswith("/") or path in ("/", "//"):
            raise ValueError(f"{root.path!r} is no directory to clean; write its whole path, and not /")
        if root.file_class is FileClass.REDUNDANT and not root.sync_command:
            raise ValueError(
                f"{path}: class redundant needs a sync_command, a list of a program and its arguments"
            )
        found.append(replace(root, path=path))
    for root_path, other in pairwise(sorted(f"{root.path}/" for root in found)):
        if other.startswith(root_path):
            raise ValueError(f"root {other[:-1]} is in root {root_path[:-1]}; give each file one class")
    return tuple(found)


def _are_of_nodes_or_labels(given: dict[str, DiskRules]) -> dict[str, DiskRules]:
    for scope in given:
        kind, _, name = scope.partition(":")
        if not (kind == "node" and name) and not (kind == "label" and "=" in name):
            raise ValueError(f"{scope!r} names no nodes; write node:NAME or label:KEY=VALUE")
    return {COORDINATORS: COORDINATOR_LEVELS, **given}


class DiskSettings(DiskGuard, frozen=True, kw_only=True):
    overrides: Annotated[Mapping[str, DiskRules], check(_are_of_nodes_or_labels)] = field(
        default_factory=lambda: {COORDINATORS: COORDINATOR_LEVELS}
    )
    roots: Annotated[tuple[WatchedRoot, ...], check(_are_directories_of_their_own)] = ()


def _directories_are_absolute(directories: tuple[str, ...]) -> tuple[str, ...]:
    for directory in directories:
        if not directory.startswith("/"):
            raise ValueError(f"{directory!r} is not the path of a directory on the nodes; write it from / on")
    return directories


class FleetSettings(FleetRules, frozen=True, kw_only=True):
    """The section `fleet`. `rules` adds the targets of the whole fleet to its targets."""

    target_util_min: Share = 0.6
    target_util_max: Share = 0.8
    max_gpu_memory: Share = 0.8
    max_memory: Share = 0.8
    max_disk: Share = 0.7
    watched_directories: Annotated[tuple[str, ...], check(_directories_are_absolute)] = ()
    idle_below: Share = 0.05
    idle_grace_seconds: NonNegativeSeconds = Seconds(300.0)
    backpressure: BackpressureSettings = BackpressureSettings()
    overload: OverloadSettings = OverloadSettings()
    disk: DiskSettings = field(default_factory=DiskSettings)
    streams: StreamRules = StreamRules()

    def __post_init__(self) -> None:
        """Check that the least use of the GPUs is below the most. Raises ValueError."""
        check_order(
            "target_util_min_percent", self.target_util_min * 100,
            "target_util_max_percent", self.target_util_max * 100,
        )  # fmt: skip

    def rules(self, spared: tuple[str, ...]) -> FleetRules:
        """Return the rules of fleet control. `spared` are the directories of the service. They are spared on
        every node, because nodes may share them."""
        targets = (
            FleetTarget(Measure.GPU_UTILIZATION, self.target_util_min, self.target_util_max),
            FleetTarget(Measure.GPU_MEMORY, most=self.max_gpu_memory),
            FleetTarget(Measure.HOST_MEMORY, most=self.max_memory),
            FleetTarget(Measure.DISK, most=self.max_disk),
            *self.targets,
        )
        return replace(
            self,
            # Of several targets for one scope and measure, the last one holds.
            targets=tuple({(target.scope, target.measure): target for target in targets}.values()),
            idle=IdleRules(self.idle_below, self.idle_grace_seconds),
            thresholds=self.backpressure.thresholds,
            next_band_seconds=self.backpressure.next_band_seconds,
            retry_after_seconds=self.backpressure.retry_after_seconds,
            disk=replace(self.disk, spared=spared),
            overload_thresholds=self.overload.thresholds,
        )
