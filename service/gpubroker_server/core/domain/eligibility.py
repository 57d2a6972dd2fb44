"""Which devices and nodes a demand may use, how much of one device it comes to, and which it prefers."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from gpubroker_server.core.domain.demand import Demand, Labels
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.gpu_kinds import is_of_kind
from gpubroker_server.core.domain.units import Mib


def need_mb(demand: Demand, device: Device) -> Mib | None:
    """MiB to lease on this device; None if it may not be used, or could not give that much even when empty.

    A stated size comes on top of what a process costs on such a device (`context_mb`). A whole device is all
    that may be leased of it, so that nobody else fits beside, and no stranger beyond what the operator
    declared. A fraction is of the same amount, rounded down. Both hold the process's cost within them.
    """
    if not may_use_device(demand, device):
        return None
    room = device.allocatable_mb
    if demand.takes_whole_devices:
        return room if room >= (demand.gpu_mb or 1) + context_mb(demand, device) else None
    if demand.gpu_mb is not None:
        need = Mib(demand.gpu_mb + device.context_mb)
        return need if room >= need else None
    assert demand.gpu_fraction is not None
    part = Mib(max(1, math.floor(demand.gpu_fraction * room)))
    return part if part <= room else None


def context_mb(demand: Demand, device: Device) -> Mib:
    """What of a lease is the process's own cost: only a stated size has it on top."""
    return Mib(0) if demand.gpu_mb is None else device.context_mb


def may_use_device(demand: Demand, device: Device) -> bool:
    where = demand.where
    if device.parent and demand.gpus > 1:
        return False  # a process sees one instance at most
    return (
        where.min_power <= device.power
        and where.min_device_mb <= device.physical_mb
        and (not where.kinds or any(is_of_kind(device.kind, name) for name in where.kinds))
        and (not where.devices or device.uuid in where.devices)
    )


def may_use_node(demand: Demand, node: Node) -> bool:
    return not demand.where.nodes or not _unmet(demand.where.nodes, node)


def unwanted_device(demand: Demand, device: Device) -> int:
    """How far down the list of preferred kinds this one is; 0 is the best, or that nothing is preferred."""
    preferred = demand.where.prefer_kinds
    for place, name in enumerate(preferred):
        if is_of_kind(device.kind, name):
            return place
    return len(preferred)


def unwanted_node(demand: Demand, node: Node) -> int:
    """How many of the preferred labels it has not."""
    return len(_unmet(demand.where.prefer_nodes, node)) if demand.where.prefer_nodes else 0


def _unmet(wanted: Labels, node: Node) -> list[str]:
    has = {**dict(node.labels), "node": node.name}
    return [label for label, values in wanted if has.get(label) not in values]


class Ceiling(NamedTuple):
    """What the devices of one node offer at most, to tell at a glance who cannot fit there."""

    amounts: tuple[int, ...]
    """MiB of each device, the most first."""
    whole: int
    """How many devices are there whole."""

    def may_fit(self, demand: Demand) -> bool:
        """False: there is no room. True: perhaps there is."""
        if demand.gpus > len(self.amounts):
            return False
        if demand.takes_whole_devices:
            return self.whole >= demand.gpus
        return not demand.gpus or self.amounts[demand.gpus - 1] >= (demand.gpu_mb or 1)


def ceiling(offered: Iterable[tuple[Device, int]]) -> Ceiling:
    """Of (device, MiB that somebody could have there)."""
    found = list(offered)
    amounts = sorted((mb for _, mb in found), reverse=True)
    return Ceiling(tuple(amounts), sum(mb >= device.allocatable_mb for device, mb in found))
