"""What was last measured of a machine, apart from its devices."""

from dataclasses import dataclass
from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant, Mib, NodeName


class DiskSample(NamedTuple):
    """The file system of one watched directory."""

    path: str
    total_bytes: int
    free_bytes: int
    """What a process without privileges may still write."""

    @property
    def used_share(self) -> float:
        return 1.0 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class StoreSample(NamedTuple):
    """Ray's object store on a node."""

    total_mb: Mib
    used_mb: Mib
    spilled_mb: Mib
    """Written to disk for lack of room since the node began, and not deleted yet."""


@dataclass(frozen=True, slots=True)
class NodeSample:
    node: NodeName
    at: Instant
    cpu: float
    """The share of all its CPUs that was busy since the sample before: 0 to 1."""
    memory_total_mb: Mib
    memory_available_mb: Mib
    memory_pressure: float | None = None
    """The share of the last 10 s in which processes waited for memory (PSI); None if the kernel has none."""
    disks: tuple[DiskSample, ...] = ()
    received_bytes: int = 0
    """By all interfaces but loopback, since the machine booted; so `sent_bytes`."""
    sent_bytes: int = 0
    store: StoreSample | None = None
    """None where Ray does not say."""

    @property
    def memory_share(self) -> float:
        """In use: 0 to 1."""
        return 1.0 - self.memory_available_mb / self.memory_total_mb if self.memory_total_mb else 0.0

    @property
    def disk_share(self) -> float | None:
        """Of its fullest disk; None if none is watched."""
        return max((disk.used_share for disk in self.disks), default=None)
