"""Nodes and devices as the broker knows them, and what was last measured on them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName


class GpuKind(NamedTuple):
    name: str
    power: int
    """Its rank: more is stronger. Devices of no kind that is known have 0."""
    context_mb: Mib = Mib(0)
    """What a process takes of such a device beyond what it asked for: its CUDA context."""


SHIPPED_KINDS = (
    GpuKind("H200", 2500),
    GpuKind("H100", 2000),
    GpuKind("A100", 624),
    GpuKind("5090", 419),
    GpuKind("L40", 362),
    GpuKind("4090", 330),
)

_WORDS = re.compile(r"[a-z0-9]+")


@lru_cache(4096)
def is_of_kind(reported: str, name: str) -> bool:
    """Whether the words of a kind's name follow each other in what the driver calls a device, in any case.

    `H100` is in `NVIDIA H100 80GB HBM3`; `L40` is not in `NVIDIA L40S`.
    """
    words, wanted = _WORDS.findall(reported.lower()), _WORDS.findall(name.lower())
    starts = range(len(words) - len(wanted) + 1)
    return any(words[at : at + len(wanted)] == wanted for at in starts)


def kind_of(reported: str, kinds: Iterable[GpuKind]) -> GpuKind | None:
    """The kind whose name says most of a device; of equally long ones, the first by name."""
    found = [kind for kind in kinds if is_of_kind(reported, kind.name)]
    return min(found, key=lambda kind: (-len(kind.name), kind.name), default=None)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. `physical_mb` is the whole; `reserve_mb` is never leased."""

    key: DeviceKey
    node: NodeName
    uuid: str
    kind: str
    index: int
    physical_mb: Mib
    reserve_mb: Mib = Mib(0)
    declared_foreign_mb: Mib = Mib(0)
    """What the operator says that others always use: set aside, and expected to be in use."""
    power: int = 0
    """The rank of its kind: more is stronger; 0 if nobody has ranked it."""
    context_mb: Mib = Mib(0)
    """What a process takes here beyond what it asked for; part of its lease."""
    simulated: bool = False
    parent: str = ""
    """UUID of the GPU of which this is an instance (MIG); empty for a GPU of its own."""
    split: bool = False
    """It has instances: they are leased, and it is not."""
    present: bool = True
    """Its node's agent finds it in the machine. One that is gone offers nothing; what was leased on it stays
    in the book until its holders are confirmed gone."""
    version: int = 1
    allocatable_mb: Mib = field(init=False, compare=False, repr=False)
    """What leases may come to in all; a whole device is so much of it."""
    sort: str = field(init=False, compare=False, repr=False)
    """The same for devices between which no demand can tell a difference but by name. Like `allocatable_mb`
    it follows from the rest, and is worked out once because each placement asks for it."""

    def __post_init__(self) -> None:
        usable_mb = self.physical_mb - self.reserve_mb - self.declared_foreign_mb
        allocatable_mb = Mib(max(0, usable_mb)) if self.offers else Mib(0)
        part = "part" if self.parent else "whole"
        sizes = f"{self.physical_mb}/{allocatable_mb}/{self.context_mb}"
        object.__setattr__(self, "allocatable_mb", allocatable_mb)
        object.__setattr__(self, "sort", f"{self.kind}/{sizes}/{self.power}/{part}")

    @property
    def offers(self) -> bool:
        """Whether anything of it can be had at all."""
        return self.present and not self.split

    @property
    def label(self) -> str:
        """For people: `n1/gpu3`."""
        return f"{self.node}/gpu{self.index}"


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """What was measured on one device at one instant."""

    device: DeviceKey
    at: Instant
    used_mb: Mib
    foreign_mb: Mib | None = Mib(0)
    """What processes of no lease use; None where use cannot be attributed to processes."""
    by_holder: dict[str, Mib] = field(default_factory=dict)
    """`holder:fence` -> MiB of that holder's process group; empty where use cannot be attributed."""
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One machine with an agent of ours. `incarnation` changes with each start of the agent."""

    name: NodeName
    cpu: float
    memory_mb: Mib
    max_runs: int
    """How many runs may be on the node at once, however small."""
    incarnation: str
    boot_id: str
    ready: bool = True
    """The agent has answered this leader's term; otherwise nothing is placed here."""
    cordoned: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    custom: tuple[tuple[str, float], ...] = ()
    """Amounts of the custom resources that each node has for itself, sorted by name."""
    version: int = 1
