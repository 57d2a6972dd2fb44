"""Metrics of what fleet control finds, as the leader published it last, and for autoscalers."""

from collections.abc import Iterator, Mapping

from gpubroker_server.core.control.disk_guard import DiskLevel
from gpubroker_server.core.control.findings.gpus import unused_holdings
from gpubroker_server.core.control.fleet import FleetSeen, TargetSeen
from gpubroker_server.core.control.node_watch import Overload
from gpubroker_server.core.domain.units import DeviceKey, Instant
from gpubroker_server.core.explain.autoscaling import AutoscalingDemand
from gpubroker_server.core.world.world import World
from gpubroker_server.telemetry.nodes import GPU, Read

_TARGET = ("scope", "measure")
MOST_TENANTS = 100
"""With backpressure of their own."""

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpubroker_target_ratio": ("What is measured of a target.", _TARGET),
    "gpubroker_target_min_ratio": ("The least that it shall be.", _TARGET),
    "gpubroker_target_max_ratio": ("The most that it shall be.", _TARGET),
    "gpubroker_target_out_seconds": ("How long it has been outside; 0 while it is inside.", _TARGET),
    "gpubroker_background_share_ratio": ("Share of GPU memory that background work may take.", ("scope",)),
    "gpubroker_backpressure_active": ("1 if new work is refused for it, else 0.", ("measure",)),
    "gpubroker_backpressure_value": ("What is measured of it, in its own unit.", ("measure",)),
    "gpubroker_gpu_idle_seconds": ("How long the device has been idle; 0 if it is not.", GPU),
    "gpubroker_gpu_held_idle_seconds": ("How long a holder has kept it idle; 0 if none has.", GPU),
    "gpubroker_node_idle_seconds": ("How long the node's CPUs have been idle; 0 if not.", ("hostname",)),
    "gpubroker_node_overloaded": ("1 if the node has too much to do, else 0.", ("hostname", "measure")),
    "gpubroker_node_disk_level": (
        "Of a watched disk: 0, or 1 from `warn`, 2 from `clean`, 3 from `block` on if that closes the node.",
        ("hostname", "path"),
    ),
    "gpubroker_unmet_gpus": ("GPUs that waiting tasks lack.", ("pool",)),
    "gpubroker_needed_gpus": ("GPUs that are held, and those that waiting tasks lack.", ()),
    "gpubroker_spare_gpus": ("GPUs of nodes of which nothing is held or waited for.", ()),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpubroker_items": ("What each component got done in this leader's term.", ("component",)),
    "gpubroker_fleet_events": ("Events about its health, in this leader's term.", ("kind",)),
}


def fleet_samples(world: World, seen: FleetSeen | None, now: Instant) -> Iterator[Read]:
    """Nothing before a leader has looked."""
    if seen is None:
        return
    yield from _targets(seen, now)
    yield from _backpressure(seen)
    yield from _idle(world, seen, now)
    yield from _nodes(world, seen)
    yield "gpubroker_items", [((name,), count) for name, count in seen.done.items()]
    yield "gpubroker_fleet_events", [((kind,), count) for kind, count in seen.events.items()]


def _targets(seen: FleetSeen, now: Instant) -> Iterator[Read]:
    targets: list[tuple[tuple[str, ...], TargetSeen]] = [((it.scope, it.measure), it) for it in seen.targets]
    yield "gpubroker_target_ratio", [(at, it.value) for at, it in targets if it.value is not None]
    yield "gpubroker_target_min_ratio", [(at, it.least) for at, it in targets]
    yield "gpubroker_target_max_ratio", [(at, it.most) for at, it in targets]
    out = [(at, 0.0 if it.is_in else max(0.0, now - it.since)) for at, it in targets]
    yield "gpubroker_target_out_seconds", out
    shares = [(at[:1], it.share) for at, it in targets if it.share is not None]
    yield "gpubroker_background_share_ratio", shares


def _backpressure(seen: FleetSeen) -> Iterator[Read]:
    active = {it.name for it in seen.pressures}
    values = seen.pressure_values
    known = sorted(active | values.keys())
    of_tenants = [name for name in known if ":" in name]
    shown = [name for name in known if ":" not in name] + of_tenants[:MOST_TENANTS]
    yield "gpubroker_backpressure_active", [((name,), name in active) for name in shown]
    yield "gpubroker_backpressure_value", [((name,), values[name]) for name in shown if name in values]


def _idle(world: World, seen: FleetSeen, now: Instant) -> Iterator[Read]:
    idle = {it.name: max(0.0, now - it.since) for it in seen.idle}
    held: dict[DeviceKey, float] = {}
    for one in unused_holdings(world, seen, now):
        key = one.ledger.device.key
        held[key] = max(held.get(key, 0.0), now - one.since)
    devices = [ledger.device for _, ledger in sorted(world.ledgers.items()) if ledger.device.offers]
    labels = {it.key: (str(it.index), it.uuid, it.node) for it in devices}
    yield "gpubroker_gpu_idle_seconds", [(at, idle.get(key, 0.0)) for key, at in labels.items()]
    yield "gpubroker_gpu_held_idle_seconds", [(at, held.get(key, 0.0)) for key, at in labels.items()]
    yield "gpubroker_node_idle_seconds", [((name,), idle.get(name, 0.0)) for name in sorted(world.nodes)]


def _nodes(world: World, seen: FleetSeen) -> Iterator[Read]:
    overloaded = set(seen.overloaded)
    watched = [Overload(node, it) for node in sorted(world.node_samples) for it in ("cpu", "host_memory")]
    yield "gpubroker_node_overloaded", [(it, it in overloaded) for it in watched]
    # A disk that does not answer now keeps its level.
    levels = {(it.node, disk.path): 0.0 for it in world.node_samples.values() for disk in it.disks}
    for it in seen.low_disks:
        most = DiskLevel.BLOCK if it.node in seen.full_disks else DiskLevel.CLEAN
        levels[it.node, it.path] = float(min(it.level, most))
    yield "gpubroker_node_disk_level", sorted(levels.items())


def autoscaling_samples(demand: AutoscalingDemand) -> Iterator[Read]:
    unmet = dict.fromkeys((group.pool for group in demand.unmet), 0) or {"": 0}
    for group in demand.unmet:
        unmet[group.pool] += group.amounts.gpus
    yield "gpubroker_unmet_gpus", [((pool,), float(gpus)) for pool, gpus in unmet.items()]
    yield "gpubroker_needed_gpus", [((), float(demand.used.gpus + demand.lacking.gpus))]
    yield "gpubroker_spare_gpus", [((), float(sum(node.amounts.gpus for node in demand.spare)))]
