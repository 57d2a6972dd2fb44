"""Builds the parts of a process from the settings."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import psutil
from gpubroker.wire.policy import GpuKind, TaskMaximum
from msgspec.structs import replace

from gpubroker_server.adapters.ray.driver.executor import RayExecutor
from gpubroker_server.adapters.ray.options import RayOptions
from gpubroker_server.adapters.simulated_executor import SimulatedNode, WaitingExecutor
from gpubroker_server.adapters.triton.http_backend import HttpBackend
from gpubroker_server.bootstrap.model_servers import server_of
from gpubroker_server.broker.fleet import HostUse
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults
from gpubroker_server.core.admission.environments import EnvironmentPolicy
from gpubroker_server.core.control.fleet import FleetRules
from gpubroker_server.core.domain.leader_term import UNTIL_PROCESS_EXIT, LeaderTermRules
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import MIB_BYTES, Mib
from gpubroker_server.core.domain.visible_gpus import VARIABLE
from gpubroker_server.core.lifecycle.reconcile import InventoryRules
from gpubroker_server.ports.executor import Executor
from gpubroker_server.ports.models import ModelHost
from gpubroker_server.ports.store import Clock
from gpubroker_server.settings.environments import BuildRules
from gpubroker_server.settings.fleet import FleetSettings
from gpubroker_server.settings.loading import Settings
from gpubroker_server.settings.ray import RaySettings
from gpubroker_server.settings.sections import SimulatedDevice, SimulatedInstance

Number = TypeVar("Number", bound=float | None)


def policy_of(settings: Settings) -> Policy:
    """Return the policy, completed with values of other sections of the settings."""
    return replace(
        settings.policy,
        autoscaler=settings.policy.autoscaler or ("Ray" if settings.ray.autoscale else ""),
        custom_limits=settings.policy.limits_with(settings.pools),
        pools=settings.pools,
        stream_rules=settings.fleet.streams,
        array_result_bytes=settings.limits.array_result_bytes,
        serving=settings.triton.inference_servers,
        min_residency_seconds=settings.triton.min_residency_seconds,
        yields_to_tasks_seconds=settings.triton.yields_to_tasks_seconds,
    )


def leader_term_rules_of(settings: Settings) -> LeaderTermRules:
    """Return the rules of terms. With SQLite a term lasts until the process exits, because the file belongs
    to it alone."""
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
    limits = settings.limits
    return RayOptions(
        settings.data_dir,
        **{name: getattr(settings.ray, name) for name in RaySettings.__struct_fields__},
        devices=simulated_devices(settings) or None,
        task_path=tuple(map(str, settings.task_path)),
        task_user=settings.task_user,
        task_env=settings.task_env,
        result_limit_bytes=limits.result_bytes,
        checkpoint_limit_bytes=limits.checkpoint_bytes,
        log_limit_bytes=limits.log_bytes,
        upload_bytes=limits.upload_bytes,
        upload_files=limits.upload_files,
        output_bytes=limits.output_bytes,
        output_files=limits.output_files,
        sample_period_seconds=settings.policy.sample_period_seconds,
        beat_seconds=settings.policy.beat_seconds,
        log_level=settings.log_level,
        log_format=settings.log_format,
        watched_directories=_watched(settings.fleet),
        own_visible_gpus=os.environ.get(VARIABLE),
        environments=build_rules_of(settings),
    )


def build_rules_of(settings: Settings) -> BuildRules:
    given = settings.environments
    return BuildRules(**{name: getattr(given, name) for name in BuildRules.__struct_fields__})


def environment_policy_of(settings: Settings) -> EnvironmentPolicy:
    given = settings.environments
    return EnvironmentPolicy(given.container_engine, given.builds, given.shared)


def _watched(given: FleetSettings) -> tuple[str, ...]:
    """Return the directories whose disks are measured. The disk guard needs this for its roots."""
    return tuple(dict.fromkeys([*given.watched_directories, *(root.path for root in given.disk.roots)]))


def hosts_of(settings: Settings) -> list[ModelHost]:
    """Return the model servers that have a node. The leader loads and unloads their models. Raises
    StartRefused."""
    managed = settings.triton.managed
    if not managed:
        return []
    from gpubroker_server.adapters.triton.host import TritonHost  # imports gRPC, which is large
    from gpubroker_server.bootstrap.grpc_proxy import rpc_server_of

    batches = settings.triton.batch
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
    """Return the simulated devices with indexes, and with UUIDs that show that they are simulated."""
    seen: list[ReportedDevice] = []
    for given in (device for device in settings.simulated_devices for _ in range(device.count)):
        whole = _simulated(settings, len(seen), given)
        seen.append(whole)
        for instance in (
            instance_count for instance_count in given.instances for _ in range(instance_count.count)
        ):
            seen.append(_simulated(settings, len(seen), instance, parent=whole.uuid))
    return tuple(seen)


def _simulated(
    settings: Settings, index: int, given: SimulatedDevice | SimulatedInstance, parent: str = ""
) -> ReportedDevice:
    uuid = f"{'MIG' if parent else 'GPU'}-sim-{settings.ray.node_name}-{index}"
    return ReportedDevice(uuid, given.kind, index, Mib(given.memory_mb), True, parent)


def inventory_rules_of(settings: Settings) -> InventoryRules:
    limits = settings.policy.custom_limits
    return InventoryRules(
        cluster=settings.ray.cluster,
        reserve_mb=settings.device_reserve_mb,
        declared_foreign_mb=settings.declared_foreign_mb,
        node_custom=tuple((limit.name, limit.amount) for limit in limits if limit.per_node),
        nodes=settings.nodes,
        kinds=settings.kinds,
    )


def limits_of(settings: Settings) -> ServiceLimits:
    return replace(settings.limits, object_seconds=settings.retention.object_seconds)


def defaults_of(settings: Settings) -> Defaults:
    """Return the defaults, capped by policy.maximum. Values above the maximum are refused only if a client
    sends them."""
    given, maximum = settings.defaults, settings.policy.maximum
    return replace(
        given,
        max_retries=_capped(given.max_retries, maximum.max_retries),
        grace_seconds=_capped(given.grace_seconds, maximum.grace_seconds),
        timeout_seconds=maximum.timeout_seconds,
        model_types={name: _named(chosen, maximum) for name, chosen in settings.model_types.items()},
        profiles={name: _named(chosen, maximum) for name, chosen in settings.profiles.items()},
        environments=settings.environments.named,
    )


def _named(chosen: NamedDefaults, maximum: TaskMaximum) -> NamedDefaults:
    return replace(
        chosen,
        timeout_seconds=_capped(chosen.timeout_seconds, maximum.timeout_seconds),
        max_retries=_capped(chosen.max_retries, maximum.max_retries),
    )


def _capped(value: Number, maximum: Number) -> Number:
    """Return the smaller of the two values. A value of None stays None, and a maximum of None is no limit."""
    return value if value is None or maximum is None else min(value, maximum)


def kinds_of(settings: Settings) -> tuple[GpuKind, ...]:
    """Return the kinds of GPU, strongest first."""
    return tuple(sorted(settings.kinds, key=lambda kind: (-kind.power, kind.name)))


def fleet_rules_of(settings: Settings) -> FleetRules:
    return settings.fleet.rules(tuple(str(path.absolute()) for path in (settings.data_dir, settings.objects)))


def host_use(directories: Iterable[Path]) -> HostUse:
    """Return the use of this machine. This blocks while a file system does not answer."""
    disks = (used for path in directories if (used := _disk_percent(path)) is not None)
    return HostUse(max(disks, default=None), psutil.virtual_memory().percent)


def _disk_percent(directory: Path) -> float | None:
    try:
        return psutil.disk_usage(str(directory)).percent
    except OSError:  # the directory does not exist yet, or its file system fails
        return None
