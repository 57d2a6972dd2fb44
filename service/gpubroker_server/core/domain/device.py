"""Nodes and devices, their kinds, their last measurements, and the questions to a node about its disks."""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Annotated, Final, NamedTuple

from gpubroker.wire.devices import GpuHealth as ShownHealth
from gpubroker.wire.policy import GpuKind
from msgspec import Meta, Struct, field

from gpubroker_server.core.domain.environment import EnvironmentState, NodeEnvironment
from gpubroker_server.core.domain.setting_marks import written
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, Seconds

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
    """Return True if the driver's name of a device contains the kind's words in sequence, in any case. `H100`
    is in `NVIDIA H100 80GB HBM3`; `L40` is not in `NVIDIA L40S`."""
    words, wanted = _WORDS.findall(reported.lower()), _WORDS.findall(name.lower())
    starts = range(len(words) - len(wanted) + 1)
    return any(words[start : start + len(wanted)] == wanted for start in starts)


def kind_of(reported: str, kinds: Iterable[GpuKind]) -> GpuKind | None:
    """Return the kind with the longest matching name; of equally long names, the first in alphabetical
    order."""
    matching = [kind for kind in kinds if is_of_kind(reported, kind.name)]
    return min(matching, key=lambda kind: (-len(kind.name), kind.name), default=None)


class Closure(Struct, frozen=True):
    """The reason for which nothing new starts on a device. Runs that are already there go on."""

    cause: str
    """`xid`, `ecc`, `remap`, `recovery` (signs of its driver), `failures` (runs failed there at once) or
    `operator`."""
    detail: str
    """A text that tells this fault from other faults of the same cause: the number of an XID, or the action
    that is asked for."""
    reason: str
    """The reason in words that people read."""
    since: Instant
    by: str = ""
    """The operator's token, if the cause is `operator` or the closure was waived."""
    is_waived: bool = False
    """An operator has reopened the device although the cause is still there: it no longer closes it."""


class Device(Struct, frozen=True, dict=True):
    """One GPU. `physical_mb` is its whole memory in MiB, of which `reserve_mb` is never leased."""

    key: DeviceKey
    node: NodeName
    uuid: str
    kind: str
    index: int
    physical_mb: Mib
    reserve_mb: Mib = Mib(0)
    declared_foreign_mb: Mib = Mib(0)
    """The MiB that the operator sets aside for other programs. They are expected to be in use."""
    power: int = 0
    """The power of the device's kind: a higher number is a stronger GPU; 0 if the kind states none."""
    context_mb: Mib = Mib(0)
    simulated: bool = False
    parent: str = ""
    """The UUID of the GPU of which this device is a MIG instance; empty for a whole GPU."""
    split: bool = False
    """True if the GPU has MIG instances: these are leased, and the GPU itself is not."""
    present: bool = True
    """True if the node's agent finds the device. A removed device takes nothing new; its leases stay until
    their holders are confirmed gone."""
    version: int = 1
    closure: Closure | None = None

    @cached_property
    def allocatable_mb(self) -> Mib:
        """The most MiB that all leases of the device may add up to. A lease of the whole device has this
        size."""
        usable_mb = self.physical_mb - self.reserve_mb - self.declared_foreign_mb
        return Mib(max(0, usable_mb)) if self.offers else Mib(0)

    @cached_property
    def sort(self) -> str:
        """A text that is equal for devices which a demand can tell apart only by their names. It is cached
        because each placement reads it."""
        part = "part" if self.parent else "whole"
        sizes = f"{self.physical_mb}/{self.allocatable_mb}/{self.context_mb}"
        return f"{self.kind}/{sizes}/{self.power}/{part}"

    @property
    def offers(self) -> bool:
        return self.present and not self.split

    @property
    def is_closed(self) -> bool:
        """True if nothing new starts on the device."""
        return self.closure is not None and not self.closure.is_waived

    @property
    def label(self) -> str:
        return f"{self.node}/gpu{self.index}"


