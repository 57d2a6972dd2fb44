"""Metrics of fleet control, as the leader last published its results, and metrics for autoscalers."""

from collections.abc import Callable
from typing import Final

from gpubroker_server.core.control.findings.gpus import held_idle_seconds
from gpubroker_server.core.control.fleet import FleetSeen, TargetSeen, disk_levels
from gpubroker_server.core.control.node_watch import Overload
from gpubroker_server.telemetry.exposition import LabelNames, Samples
from gpubroker_server.telemetry.table import GPU, MAX_TENANTS, MetricRow, Scrape

_TARGET = ("scope", "measure")


def _seen(
    name: str,
    about: str,
    labels: LabelNames,
    read: Callable[[FleetSeen, Scrape], Samples],
    *,
    is_counter: bool = False,
) -> MetricRow:
    """Return a metric of the fleet. It is left out before a leader has examined the fleet."""

    def samples(scrape: Scrape) -> Samples | None:
        return None if scrape.fleet is None else read(scrape.fleet, scrape)

    return MetricRow(name, about, labels, samples, is_counter)


def _of_target(name: str, about: str, read: Callable[[TargetSeen, Scrape], float | None]) -> MetricRow:
    def samples(seen: FleetSeen, scrape: Scrape) -> Samples:
        values = (((target.scope, target.measure), read(target, scrape)) for target in seen.targets)
        return [(labels, value) for labels, value in values if value is not None]

    return _seen(name, about, _TARGET, samples)


def _out_seconds(target: TargetSeen, scrape: Scrape) -> float:
    return 0.0 if target.is_in else max(0.0, scrape.now - target.since)


def _background_shares(seen: FleetSeen, _scrape: Scrape) -> Samples:
    return [((target.scope,), target.share) for target in seen.targets if target.share is not None]


def _pressures(seen: FleetSeen) -> list[str]:
    """Return the measures that are shown. Of those of single tenants, these are at most MAX_TENANTS."""
    known = sorted({pressure.name for pressure in seen.pressures} | seen.pressure_values.keys())
    of_tenants = [name for name in known if ":" in name]
    return [name for name in known if ":" not in name] + of_tenants[:MAX_TENANTS]


def _active_pressures(seen: FleetSeen, _scrape: Scrape) -> Samples:
    active = {pressure.name for pressure in seen.pressures}
    return [((name,), name in active) for name in _pressures(seen)]


def _pressure_values(seen: FleetSeen, _scrape: Scrape) -> Samples:
    values = seen.pressure_values
    return [((name,), values[name]) for name in _pressures(seen) if name in values]


def _idle_seconds(seen: FleetSeen, scrape: Scrape) -> dict[str, float]:
    """Return the idle seconds by device and by node."""
    return {idle.name: max(0.0, scrape.now - idle.since) for idle in seen.idle}


def _idle_gpus(seen: FleetSeen, scrape: Scrape) -> Samples:
    idle = _idle_seconds(seen, scrape)
    return [(labels, idle.get(key, 0.0)) for labels, key in scrape.offered]


def _held_idle_gpus(seen: FleetSeen, scrape: Scrape) -> Samples:
    held = held_idle_seconds(scrape.world, seen, scrape.now)
    return [(labels, held.get(key, 0.0)) for labels, key in scrape.offered]


def _idle_nodes(seen: FleetSeen, scrape: Scrape) -> Samples:
    idle = _idle_seconds(seen, scrape)
    return [((name,), idle.get(name, 0.0)) for name in sorted(scrape.world.nodes)]


def _overloads(seen: FleetSeen, scrape: Scrape) -> Samples:
    overloaded, nodes = set(seen.overloaded), sorted(scrape.world.node_samples)
    watched = [Overload(node, measure) for node in nodes for measure in ("cpu", "host_memory")]
    return [(watched_item, watched_item in overloaded) for watched_item in watched]


def _disk_levels(seen: FleetSeen, scrape: Scrape) -> Samples:
    levels = disk_levels(seen, scrape.world.node_samples.values())
    return [(disk, float(level)) for disk, level in sorted(levels.items())]


LOOKED: Final = (
    _of_target("gpubroker_target_ratio", "What is measured of a target.", lambda target, _: target.value),
    _of_target("gpubroker_target_min_ratio", "The least that it shall be.", lambda target, _: target.least),
    _of_target("gpubroker_target_max_ratio", "The most that it shall be.", lambda target, _: target.most),
    _of_target(
        "gpubroker_target_out_seconds",
        "How long it has been outside; 0 while it is inside.",
        _out_seconds,
    ),
    _seen(
        "gpubroker_background_share_ratio",
        "Share of GPU memory that background work may take.",
        ("scope",),
        _background_shares,
    ),
    _seen(
        "gpubroker_backpressure_active",
        "1 if new work is refused for it, else 0.",
        ("measure",),
        _active_pressures,
    ),
    _seen(
        "gpubroker_backpressure_value",
        "What is measured of it, in its own unit.",
        ("measure",),
        _pressure_values,
    ),
    _seen(
        "gpubroker_gpu_idle_seconds",
        "How long the device has been idle; 0 if it is not.",
        GPU,
        _idle_gpus,
    ),
    _seen(
        "gpubroker_gpu_held_idle_seconds",
        "How long a holder has kept it idle; 0 if none has.",
        GPU,
        _held_idle_gpus,
    ),
    _seen(
        "gpubroker_node_idle_seconds",
        "How long the node's CPUs have been idle; 0 if not.",
        ("hostname",),
        _idle_nodes,
    ),
    _seen(
        "gpubroker_node_overloaded",
        "1 if the node has too much to do, else 0.",
        ("hostname", "measure"),
        _overloads,
    ),
    _seen(
        "gpubroker_node_disk_level",
        "State of a disk: 0, or 1 from `warn`, 2 from `clean`, 3 from `block` on if that closes the node.",
        ("hostname", "path"),
        _disk_levels,
    ),
    _seen(
        "gpubroker_items",
        "What each component got done in this leader's term.",
        ("component",),
        lambda seen, _: [((name,), count) for name, count in seen.done.items()],
        is_counter=True,
    ),
    _seen(
        "gpubroker_fleet_events",
        "Events about its health, in this leader's term.",
        ("kind",),
        lambda seen, _: [((kind,), count) for kind, count in seen.events.items()],
        is_counter=True,
    ),
)
"""The metrics whose values are known once a leader has examined the fleet."""

FOR_AUTOSCALERS: Final = (
    MetricRow(
        "gpubroker_unmet_gpus",
        "GPUs that waiting tasks lack.",
        ("pool",),
        lambda scrape: [((pool,), gpus) for pool, gpus in scrape.autoscaling.unmet_gpus().items()],
    ),
    MetricRow(
        "gpubroker_needed_gpus",
        "GPUs that are held, and those that waiting tasks lack.",
        (),
        lambda scrape: [((), float(scrape.autoscaling.used.gpus + scrape.autoscaling.lacking.gpus))],
    ),
    MetricRow(
        "gpubroker_spare_gpus",
        "GPUs of nodes of which nothing is held or waited for.",
        (),
        lambda scrape: [((), float(sum(node.gpus for node in scrape.autoscaling.spare)))],
    ),
)
