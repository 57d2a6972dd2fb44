"""GPUs through NVIDIA's management library, and how much of them each process group uses."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.ports.devices import DeviceProbe, MeasuredDevice, ProcessGroup

MIB = 2**20
MEASURE_SECONDS = 30.0

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The one that Linux starts with; its number is fixed (PROC_PID_INIT_INO)."""


def load_nvml() -> Any | None:
    """The initialised `pynvml` module; None if there is no NVIDIA driver. The only import of it."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def new_probe(simulated: Sequence[ReportedDevice] | None) -> DeviceProbe:
    """Simulated devices if the configuration has a list of them (even an empty one), else those of NVML."""
    from gpubroker_server.adapters.nvml.simulated import SimulatedProbe

    if simulated is not None:
        return SimulatedProbe(simulated)
    nvml = load_nvml()
    return SimulatedProbe(()) if nvml is None else NvmlProbe(nvml, shares_pids=shares_pids())


def shares_pids(own_namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Whether process ids mean the same here as to the driver.

    In a container with process ids of its own, some drivers answer with the host's ids, some with translated
    ones, and some with translated ones and no memory, depending on their release.
    """
    try:
        return str(own_namespace.readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


class NvmlProbe:
    """A DeviceProbe. A value that NVML does not have is None or left out, never an error.

    Use is attributed to no holder where NVML does not say which process uses how much (MIG, some drivers), or
    says it in process ids that are not ours (`shares_pids` is False).
    """

    def __init__(self, nvml: Any, *, shares_pids: bool = True) -> None:
        self._nvml = nvml
        self._shares_pids = shares_pids
        self._handles: dict[str, Any] = {}
        self._instances: set[str] = set()
        """UUIDs of instances of a GPU (MIG)."""
        self._devices: list[ReportedDevice] = []
        whole = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        for handle in whole:
            self._enter(handle)
        for handle in whole:
            for instance in self._instances_of(handle):
                self._enter(instance, parent=_text(nvml.nvmlDeviceGetUUID(handle)))

    def _enter(self, handle: Any, parent: str = "") -> None:
        """GPUs have the driver's numbers; instances are numbered after all of them."""
        uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        self._handles[uuid] = handle
        if parent:
            self._instances.add(uuid)
        self._devices.append(
            ReportedDevice(
                uuid=uuid,
                kind=_text(self._nvml.nvmlDeviceGetName(handle)),
                index=len(self._devices),
                physical_mb=self._memory(handle)[0],
                simulated=False,
                parent=parent,
                split=not parent and self._is_split(handle),
            )
        )

    def _instances_of(self, handle: Any) -> Iterator[Any]:
        """Of a GPU that is split (MIG). Slots may be empty."""
        if not self._is_split(handle):
            return
        for slot in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                yield self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            except self._nvml.NVMLError:
                continue

    def inventory(self) -> Sequence[ReportedDevice]:
        return self._devices

    def sample(self, holders: Mapping[str, ProcessGroup]) -> Sequence[MeasuredDevice]:
        """A device that fell off the bus has no entry: its sample gets stale, so it gets no new leases."""
        measured = []
        for uuid, handle in self._handles.items():
            # A run is foreign on a device on which it has no lease.
            here = {name: group for name, group in holders.items() if uuid in group.leased_mb}
            owners = {pid: name for name, group in here.items() for pid in group.pids}
            try:
                measured.append(self._measure(uuid, handle, owners))
            except self._nvml.NVMLError:
                continue
        return measured

    def _measure(self, uuid: str, handle: Any, owners: Mapping[int, str]) -> MeasuredDevice:
        _, used_mb = self._memory(handle)
        utilization = self._utilization(handle)
        processes = dict(self._processes(handle))
        is_split = uuid in self._instances or self._is_split(handle)
        if not self._shares_pids or None in processes.values() or is_split:
            return MeasuredDevice(uuid, used_mb, None, {}, utilization)
        by_holder: dict[str, Mib] = {}
        foreign_mb = 0
        for pid, mb in processes.items():
            holder = owners.get(pid)
            if holder is None:
                foreign_mb += mb or 0
            else:
                by_holder[holder] = Mib(by_holder.get(holder, 0) + (mb or 0))
        return MeasuredDevice(uuid, used_mb, Mib(foreign_mb), by_holder, utilization)

    def _memory(self, handle: Any) -> tuple[Mib, Mib]:
        """(MiB that processes can use, MiB of that in use), without what the driver keeps for itself.

        Drivers before 510 do not report that part; it is in both then.
        """
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            reserved = memory.reserved
        except nvml.NVMLError:
            memory, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), 0
        # Releases disagree on whether `used` includes `reserved`; `free` means the same in all.
        physical = memory.total - reserved
        return Mib(physical // MIB), Mib((physical - memory.free) // MIB)

    def _processes(self, handle: Any) -> Iterator[tuple[int, int | None]]:
        """(pid, MiB or None). A process may be listed for compute and for graphics, with the same MiB."""
        nvml = self._nvml
        compute, graphics = (
            nvml.nvmlDeviceGetComputeRunningProcesses,
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
        )
        for listing in (compute, graphics):
            try:
                listed = listing(handle)
            except nvml.NVMLError_NotSupported:
                continue
            for process in listed:
                known = process.usedGpuMemory
                yield process.pid, None if known is None else known // MIB

    def _is_split(self, handle: Any) -> bool:
        """MIG: the processes of an instance are not listed with the whole device."""
        try:
            current, _pending = self._nvml.nvmlDeviceGetMigMode(handle)
        except self._nvml.NVMLError:
            return False
        return bool(current)

    def _utilization(self, handle: Any) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


class NotMeasured(Exception):
    """A device that a caller needs to know about could not be measured."""


class DeviceMeter:
    """One measurement at a time, in a thread of its own: a driver that hangs holds up nothing else."""

    def __init__(self, probe: DeviceProbe) -> None:
        self._probe = probe
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meter")

    def inventory(self) -> Sequence[ReportedDevice]:
        return self._probe.inventory()

    async def measure(
        self,
        holders: Callable[[], Mapping[str, ProcessGroup]],
        needed: Collection[str] = (),
        timeout_seconds: float = MEASURE_SECONDS,
    ) -> Sequence[MeasuredDevice]:
        """`holders` is called in the thread.

        Raises NotMeasured if one of the `needed` UUIDs is in this machine and gave no answer, TimeoutError,
        and whatever the driver raises.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_seconds):
            measured = await loop.run_in_executor(self._thread, lambda: self._probe.sample(holders()))
        silent = {device.uuid for device in self.inventory()} & set(needed) - {it.uuid for it in measured}
        if silent:
            raise NotMeasured(f"no answer of {', '.join(sorted(silent))}")
        return measured