class DeviceSample(Struct, frozen=True):
    device: DeviceKey
    at: Instant
    used_mb: Mib
    foreign_mb: Mib | None = Mib(0)
    """The memory used by processes without a lease; None where use cannot be attributed to processes."""
    by_holder: dict[str, Mib] = field(default_factory=dict)
    """`holder:fence` -> MiB of that holder's process group; empty where use cannot be attributed."""
    utilization: float | None = None


class Node(Struct, frozen=True):
    """A machine with a node agent. `incarnation` changes with each start of the agent."""

    name: NodeName
    cpu: float
    memory_mb: Mib
    max_runs: int
    incarnation: str
    boot_id: str
    ready: bool = True
    """True if the agent has answered this leader's term. Until then nothing is placed on the node."""
    cordoned: bool = False
    """True if an operator has decided that nothing new starts on the node."""
    cordon_reason: str = ""
    cordoned_by: str = ""
    """The name of the operator's token."""
    cordoned_at: Instant | None = None
    draining_since: Instant | None = None
    """The time since which the runs on this node are asked to leave; None if they are not. A draining node is
    also cordoned."""
    drain_deadline_at: Instant | None = None
    """The time at which the drain ends every run that is left, whatever its priority; None: never."""
    labels: tuple[tuple[str, str], ...] = ()
    custom: tuple[tuple[str, float], ...] = ()
    """(name, amount) of the custom resources of which each node has an amount of its own, sorted by name."""
    version: int = 1
    environments: tuple[NodeEnvironment, ...] = ()
    """The environments that the node has, prepares or could not prepare, sorted by key."""

    def environment(self, key: str) -> NodeEnvironment | None:
        return next((known for known in self.environments if known.key == key), None)

    @property
    def ready_environments(self) -> tuple[str, ...]:
        """The keys of the environments in which a run can start."""
        ready = EnvironmentState.READY
        return tuple([known.key for known in self.environments if known.state is ready])

    def has_ready(self, key: str) -> bool:
        """Return True if a run can start in the environment."""
        known = self.environment(key)
        return known is not None and known.state is EnvironmentState.READY


class DiskSample(NamedTuple):
    """The measured file system of one watched directory."""

    path: str
    total_bytes: int
    """The size of the file system without the part that is reserved for root or by a quota."""
    free_bytes: int
    """The bytes that a process without privileges may still write."""

    @property
    def used_share(self) -> float:
        return 1.0 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class StoreSample(NamedTuple):
    """Ray's object store on a node, as the node's agent reports it. Its use is known to Ray's head, and is in
    `NodeSample.store_used_mb`."""

    total_mb: int
    spilled_mb: int | None
    """The MiB that were written to disk below Ray's session for lack of room and are not deleted yet; None if
    the file system does not answer."""


class UnreachedNode(NamedTuple):
    """Another node of the cluster to which the reporting node cannot connect."""

    node: NodeName
    address: str
    fault: str


class GpuHealth(ShownHealth, frozen=True, array_like=True):
    """A reading of a GPU's health. Agents report it, and leaders publish it, as an array."""


