"""From settings to the parts they describe."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import psutil

from gpubroker_server.adapters.memory.executor import SimulatedNode, WaitingExecutor
from gpubroker_server.adapters.ray.driver.executor import RayExecutor
from gpubroker_server.adapters.ray.options import RayOptions, RayTls
from gpubroker_server.adapters.triton.http_backend import HttpBackend
from gpubroker_server.bootstrap.model_servers import batch_rules_of, server_of
from gpubroker_server.broker.fleet import HostUse
from gpubroker_server.core.control.alarm import Threshold
from gpubroker_server.core.control.controller import Gains
from gpubroker_server.core.control.disk_guard import DiskGuard, DiskRules
from gpubroker_server.core.control.fleet import FleetRules
from gpubroker_server.core.control.idle import IdleRules
from gpubroker_server.core.control.targets import FleetScope, FleetTarget, Measure
from gpubroker_server.core.control.throughput import ThroughputRules
from gpubroker_server.core.domain.device import FileClass, GpuKind, WatchedRoot
from gpubroker_server.core.domain.leader_term import UNTIL_PROCESS_EXIT, LeaderTermRules
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.policy import (
    CustomLimit,
    InferenceServers,
    Policy,
    Pool,
    Retention,
    StreamRules,
    TaskMaximum,
    TenantPolicy,
)
from gpubroker_server.core.domain.units import Mib, NodeName, Seconds
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, NodeRules
from gpubroker_server.gateway.http.bodies import RequestLimits
from gpubroker_server.gateway.http.connections import ConnectionLimits
from gpubroker_server.gateway.submission.demand import Defaults, NamedDefaults
from gpubroker_server.ports.executor import Executor
from gpubroker_server.ports.models import ModelHost
from gpubroker_server.ports.store import Clock
from gpubroker_server.settings.fleet import DiskLevelSettings, FleetSettings, ThresholdSettings
from gpubroker_server.settings.loading import Settings
from gpubroker_server.settings.sections import (
    MaximumSettings,
    ModelTypeSettings,
    PoolSettings,
    SimulatedDevice,
    SimulatedInstance,
)
from gpubroker_server.settings.triton import TritonSettings

MIB_BYTES = 2**20

Number = TypeVar("Number", int, float)
T = TypeVar("T")


def policy_of(settings: Settings) -> Policy:
    chosen = settings.policy.model_dump()
    chosen["maximum"] = TaskMaximum(**chosen["maximum"])
    running = settings.policy.max_running
    del chosen["max_running"], chosen["custom_limits"]
    chosen["streams"] = tuple(sorted(chosen["streams"].items()))
    chosen["tenants"] = tuple(TenantPolicy(name, **t) for name, t in sorted(chosen["tenants"].items()))
    customs = [
        CustomLimit(name, custom.limit, custom.per == "node", custom.priority_threshold)
        for name, custom in settings.policy.custom_limits.items()
    ]
    customs += [CustomLimit(f"tenant:{name}", most) for name, most in running.tenants.items()]
    customs += [CustomLimit(f"label:{label}", most) for label, most in running.labels.items()]
    pools = tuple(_pool_of(name, given) for name, given in sorted(settings.pools.items()))
    customs += [
        CustomLimit(f"pool:{pool.name}:{field}", most) for pool in pools for field, most in pool.amounts()
    ]
    return Policy(
        **chosen,
        custom_limits=tuple(sorted(customs)),
        pools=pools,
        stream_rules=StreamRules(**settings.fleet.streams.model_dump()),
        array_result_bytes=settings.limits.array_result_bytes,
        serving=serving_of(settings.triton),
        min_residency_seconds=Seconds(settings.triton.min_residency_seconds),
    )


def serving_of(given: TritonSettings) -> InferenceServers:
    """The servers that answer queued inferences."""
    return InferenceServers(
        ledger=tuple(server.name for server in given.servers if server.node),
        others=tuple(server.name for server in given.servers if not server.node),
        at_once=given.queued_at_once,
    )


def _pool_of(name: str, given: PoolSettings) -> Pool:
    chosen = given.model_dump()
    nodes = tuple(sorted((label, tuple(sorted(values))) for label, values in chosen.pop("nodes").items()))
    custom = tuple(sorted(chosen.pop("custom").items()))
    return Pool(name, kinds=tuple(chosen.pop("kinds")), nodes=nodes, custom=custom, **chosen)


def leader_term_rules_of(settings: Settings) -> LeaderTermRules:
    """A SQLite file belongs to one process for as long as that lives."""
    return UNTIL_PROCESS_EXIT if settings.database.startswith("sqlite:") else LeaderTermRules()


def new_executor(settings: Settings, clock: Clock) -> Executor:
    devices = simulated_devices(settings)
    ray = settings.ray
    if settings.engine == "simulated":
        node = SimulatedNode(
            name=ray.node_name,
            cluster=ray.cluster,
            cpu=ray.cpu or float(os.cpu_count() or 1),
            memory_mb=ray.memory_mb or psutil.virtual_memory().total // MIB_BYTES,
            max_runs=ray.max_runs,
            devices=devices,
        )
        # A sample also counts as a heartbeat.
        period_seconds = min(settings.policy.sample_period_seconds, settings.policy.beat_seconds)
        return WaitingExecutor(node, clock, period_seconds)
    return RayExecutor(ray_options_of(settings), clock)


def ray_options_of(settings: Settings) -> RayOptions:
    ray, limits = settings.ray, settings.limits
    return _named_alike(
        RayOptions,
        ray,
        settings.policy,
        settings,
        address=ray.address or None,
        tls=None if ray.tls is None else RayTls(**ray.tls.model_dump()),
        devices=simulated_devices(settings) or None,
        task_path=tuple(str(path) for path in settings.task_path),
        object_store_bytes=ray.object_store_mb * MIB_BYTES,
        result_limit_bytes=limits.result_bytes,
        checkpoint_limit_bytes=limits.checkpoint_bytes,
        log_limit_bytes=limits.log_bytes,
        inherit_env=tuple(ray.inherit_env),
        watched_directories=_watched(settings.fleet),
    )


def _named_alike(kind: type[T], *sections: object, **others: Any) -> T:
    """Its fields are the settings of the same names, besides the `others`."""
    names = {field.name for field in fields(kind)} - others.keys()  # type: ignore[arg-type]  # a dataclass
    alike = {name: getattr(one, name) for one in sections for name in names if hasattr(one, name)}
    return kind(**alike, **others)


def _watched(given: FleetSettings) -> tuple[str, ...]:
    """The roots of the disk guard too: they are cleaned by how full their disks are."""
    return tuple(dict.fromkeys([*given.watched_directories, *(root.path for root in given.disk.roots)]))


def hosts_of(settings: Settings) -> list[ModelHost]:
    """The servers of models that have a node: the leader loads and unloads their models. Raises
    StartRefused."""
    managed = [given for given in settings.triton.servers if given.node]
    if not managed:
        return []
    from gpubroker_server.adapters.triton.host import TritonHost  # with the library of gRPC, which is large
    from gpubroker_server.bootstrap.grpc_proxy import rpc_server_of

    batches = batch_rules_of(settings)
    return [
        TritonHost(
            rpc_server_of(given),
            given.repository,
            metrics=None if given.metrics_url is None else HttpBackend(server_of(given, given.metrics_url)),
            web=HttpBackend(server_of(given)) if batches else None,
            batches=batches,
        )
        for given in managed
    ]


def simulated_devices(settings: Settings) -> tuple[ReportedDevice, ...]:
    """Numbered, with UUIDs that show that they are simulated."""
    seen: list[ReportedDevice] = []
    for given in (device for device in settings.simulated_devices for _ in range(device.count)):
        whole = _simulated(settings, len(seen), given)
        seen.append(whole)
        for instance in (one for one in given.instances for _ in range(one.count)):
            seen.append(_simulated(settings, len(seen), instance, parent=whole.uuid))
    return tuple(seen)


def _simulated(
    settings: Settings, index: int, given: SimulatedDevice | SimulatedInstance, parent: str = ""
) -> ReportedDevice:
    uuid = f"{'MIG' if parent else 'GPU'}-sim-{settings.ray.node_name}-{index}"
    return ReportedDevice(uuid, given.kind, index, Mib(given.memory_mb), True, parent)


def inventory_rules_of(settings: Settings) -> InventoryRules:
    return InventoryRules(
        cluster=settings.ray.cluster,
        reserve_mb=Mib(settings.device_reserve_mb),
        declared_foreign_mb={name: Mib(mb) for name, mb in settings.declared_foreign_mb.items()},
        node_custom=tuple(
            (name, custom.limit)
            for name, custom in sorted(settings.policy.custom_limits.items())
            if custom.per == "node"
        ),
        nodes={name: NodeRules(**given.model_dump()) for name, given in settings.nodes.items()},
        kinds=tuple(
            GpuKind(name, kind.power, Mib(kind.context_mb)) for name, kind in sorted(settings.kinds.items())
        ),
    )


def limits_of(settings: Settings) -> RequestLimits:
    object_seconds = Seconds(settings.retention.object_seconds)
    return _named_alike(RequestLimits, settings.limits, object_seconds=object_seconds)


def connection_limits_of(settings: Settings) -> ConnectionLimits:
    return _named_alike(ConnectionLimits, settings.limits)


def retention_of(settings: Settings) -> Retention:
    return _named_alike(Retention, settings.retention)


def defaults_of(settings: Settings) -> Defaults:
    """Defaults are capped by policy.maximum; only values that a client sends are refused."""
    given, most = settings.defaults, settings.policy.maximum
    return Defaults(
        priority=given.priority,
        cpu=given.cpu,
        max_retries=_capped(given.max_retries, most.max_retries),
        grace_seconds=Seconds(_capped(given.grace_seconds, most.grace_seconds)),
        timeout_seconds=None if most.timeout_seconds is None else Seconds(most.timeout_seconds),
        model_types={name: _named(chosen, most) for name, chosen in settings.model_types.items()},
        profiles={name: _named(chosen, most) for name, chosen in settings.profiles.items()},
    )


def _named(chosen: ModelTypeSettings, most: MaximumSettings) -> NamedDefaults:
    fields = chosen.model_dump()
    for name in ("timeout_seconds", "max_retries"):
        if fields[name] is not None:
            fields[name] = _capped(fields[name], getattr(most, name))
    return NamedDefaults(**fields)


def _capped(value: Number, most: Number | None) -> Number:
    return value if most is None else min(value, most)


def kinds_of(settings: Settings) -> tuple[GpuKind, ...]:
    """Strongest first."""
    kinds = [GpuKind(name, kind.power, Mib(kind.context_mb)) for name, kind in settings.kinds.items()]
    return tuple(sorted(kinds, key=lambda kind: (-kind.power, kind.name)))


def fleet_rules_of(settings: Settings) -> FleetRules:
    given, pressed = settings.fleet, settings.fleet.backpressure
    return FleetRules(
        targets=tuple(_targets(given)),
        constraint_seconds=Seconds(given.constraint_seconds),
        controls=given.controller,
        gains=Gains(**given.gains.model_dump()),
        idle=IdleRules(given.idle_below_percent / 100, Seconds(given.idle_grace_seconds)),
        idle_check_seconds=Seconds(given.idle_check_seconds),
        thresholds=_thresholds(
            {
                "queue_length": pressed.queue_length,
                "queue:*": pressed.tenant_queue_length,
                "admission_seconds": pressed.admission_seconds,
                "store_seconds": pressed.store_seconds,
                "disk_percent": pressed.disk_percent,
                "host_memory_percent": pressed.host_memory_percent,
            }
        ),
        next_band_seconds=Seconds(pressed.next_band_seconds),
        retry_after_seconds=Seconds(pressed.retry_after_seconds),
        disk=disk_guard_of(settings),
        overload=_thresholds(
            {"cpu": given.overload.cpu_percent, "host_memory": given.overload.host_memory_percent}, whole=100
        ),
        throughput=ThroughputRules(
            Seconds(given.throughput.seconds),
            given.throughput.change_percent / 100,
            given.throughput.least_per_second,
        ),
    )


FILE_CLASSES = {
    "logs": FileClass.LOG,
    "databases": FileClass.EMPTY_DATABASE,
    "checkpoints": FileClass.CHECKPOINT,
    "redundant": FileClass.REDUNDANT,
}


def disk_guard_of(settings: Settings) -> DiskGuard:
    """The directories of the service are spared on every node: they may be shared."""
    given = settings.fleet.disk
    overrides = [(scope.partition(":"), one) for scope, one in given.overrides.items()]
    rules = [(kind, name, _disk_rules(one, given.old_seconds)) for (kind, _, name), one in overrides]
    return DiskGuard(
        _disk_rules(given, given.old_seconds),
        labelled=tuple((name, one) for kind, name, one in rules if kind == "label"),
        nodes=tuple((NodeName(name), one) for kind, name, one in rules if kind == "node"),
        roots=tuple(
            WatchedRoot(one.path, FILE_CLASSES[one.holds], tuple(one.sync_command), one.sync_seconds)
            for one in given.roots
        ),
        spared=tuple(str(path.absolute()) for path in (settings.data_dir, settings.objects)),
        clean_seconds=Seconds(given.clean_every_seconds),
    )


def _disk_rules(given: DiskLevelSettings, old_seconds: float) -> DiskRules:
    levels = given.warn_percent / 100, given.clean_percent / 100, given.block_percent / 100
    return DiskRules(*levels, old_seconds=Seconds(old_seconds))


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


def _thresholds(watched: Mapping[str, ThresholdSettings | None], whole: float = 1.0) -> dict[str, Threshold]:
    """`whole`: what the settings say for 1."""
    return {
        name: Threshold(one.high / whole, one.low / whole, Seconds(one.seconds))
        for name, one in watched.items()
        if one is not None
    }


def host_use(directories: Iterable[Path]) -> HostUse:
    """Blocks while a file system does not answer."""
    disks = (used for path in directories if (used := _disk_percent(path)) is not None)
    return HostUse(max(disks, default=None), psutil.virtual_memory().percent)


def _disk_percent(directory: Path) -> float | None:
    try:
        return psutil.disk_usage(str(directory)).percent
    except OSError:  # it is not there (yet), or its file system fails
        return None
