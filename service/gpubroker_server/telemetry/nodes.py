"""Metrics of nodes and of the health of their GPUs, as last measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from gpubroker_server.core.domain.device import GpuHealth, NodeSample
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.world import World

_MIB = 1024 * 1024
_NODE = ("hostname",)
_DISK = ("hostname", "path")
GPU = ("gpu", "UUID", "hostname")
"""As dcgm-exporter spells them, so that both join on UUID without relabelling."""

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpubroker_node_ready": (
        "1 if the node's agent answers the leader, 0 if it is silent; absent without a known leader.",
        _NODE,
    ),
    "gpubroker_node_gpu_faults": ("GPUs that the node's agent cannot use.", _NODE),
    "gpubroker_node_cpu_utilization_ratio": ("Share of the machine's CPUs that was busy.", _NODE),
    "gpubroker_node_memory_capacity_bytes": ("Host memory of the machine.", _NODE),
    "gpubroker_node_memory_available_bytes": ("Host memory that can be had without swapping.", _NODE),
    "gpubroker_node_memory_pressure_ratio": ("Share of time in which processes waited for memory.", _NODE),
    "gpubroker_node_disk_capacity_bytes": ("File system of a watched directory.", _DISK),
    "gpubroker_node_disk_free_bytes": ("What may still be written there.", _DISK),
    "gpubroker_node_object_store_capacity_bytes": ("Ray's object store on the node.", _NODE),
    "gpubroker_node_object_store_spilled_bytes": ("What Ray keeps on disk for lack of room there.", _NODE),
    "gpubroker_gpu_power_watts": ("Power that the device draws.", GPU),
    "gpubroker_gpu_temperature_celsius": ("Temperature of the device.", GPU),
    "gpubroker_gpu_sm_clock_hertz": ("Clock of the streaming multiprocessors.", GPU),
    "gpubroker_gpu_memory_clock_hertz": ("Clock of the device's memory.", GPU),
    "gpubroker_gpu_xid": ("Number of the last critical error; absent without one.", GPU),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpubroker_node_network_received_bytes": ("By all interfaces but loopback, since it booted.", _NODE),
    "gpubroker_node_network_sent_bytes": ("By all interfaces but loopback, since it booted.", _NODE),
    "gpubroker_gpu_ecc_errors": ("Uncorrected memory errors since the driver was loaded.", GPU),
}

Read = tuple[str, Iterable[tuple[tuple[str, ...], float]]]
"""Name of a metric, and its samples: values of labels, and the value."""

_OF_NODES: Mapping[str, Callable[[NodeSample], float | None]] = {
    "gpubroker_node_cpu_utilization_ratio": lambda it: it.cpu,
    "gpubroker_node_memory_capacity_bytes": lambda it: it.memory_total_mb * _MIB,
    "gpubroker_node_memory_available_bytes": lambda it: it.memory_available_mb * _MIB,
    "gpubroker_node_memory_pressure_ratio": lambda it: it.memory_pressure,
    "gpubroker_node_network_received_bytes": lambda it: it.received_bytes,
    "gpubroker_node_network_sent_bytes": lambda it: it.sent_bytes,
    "gpubroker_node_object_store_capacity_bytes": lambda it: _bytes(it.store and it.store.total_mb),
    "gpubroker_node_object_store_spilled_bytes": lambda it: _bytes(it.store and it.store.spilled_mb),
}
_OF_GPUS: Mapping[str, Callable[[GpuHealth], float | None]] = {
    "gpubroker_gpu_power_watts": lambda it: it.power_watts,
    "gpubroker_gpu_temperature_celsius": lambda it: it.temperature_celsius,
    "gpubroker_gpu_sm_clock_hertz": lambda it: _hertz(it.sm_clock_mhz),
    "gpubroker_gpu_memory_clock_hertz": lambda it: _hertz(it.memory_clock_mhz),
    "gpubroker_gpu_ecc_errors": lambda it: it.ecc_errors,
    "gpubroker_gpu_xid": lambda it: it.xid,
}


def node_samples(world: World, now: Instant, period_seconds: float) -> Iterator[Read]:
    """Of the nodes that were measured lately."""
    fresh = [it for _, it in sorted(world.node_samples.items()) if not it.is_stale(now, period_seconds)]
    for name, read in _OF_NODES.items():
        values = (((it.node,), read(it)) for it in fresh)
        yield name, [(labels, value) for labels, value in values if value is not None]
    disks = [((it.node, disk.path), disk) for it in fresh for disk in it.disks]
    yield "gpubroker_node_disk_capacity_bytes", [(labels, disk.total_bytes) for labels, disk in disks]
    yield "gpubroker_node_disk_free_bytes", [(labels, disk.free_bytes) for labels, disk in disks]
    gpus = []
    for it in fresh:
        for key in world.by_node.get(it.node, ()):
            device = world.ledgers[key].device
            if (health := it.gpus.get(device.uuid)) is not None:
                gpus.append(((str(device.index), device.uuid, device.node), health))
    for name, of in _OF_GPUS.items():
        found = ((labels, of(health)) for labels, health in gpus)
        yield name, [(labels, value) for labels, value in found if value is not None]


def _bytes(mb: int | None) -> int | None:
    return None if mb is None else mb * _MIB


def _hertz(mhz: int | None) -> int | None:
    return None if mhz is None else mhz * 1_000_000
