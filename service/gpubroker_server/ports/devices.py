"""Port of a node agent to the devices of its machine."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from gpubroker_server.core.domain.device import GpuHealth
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Mib


class DeviceLost(Exception):
    """Raised if the driver has lost the GPU, so that no process can use it any more. The text is the driver's
    message."""


class NoDevices(Exception):
    """Raised if the machine shows no GPU now. The text tells the operator why."""

    def __init__(self, why: str, *, is_proven: bool) -> None:
        """`is_proven` is True if the driver itself says that the machine has no GPU, so that none is in
        use."""
        super().__init__(why)
        self.is_proven = is_proven


class DevicesFound(Exception):
    """Raised if the driver was asked again and has found devices. `probes` replace the probes that were used
    before."""

    def __init__(self, probes: "Sequence[DeviceProbe]") -> None:
        self.probes = probes


class DeviceProbe(Protocol):
    """Devices that are measured together: a GPU with its instances, or all simulated ones."""

    name: str
    """The name that people read while no UUID is known."""

    def read(self, holders: Mapping[str, "ProcessGroup"]) -> Sequence["DeviceReading"]:
        """Measure the devices, and return one entry per device. `holders` maps the key of a run (`mark_of`)
        to its processes. Only one call is made at a time, and a call may hang.

        Raises DeviceLost, NoDevices, DevicesFound, and whatever the driver raises if it cannot list the
        devices.
        """


class ProcessGroup(Struct, frozen=True):
    pids: frozenset[int]
    leased_mb: Mapping[str, Mib]
    """Device UUID -> MiB."""


class MeasuredDevice(Struct, frozen=True):
    """The values of a DeviceSample, for the device with this UUID. If use cannot be attributed to processes,
    `foreign_mb` is None and `by_holder` empty."""

    uuid: str
    used_mb: Mib
    foreign_mb: Mib | None
    by_holder: Mapping[str, Mib]
    utilization: float | None
    health: GpuHealth | None = None
    """The health of the GPU; None for simulated devices and for instances."""


class DeviceReading(Struct, frozen=True):
    device: ReportedDevice
    measured: MeasuredDevice | None
    """The measured values; None if the device cannot be measured."""
    fault: str = ""
    """The reason why the device cannot be measured."""
