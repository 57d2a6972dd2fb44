"""The door of a node agent to the devices of its machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpubroker_server.core.domain.orders import SeenDevice
from gpubroker_server.core.domain.units import Mib


class DeviceProbe(Protocol):
    """What is in this machine and how much of it is used. Used by the node agent."""

    def inventory(self) -> Sequence[SeenDevice]: ...

    def sample(self, holders: Mapping[str, "ProcessGroup"]) -> Sequence["MeasuredDevice"]:
        """One entry per device. `holders` maps the key of a run (`mark_of`) to its processes and leases."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    pids: frozenset[int]
    leased_mb: Mapping[str, Mib]
    """Device UUID -> MiB."""


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """A DeviceSample before the cluster's name for the device is known: by UUID. `foreign_mb` is None, and
    `by_holder` empty, where use cannot be attributed to processes."""

    uuid: str
    used_mb: Mib
    foreign_mb: Mib | None
    by_holder: Mapping[str, Mib]
    utilization: float | None
