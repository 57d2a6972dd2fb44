"""Metrics of nodes and of the health of their GPUs, as last measured."""

from collections.abc import Callable
from typing import Final

from gpubroker_server.core.control.findings.nodes import missing_gpus
from gpubroker_server.core.domain.device import GpuHealth, NodeSample
from gpubroker_server.core.domain.units import MIB_BYTES
from gpubroker_server.core.lifecycle.silent_nodes import heard_nodes
from gpubroker_server.telemetry.exposition import Samples
from gpubroker_server.telemetry.table import GPU, MetricRow, Scrape, gpu_labels

_NODE = ("hostname",)
_DISK = ("hostname", "path")


def _ready(scrape: Scrape) -> Samples | None:
    """Return for each node whether it is heard; None without a leader, because only the leader hears the
    nodes."""
    leader = scrape.leader
    if leader is None:
        return None
    paused = () if leader.paused is None else leader.paused.nodes
    return [((name,), heard) for name, heard in heard_nodes(scrape.world, {*leader.silent, *paused}).items()]


def _gpu_faults(scrape: Scrape) -> Samples | None:
    if scrape.leader is None:
        return None
    agents = scrape.leader.executor.get("agents", {})
    return [
        ((node,), len(agent.get("gpu_faults", ())) + len(missing_gpus(scrape.world, node, agent)))
        for node, agent in agents.items()
    ]


def _closed_gpus(scrape: Scrape) -> Samples:
    devices = (ledger.device for ledger in scrape.world.ledgers.values())
    return [(gpu_labels(device), float(device.is_closed)) for device in devices if not device.simulated]


def _of_node(
    name: str, about: str, read: Callable[[NodeSample], float | None], *, is_counter: bool = False
) -> MetricRow:
    def samples(scrape: Scrape) -> Samples:
        values = (((sample.node,), read(sample)) for sample in scrape.fresh_nodes)
        return [(labels, value) for labels, value in values if value is not None]

    return MetricRow(name, about, _NODE, samples, is_counter)


def _of_gpu(
    name: str, about: str, read: Callable[[GpuHealth], float | None], *, is_counter: bool = False
) -> MetricRow:
    def samples(scrape: Scrape) -> Samples:
        values = (
            (gpu_labels(device), read(health))
            for sample in scrape.fresh_nodes
            for key in scrape.world.by_node.get(sample.node, ())
            if (health := sample.gpus.get((device := scrape.world.ledgers[key].device).uuid)) is not None
        )
        return [(labels, value) for labels, value in values if value is not None]

    return MetricRow(name, about, GPU, samples, is_counter)


def _of_disks(scrape: Scrape, name: str) -> Samples:
    return [
        ((sample.node, disk.path), getattr(disk, name))
        for sample in scrape.fresh_nodes
        for disk in sample.disks
    ]


def _bytes(mb: int | None) -> int | None:
    return None if mb is None else mb * MIB_BYTES


def _hertz(mhz: int | None) -> int | None:
    return None if mhz is None else mhz * 1_000_000


METRICS: Final = (
    MetricRow(
        "gpubroker_node_ready",
        "1 if the node's agent answers the leader, 0 if it is silent; absent without a known leader.",
        _NODE,
        _ready,
    ),
    MetricRow("gpubroker_node_gpu_faults", "GPUs that the node's agent cannot use.", _NODE, _gpu_faults),
    MetricRow(
        "gpubroker_gpu_closed",
        "1 if nothing new starts on the device, because it needs a reset or an operator says so.",
        GPU,
        _closed_gpus,
    ),
    _of_node(
        "gpubroker_node_cpu_utilization_ratio",
        "Share of the machine's CPUs that was busy.",
        lambda sample: sample.cpu,
    ),
    _of_node(
        "gpubroker_node_memory_capacity_bytes",
        "Host memory of the machine.",
        lambda sample: sample.memory_total_mb * MIB_BYTES,
    ),
    _of_node(
        "gpubroker_node_memory_available_bytes",
        "Host memory that can be had without swapping.",
        lambda sample: sample.memory_available_mb * MIB_BYTES,
    ),
    _of_node(
        "gpubroker_node_memory_pressure_ratio",
        "Share of time in which processes waited for memory.",
        lambda sample: sample.memory_pressure,
    ),
    _of_node(
        "gpubroker_node_network_received_bytes",
        "By all interfaces but loopback, since it booted.",
        lambda sample: sample.received_bytes,
        is_counter=True,
    ),
    _of_node(
        "gpubroker_node_network_sent_bytes",
        "By all interfaces but loopback, since it booted.",
        lambda sample: sample.sent_bytes,
        is_counter=True,
    ),
    _of_node(
        "gpubroker_node_object_store_capacity_bytes",
        "Ray's object store on the node.",
        lambda sample: _bytes(sample.store and sample.store.total_mb),
    ),
    _of_node(
        "gpubroker_node_object_store_used_bytes",
        "What objects take of Ray's object store on the node.",
        lambda sample: _bytes(sample.store_used_mb),
    ),
    _of_node(
        "gpubroker_node_object_store_spilled_bytes",
        "What Ray keeps on disk for lack of room there.",
        lambda sample: _bytes(sample.store and sample.store.spilled_mb),
    ),
    MetricRow(
        "gpubroker_node_disk_capacity_bytes",
        "File system of a watched directory.",
        _DISK,
        lambda scrape: _of_disks(scrape, "total_bytes"),
    ),
    MetricRow(
        "gpubroker_node_disk_free_bytes",
        "What may still be written there.",
        _DISK,
        lambda scrape: _of_disks(scrape, "free_bytes"),
    ),
    _of_gpu("gpubroker_gpu_power_watts", "Power that the device draws.", lambda health: health.power_watts),
    _of_gpu(
        "gpubroker_gpu_temperature_celsius",
        "Temperature of the device.",
        lambda health: health.temperature_celsius,
    ),
    _of_gpu(
        "gpubroker_gpu_sm_clock_hertz",
        "Clock of the streaming multiprocessors.",
        lambda health: _hertz(health.sm_clock_mhz),
    ),
    _of_gpu(
        "gpubroker_gpu_memory_clock_hertz",
        "Clock of the device's memory.",
        lambda health: _hertz(health.memory_clock_mhz),
    ),
    _of_gpu(
        "gpubroker_gpu_ecc_errors",
        "Uncorrected memory errors since the driver was loaded.",
        lambda health: health.ecc_errors,
        is_counter=True,
    ),
    _of_gpu(
        "gpubroker_gpu_xid",
        "Number of the last critical error; absent without one.",
        lambda health: health.xid,
    ),
)
