"""GPUs through NVIDIA's management library, and how much of them each process group uses."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpubroker_server.adapters.nvml.simulated import SimulatedProbe
from gpubroker_server.core.domain.device import GpuHealth
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import MIB_BYTES, Mib
from gpubroker_server.ports.devices import (
    DeviceLost,
    DeviceProbe,
    DeviceReading,
    DevicesFound,
    MeasuredDevice,
    ProcessGroup,
)

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The one that Linux starts with; its number is fixed (PROC_PID_INIT_INO)."""


START_SECONDS = 10.0
"""A node waits no longer for its driver, and goes on without GPUs until it has started."""
MOST_ERRORS = 100
"""So many critical errors are taken over in one look."""

NODE_GPUS = "GPUBROKER_NODE_GPUS"
"""In the environment of a node that shares its machine with others: JSON, the indexes of its GPUs, or
[UUID, index, MiB] of each simulated one."""


def find_probes(simulated: Sequence[ReportedDevice] | None, own: str | None = None) -> Sequence[DeviceProbe]:
    """Return a probe of simulated devices if the configuration has a list of them (even an empty one), else
    of each GPU; none on a machine without an NVIDIA driver. What NODE_GPUS says (`own`) goes before the
    configuration."""
    indexes: list[int] | None = None
    if own is not None:
        given = json.loads(own)
        indexes = [gpu for gpu in given if isinstance(gpu, int)]
        own_simulated = [
            ReportedDevice(gpu[0], "simulated", gpu[1], Mib(gpu[2]), True)
            for gpu in given
            if isinstance(gpu, list)
        ]
        if own_simulated or not indexes:
            return [SimulatedProbe(own_simulated)]
    elif simulated is not None:
        return [SimulatedProbe(simulated)]
    thread = ThreadPoolExecutor(1, thread_name_prefix="driver")
    starting = thread.submit(_start_driver, indexes)
    thread.shutdown(wait=False)
    try:
        return starting.result(START_SECONDS)
    except TimeoutError:
        return [StartingDriver(starting)]


def _start_driver(indexes: list[int] | None) -> Sequence[DeviceProbe]:
    import pynvml  # the only import of it

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as fault:
        return [FailedDriver(str(fault))]
    return [
        NvmlProbe(pynvml, index, shares_pids=shares_pids())
        for index in range(count)
        if indexes is None or index in indexes
    ]