class NodeSample(Struct, frozen=True):
    """The measurements of a node's machine, as its agent reports them. The report is kept in memory; it is no
    event."""

    node: NodeName
    at: Instant
    cpu: float
    """The share, 0 to 1, of the node's CPU time that was busy since the previous sample."""
    memory_total_mb: Mib
    memory_available_mb: Mib
    memory_pressure: float | None = None
    """The share of the last 10 s in which processes waited for memory (PSI); None if the kernel has none."""
    disks: tuple[DiskSample, ...] = ()
    received_bytes: int = 0
    """Bytes received by all interfaces but loopback since the machine booted. `sent_bytes` counts
    likewise."""
    sent_bytes: int = 0
    store: StoreSample | None = None
    """The sample of Ray's object store; None if Ray does not tell."""
    gpus: Mapping[str, GpuHealth] = field(default_factory=dict)
    """UUID -> health of the GPU. Simulated GPUs and GPUs that do not answer now are left out."""
    network: float | None = None
    """The share of its speed that the busiest network interface used since the previous sample, in the busier
    direction; None if the kernel tells no speed."""
    unreached: tuple[UnreachedNode, ...] = ()
    """The nodes that this node has lately tried to reach, and could not."""
    store_used_mb: int | None = None
    """The MiB of Ray's object store that are in use; None if Ray's head has not told."""

    def is_stale(self, now: Instant, period_seconds: float) -> bool:
        """Return True if the sample is older than three periods. The samples of devices have the same
        limit."""
        return now - self.at > 3 * period_seconds

    @property
    def disk_share(self) -> float | None:
        """The used share of the fullest disk; None if no disk is watched."""
        return max((disk.used_share for disk in self.disks), default=None)


class FileClass(StrEnum):
    """Classes of files, in the order in which they are deleted. Their names are published."""

    LOG = "log"
    EMPTY_DATABASE = "empty_database"
    """A SQLite database without a row."""
    CHECKPOINT = "checkpoint"
    REDUNDANT = "redundant"
    """A file of which the operator's sync command has confirmed a copy elsewhere."""


FILE_CLASSES: Final = {
    "logs": FileClass.LOG,
    "databases": FileClass.EMPTY_DATABASE,
    "checkpoints": FileClass.CHECKPOINT,
    "redundant": FileClass.REDUNDANT,
}
"""The name of each class in the settings."""


class WatchedRoot(Struct, frozen=True):
    """A directory on nodes below which the disk guard may delete files of one class."""

    path: str
    file_class: Annotated[FileClass, written("class", FILE_CLASSES)]
    sync_command: tuple[str, ...] = ()
    """The program, with its arguments, that copies the files. A file is deleted only if the program says that
    there is a copy. Roots of redundant files need a sync command."""
    sync_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    """The time after which the sync command is stopped."""


class FoundFile(NamedTuple):
    """A file that may be deleted, with the facts by which it is recognized again."""

    root: str
    path: str
    """The path below `root`."""
    file_class: FileClass
    size_bytes: int
    modified_ns: int
    inode: int

    @property
    def whole_path(self) -> str:
        return f"{self.root}/{self.path}"


class DiskQuestion(Struct, frozen=True):
    """Look for files that may be deleted, or delete the files that an earlier look has found."""

    request: str
    """The id of the request that the DiskReport answers."""
    roots: tuple[WatchedRoot, ...]
    spared: tuple[str, ...]
    warn: float
    """The used share of a disk down to which the disk is cleaned."""
    old_seconds: Seconds
    deletes: tuple[FoundFile, ...] | None = None
    """The files to delete; None to look for them."""
    runs_sync: bool = False
    """True to run the sync commands. Otherwise nothing is found in a root that has one."""
    live: tuple[str, ...] = ()
    """The whole paths of the checkpoints from which tasks would go on. Dispatch adds them."""
    above: float = 0.0
    """The used share below which a disk is left as it is."""


class DiskOrder(DiskQuestion, frozen=True, kw_only=True):
    """A DiskQuestion to the agent of one node."""

    node: NodeName


class DiskReport(Struct, frozen=True):
    """The answer to a DiskOrder. The leader that asked keeps it; it is no event."""

    node: NodeName
    at: Instant
    request: str
    files: tuple[FoundFile, ...] = ()
    """The files that may be deleted, in the order of deletion; or the files that were deleted."""
    kept: tuple[tuple[str, int], ...] = ()
    """(reason, number of files) of the files that stay."""
    is_first: bool = False
    """True if a root was looked at for the first time with these rules, so that this may only be a dry
    run."""
    message: str = ""
    """The error that occurred; empty if there was none."""
