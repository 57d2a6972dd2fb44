"""Devices that exist only in the configuration, for trials and tests."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.devices import DeviceReading, MeasuredDevice, ProcessGroup

_VARIABLE = b"SIMULATED_GPU_MB"
"""An environment variable of a process with the MiB that the process uses of each of its devices."""


class SimulatedProbe:
    """A DeviceProbe. A run uses its lease while a process of it lives. If the environment of a process
    names another amount, the run uses that until its last process ends."""

    name = "simulated devices"

    def __init__(self, devices: Sequence[ReportedDevice]) -> None:
        self._devices = tuple(devices)
        self._declared_mb: dict[str, Mib] = {}

    def read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:
        self._declared_mb = {
            holder: declared_mb
            for holder, group in holders.items()
            if group.pids and (declared_mb := _declared_mb(group.pids) or self._declared_mb.get(holder))
        }
        return [DeviceReading(device, self._measured(device.uuid, holders)) for device in self._devices]

    def _measured(self, uuid: str, holders: Mapping[str, ProcessGroup]) -> MeasuredDevice:
        by_holder = {
            holder: self._declared_mb.get(holder, group.leased_mb[uuid])
            for holder, group in holders.items()
            if group.pids and uuid in group.leased_mb
        }
        return MeasuredDevice(
            uuid=uuid,
            used_mb=Mib(sum(by_holder.values())),
            foreign_mb=Mib(0),
            by_holder=by_holder,
            utilization=1.0 if by_holder else 0.0,
        )


def _declared_mb(pids: Iterable[int]) -> Mib:
    """Return the largest amount in MiB that one of these processes declares; 0 if none does."""
    return max(map(_declared_by, pids), default=Mib(0))


def _declared_by(pid: int) -> Mib:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return Mib(0)  # the process has ended
    declared = (
        value for name, _, value in (variable.partition(b"=") for variable in variables) if name == _VARIABLE
    )
    value = next(declared, b"")
    return Mib(int(value)) if value.isdigit() else Mib(0)