def visible_gpus(wanted: str | None = None) -> list[tuple[int, str]]:
    """(index, UUID) of each GPU. `wanted`: indexes or UUIDs as in CUDA_VISIBLE_DEVICES, in this order.

    Empty without an NVIDIA driver. Raises RuntimeError if a GPU does not answer, ValueError for a wrong name.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        uuids = [_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(count)]
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        uuids = []
    except pynvml.NVMLError as fault:
        raise RuntimeError(f"the GPUs of this machine cannot be read: {fault}") from None
    if wanted is None:
        return list(enumerate(uuids))
    names = {str(index): index for index in range(len(uuids))} | {uuid: i for i, uuid in enumerate(uuids)}
    try:
        found = [names[word.strip()] for word in wanted.split(",") if word.strip()]
    except KeyError as unknown:
        raise ValueError(f"CUDA_VISIBLE_DEVICES names {unknown}, and this machine has no such GPU") from None
    return [(index, uuids[index]) for index in found]


def shares_pids(own_namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Return True if process ids mean the same here as to the driver. In a container with process ids of its
    own, some drivers answer with the host's ids, some with translated ones, and some with translated ones and
    no memory, depending on their release."""
    try:
        return str(own_namespace.readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


class FailedDriver:
    """A DeviceProbe of a machine whose driver is there and does not start: its GPUs may be in use."""

    name = "the driver"

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:  # noqa: ARG002  # the port's
        raise RuntimeError(self._fault)


class StartingDriver:
    """A DeviceProbe of a machine whose driver has not answered yet."""

    name = "the driver"

    def __init__(self, starting: Future[Sequence[DeviceProbe]]) -> None:
        self._starting = starting

    def read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:  # noqa: ARG002  # the port's
        if not self._starting.done():
            raise RuntimeError("the driver does not answer")
        raise DevicesFound(self._starting.result())


class NvmlProbe:
    """A DeviceProbe of one GPU with its instances (MIG). A value that NVML does not have is None or left out.

    Use is attributed to no holder where NVML does not say which process uses how much (MIG, some drivers), or
    says it in process ids that are not ours (`shares_pids` is False).
    """

    def __init__(self, nvml: Any, index: int, *, shares_pids: bool = True) -> None:
        self.name = f"GPU {index}"
        self._nvml = nvml
        self._index = index
        self._shares_pids = shares_pids
        self._described: dict[str, ReportedDevice] = {}
        """UUID -> the device as it was first read: what the driver keeps for itself varies a little."""
        self._errors: Any = None
        """Where the driver puts critical errors (XID); asked for once."""
        self._asks_errors = True
        self._xid: int | None = None

    def read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:
        try:
            return self._read(holders)
        except self._nvml.NVMLError_GpuIsLost as fault:
            self._described.clear()
            self._asks_errors = True  # a GPU that comes back tells nothing where the lost one did
            raise DeviceLost(str(fault)) from None

    def _read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:
        """Handles are asked for each time, because those of a GPU that was restarted are no longer valid."""
        whole = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        uuid = _text(self._nvml.nvmlDeviceGetUUID(whole))
        split = self._is_split(whole)
        parts = self._instances_of(whole) if split else ()
        of_parts = [self._read_one(part, holders, parent=uuid) for part in parts]
        return [self._read_one(whole, holders, split=split), *of_parts]

    def _read_one(
        self, handle: Any, holders: Mapping[str, ProcessGroup], *, parent: str = "", split: bool = False
    ) -> DeviceReading:
        nvml, uuid = self._nvml, _text(self._nvml.nvmlDeviceGetUUID(handle))
        try:
            physical_mb, used_mb = self._memory(handle)
            if uuid not in self._described:
                kind = _text(nvml.nvmlDeviceGetName(handle))
                device = ReportedDevice(uuid, kind, self._index, physical_mb, False, parent)
                self._described[uuid] = device
            attributed = self._shares_pids and not (parent or split)
            measured = self._measure(uuid, handle, used_mb, holders if attributed else None)
            if not parent:
                measured = replace(measured, health=self._health(handle))
            return DeviceReading(replace(self._described[uuid], split=split), measured)
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError as fault:
            if uuid not in self._described:
                raise
            return DeviceReading(replace(self._described[uuid], split=split), None, str(fault))

    def _instances_of(self, handle: Any) -> Iterator[Any]:
        """Slots may be empty."""
        for slot in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                yield self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            except self._nvml.NVMLError_NotFound:
                continue

    def _measure(
        self, uuid: str, handle: Any, used_mb: Mib, holders: Mapping[str, ProcessGroup] | None
    ) -> MeasuredDevice:
        """Measure the device. Without `holders`, no use is attributed."""
        utilization = self._utilization(handle)
        processes = None if holders is None else self._processes(handle)
        if holders is None or processes is None:
            return MeasuredDevice(uuid, used_mb, None, {}, utilization)
        # A run is foreign on a device on which it has no lease.
        on_device = {name: group for name, group in holders.items() if uuid in group.leased_mb}
        owners = {pid: name for name, group in on_device.items() for pid in group.pids}
        by_holder: dict[str, Mib] = {}
        foreign_mb = 0
        for pid, mb in processes.items():
            holder = owners.get(pid)
            if holder is None:
                foreign_mb += mb
            else:
                by_holder[holder] = Mib(by_holder.get(holder, 0) + mb)
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
        return Mib(physical // MIB_BYTES), Mib((physical - memory.free) // MIB_BYTES)

    def _processes(self, handle: Any) -> Mapping[int, int] | None:
        """Pid -> MiB; None if the driver cannot say of each. A process may be listed for compute and for
        graphics, with the same MiB."""
        found: dict[int, int] = {}
        for purpose in ("Compute", "Graphics"):
            try:
                listed = self._listed(purpose, handle)
            except self._nvml.NVMLError_NotSupported:
                continue
            if any(process.usedGpuMemory is None for process in listed):
                return None
            found |= {process.pid: process.usedGpuMemory // MIB_BYTES for process in listed}
        return found

    def _listed(self, purpose: str, handle: Any) -> Sequence[Any]:
        """List the processes by the newest call that the driver has: drivers before 510, and some of 535,
        lack the third."""
        name = f"nvmlDeviceGet{purpose}RunningProcesses"
        try:
            newest: Sequence[Any] = getattr(self._nvml, f"{name}_v3")(handle)
        except self._nvml.NVMLError_FunctionNotFound:
            newest = getattr(self._nvml, f"{name}_v2")(handle)
        return newest

    def _is_split(self, handle: Any) -> bool:
        """MIG: the processes of an instance are not listed with the whole device."""
        try:
            current, _pending = self._nvml.nvmlDeviceGetMigMode(handle)
        except self._nvml.NVMLError:
            return False
        return bool(current)

    def _health(self, handle: Any) -> GpuHealth:
        nvml = self._nvml
        milliwatts = self._value("PowerUsage", handle)
        return GpuHealth(
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=self._value("Temperature", handle, nvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=self._value("ClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._value("ClockInfo", handle, nvml.NVML_CLOCK_MEM),
            ecc_errors=self._value(
                "TotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            xid=self._last_xid(handle),
        )

    def _value(self, query: str, handle: Any, *arguments: int) -> int | None:
        """None if the device does not have it."""
        try:
            value: int = getattr(self._nvml, f"nvmlDeviceGet{query}")(handle, *arguments)
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except self._nvml.NVMLError:
            return None
        return value

    def _last_xid(self, handle: Any) -> int | None:
        nvml = self._nvml
        try:
            if self._asks_errors:
                self._asks_errors, self._errors = False, nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._errors)
            for _ in range(MOST_ERRORS if self._errors is not None else 0):
                self._xid = nvml.nvmlEventSetWait_v2(self._errors, 0).eventData
        except nvml.NVMLError_Timeout:
            pass  # all have been told
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError:
            self._errors = None
        return self._xid

    def _utilization(self, handle: Any) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
