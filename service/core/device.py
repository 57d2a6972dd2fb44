"""Nodes and devices as the broker knows them, and what was last measured on them."""

from dataclasses import dataclass, field

from service.core.units import DeviceKey, Instant, Mib, NodeName


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
    """Foreign memory stated by the operator, where processes cannot be attributed."""
    simulated: bool = False
    version: int = 1

    @property
    def allocatable_mb(self) -> Mib:
        return Mib(self.physical_mb - self.reserve_mb)

    @property
    def label(self) -> str:
        """For people: `n1/gpu3`."""
        return f"{self.node}/gpu{self.index}"


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """What was measured on one device at one instant.

    `by_holder` maps `holder:fence` to the MiB of that holder's process group; `foreign_mb` is what
    processes of no lease use.
    """

    device: DeviceKey
    at: Instant
    used_mb: Mib
    foreign_mb: Mib = Mib(0)
    by_holder: dict[str, Mib] = field(default_factory=dict)
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
    version: int = 1
