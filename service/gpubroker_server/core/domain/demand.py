"""Demands of tasks, and the devices and nodes that satisfy them."""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import fields, replace

from gpubroker_server.core.domain.device import Device, Node, is_of_kind
from gpubroker_server.core.domain.units import Mib

Labels = tuple[tuple[str, tuple[str, ...]], ...]
"""(label, values), sorted: a node needs one of the values of each. The label `node` is the node's name."""


class PlacementConstraints(Struct, frozen=True, omit_defaults=True):
    """Constraints on devices and nodes, all of which must hold, and preferences."""

    kinds: tuple[str, ...] = ()
    """Kinds of GPUs, named as operators and drivers do. The task may use any of them."""
    min_power: int = 0
    min_device_mb: Mib = Mib(0)
    nodes: Labels = ()
    devices: tuple[str, ...] = ()
    """UUIDs of GPUs, sorted. The task may use any of them."""
    prefer_kinds: tuple[str, ...] = ()
    """Preferred kinds, best first. A preference orders placements and forbids none."""
    prefer_nodes: Labels = ()
    environment: str = ""
    """The key of the environment that a node must have ready before the task starts there; empty for that of
    the service."""


NO_CONSTRAINTS = PlacementConstraints()


class Demand(Struct, frozen=True, cache_hash=True, omit_defaults=True):
    """The resources that a task asks for. GPU sizes are per device; `cpu` and `memory_mb` are of the one node
    that the task runs on. With neither `gpu_mb` nor `gpu_fraction`, `gpus` are whole devices. `custom` is
    sorted by name, so that equal demands compare and hash equal."""

    gpus: int = 0
    gpu_mb: Mib | None = None
    gpu_fraction: float | None = None
    exclusive: bool = False
    cpu: float = 0.0
    memory_mb: Mib = Mib(0)
    custom: tuple[tuple[str, float], ...] = ()
    placement: str = "pack"
    where: PlacementConstraints = NO_CONSTRAINTS
    pool: str = ""
    slots: tuple[tuple[str, float], ...] = ()
    """(name, amount) of the limits, shared by many tasks, that the demand counts against, sorted by name. A
    bundle has only the amounts of its pool."""
    bundles: tuple["Demand", ...] = ()
    """The demand of each rank of a gang. The gang's own demand has only `pool`, and the `custom` and `slots`
    of the ranks that it needs at least."""
    strategy: str = "pack"
    """The way to spread ranks over nodes: `pack` on few nodes, `spread` on many, `strict_pack` on one,
    `strict_spread` with each rank on a node of its own."""
    min_ranks: int | None = None
    """The number of ranks with which a gang may run, counted from rank 0; None if it needs all."""
    answered_by: str = ""
    """The model that is to answer an inference; empty for other tasks. An inference needs no node or device
    of its own: its model holds the memory."""

    @property
    def least_ranks(self) -> int:
        return len(self.bundles) if self.min_ranks is None else self.min_ranks

    @property
    def counted(self) -> tuple[tuple[str, float], ...]:
        """(name, amount) of the custom resources and shared limits that the task counts against. The cluster,
        or each node, has a limited amount of each."""
        return self.custom + self.slots

    @property
    def amounts(self) -> tuple[tuple[str, float], ...]:
        """(name, amount) of what a run gives back to other tasks: custom resources, and amounts that the
        tasks of a pool share. A place under a limit of running tasks is not an amount."""
        return self.custom + tuple(slot for slot in self.slots if slot[0].startswith("pool:"))

    @property
    def takes_whole_devices(self) -> bool:
        return self.gpus > 0 and (self.exclusive or (self.gpu_mb is None and self.gpu_fraction is None))

    @property
    def states_no_size(self) -> bool:
        """True if the demand takes whole devices although it did not ask to be alone on them."""
        return self.takes_whole_devices and not self.exclusive


@lru_cache(4096)
def interned(demand: Demand) -> Demand:
    """Return one object for all equal demands: many tasks share few demands, and identical objects compare
    fast.

    A field that equals its default is that default itself. An encoder that leaves out defaults knows them by
    identity, so a computed `cpu=0.0` would be written with every task.
    """
    defaults = {name: default for name, default in _DEFAULTS.items() if getattr(demand, name) == default}
    return replace(demand, **defaults)


_DEFAULTS = {field.name: field.default for field in fields(Demand)}


def need_mb(demand: Demand, device: Device) -> Mib | None:
    """Return the MiB to lease on this device; None if the demand may not use the device, or if the device is
    too small even when empty. A stated size gets the device's `context_mb` on top. A whole device, or a
    fraction of its allocatable memory (rounded down), includes the context."""
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
    """Return the MiB that are added to the demand for the CUDA context of its process. Only a stated size
    gets them."""
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


def in_environment(demand: Demand, key: str) -> Demand:
    """Return the demand of a task, or of a gang with all its ranks, that waits for this environment."""
    bundles = tuple(in_environment(rank, key) for rank in demand.bundles)
    return replace(demand, where=replace(demand.where, environment=key), bundles=bundles)


def environment_of(demand: Demand) -> str:
    """Return the key of the environment of a task or of the ranks of a gang; empty for that of the
    service."""
    return (demand.bundles[0] if demand.bundles else demand).where.environment


def has_environment(demand: Demand, node: Node) -> bool:
    """Return True if the node has the environment of the task ready."""
    key = demand.where.environment
    return not key or node.has_ready(key)


def device_preference_rank(demand: Demand, device: Device) -> int:
    """Return the index of the device's kind in the preferred kinds. The best is 0, which is also the answer
    without a preference."""
    preferred = demand.where.prefer_kinds
    for place, name in enumerate(preferred):
        if is_of_kind(device.kind, name):
            return place
    return len(preferred)


def node_preference_rank(demand: Demand, node: Node) -> int:
    return len(_unmet(demand.where.prefer_nodes, node)) if demand.where.prefer_nodes else 0


def _unmet(labels: Labels, node: Node) -> list[str]:
    node_labels = {**dict(node.labels), "node": node.name}
    return [label for label, values in labels if node_labels.get(label) not in values]


class NodeUpperBound(NamedTuple):
    """An upper bound of the GPU memory that one node offers, for a quick test."""

    amounts: tuple[int, ...]
    whole: int
    """The number of devices that are entirely free."""

    def may_fit(self, demand: Demand) -> bool:
        """Return False if the demand certainly does not fit, True if it may fit."""
        if demand.gpus > len(self.amounts):
            return False
        if demand.takes_whole_devices:
            return self.whole >= demand.gpus
        return not demand.gpus or self.amounts[demand.gpus - 1] >= (demand.gpu_mb or 1)


def ceiling(offered: Iterable[tuple[Device, int]]) -> NodeUpperBound:
    """Return the upper bound of a node. `offered` has pairs of a device and the MiB that could be leased on
    it."""
    offers = list(offered)
    amounts = sorted([mb for _, mb in offers], reverse=True)
    whole = [mb for device, mb in offers if mb >= device.allocatable_mb]
    return NodeUpperBound(tuple(amounts), len(whole))
