"""Port of a node agent to the devices of its machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Mib


class DeviceProbe(Protocol):
    """The devices of this machine and their use."""

    def inventory(self) -> Sequence[ReportedDevice]: ...

    def sample(self, holders: Mapping[str, "ProcessGroup"]) -> Sequence["MeasuredDevice"]:
        """One entry per device. `holders`: by the key of a run (`mark_of`)."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    pids: frozenset[int]
    leased_mb: Mapping[str, Mib]
    """Device UUID -> MiB."""


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """A DeviceSample by UUID. If use cannot be attributed to processes, `foreign_mb` is None and `by_holder`
    empty."""

    uuid: str
    used_mb: Mib
    foreign_mb: Mib | None
    by_holder: Mapping[str, Mib]
    utilization: float | None
