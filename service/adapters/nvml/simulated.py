"""Devices that exist only in the configuration: for trying things out and for tests."""

from collections.abc import Mapping, Sequence

from service.core.orders import SeenDevice
from service.core.units import Mib
from service.ports import MeasuredDevice, ProcessGroup


class SimulatedProbe:
    """Implements `ports.DeviceProbe`. A run uses exactly its lease for as long as a process of it lives."""

    def __init__(self, devices: Sequence[SeenDevice]) -> None:
        self._devices = tuple(devices)

    def inventory(self) -> Sequence[SeenDevice]:
        return self._devices

    def sample(self, holders: Mapping[str, ProcessGroup]) -> Sequence[MeasuredDevice]:
        return [self._measured(device.uuid, holders) for device in self._devices]

    def _measured(self, uuid: str, holders: Mapping[str, ProcessGroup]) -> MeasuredDevice:
        by_holder = {
            holder: group.leased_mb[uuid]
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
