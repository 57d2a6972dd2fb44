"""From settings to the rules of fleet control, and what it knows of this machine."""

from collections.abc import Iterable
from pathlib import Path

import psutil

from gpubroker_server.broker.fleet import HostUse
from gpubroker_server.core.control.alarm import Threshold
from gpubroker_server.core.control.controller import Gains
from gpubroker_server.core.control.fleet import FleetRules
from gpubroker_server.core.control.idle import IdleRules
from gpubroker_server.core.control.targets import FleetScope, FleetTarget, Measure
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.settings.fleet import BackpressureSettings, FleetSettings
from gpubroker_server.settings.loading import Settings


def fleet_rules_of(settings: Settings) -> FleetRules:
    given = settings.fleet
    return FleetRules(
        targets=tuple(_targets(given)),
        controls=given.controller,
        gains=Gains(**given.gains.model_dump()),
        idle=IdleRules(given.idle_below_percent / 100, Seconds(given.idle_grace_seconds)),
        idle_check_seconds=Seconds(given.idle_check_seconds),
        thresholds=_thresholds(given.backpressure),
        next_band_seconds=Seconds(given.backpressure.next_band_seconds),
        retry_after_seconds=Seconds(given.backpressure.retry_after_seconds),
    )


def _targets(given: FleetSettings) -> Iterable[FleetTarget]:
    """Those of the whole fleet, unless the list has others of it."""
    whole = (
        (Measure.GPU_UTILIZATION, given.target_util_min_percent, given.target_util_max_percent),
        (Measure.GPU_MEMORY, 0.0, given.max_gpu_memory_percent),
        (Measure.HOST_MEMORY, 0.0, given.max_memory_percent),
        (Measure.DISK, 0.0, given.max_disk_percent),
    )
    targets = {(FleetScope(), measure): (least, most) for measure, least, most in whole}
    for one in given.targets:
        kind, _, name = one.scope.partition(":")
        targets[FleetScope(kind, name), Measure(one.measure)] = one.min_percent, one.max_percent
    for (scope, measure), (least, most) in targets.items():
        yield FleetTarget(measure, least / 100, most / 100, scope)


def _thresholds(given: BackpressureSettings) -> dict[str, Threshold]:
    watched = {
        "queue_length": given.queue_length,
        "queue:*": given.tenant_queue_length,
        "admission_seconds": given.admission_seconds,
        "store_seconds": given.store_seconds,
        "disk_percent": given.disk_percent,
        "host_memory_percent": given.host_memory_percent,
    }
    return {
        name: Threshold(one.high, one.low, Seconds(one.seconds))
        for name, one in watched.items()
        if one is not None
    }


def host_use(directories: Iterable[Path]) -> HostUse:
    """Blocks while a file system does not answer."""
    disks = (psutil.disk_usage(str(path)).percent for path in directories if path.exists())
    return HostUse(max(disks, default=None), psutil.virtual_memory().percent)
