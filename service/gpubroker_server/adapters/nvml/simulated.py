"""Devices that exist only in the configuration: for trying things out and for tests."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpubroker_server.core.domain.orders import SeenDevice
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.devices import MeasuredDevice, ProcessGroup

SAYS_WHAT_IT_USES = "SIMULATED_GPU_MB"
"""Variable in the environment of a process: so many MiB of each of its devices it is taken to use."""
_NAME = SAYS_WHAT_IT_USES.encode()


class SimulatedProbe:
    """Implements `device_ports.DeviceProbe`. A run uses exactly its lease for as long as a process of it
    lives, or what one of its processes was started to say that it uses; that counts until none lives.
    """

    def __init__(self, devices: Sequence[SeenDevice]) -> None:
        self._devices = tuple(devices)
        self._said_mb: dict[str, Mib] = {}

    def inventory(self) -> Sequence[SeenDevice]:
        return self._devices

    def sample(self, holders: Mapping[str, ProcessGroup]) -> Sequence[MeasuredDevice]:
        self._said_mb = {
            holder: said_mb
            for holder, group in holders.items()
            if group.pids and (said_mb := _said_mb(group.pids) or self._said_mb.get(holder))
        }
        return [self._measured(device.uuid, holders) for device in self._devices]

    def _measured(self, uuid: str, holders: Mapping[str, ProcessGroup]) -> MeasuredDevice:
        by_holder = {
            holder: self._said_mb.get(holder, group.leased_mb[uuid])
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


def _said_mb(pids: Iterable[int]) -> Mib:
    """The most that one of these processes says it uses; 0 if none says so."""
    return max(map(_said_by, pids), default=Mib(0))


def _said_by(pid: int) -> Mib:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return Mib(0)  # it has ended
    said = (value for name, _, value in (one.partition(b"=") for one in variables) if name == _NAME)
    value = next(said, b"")
    return Mib(int(value)) if value.isdigit() else Mib(0)
