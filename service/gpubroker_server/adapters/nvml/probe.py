"""GPUs through NVIDIA's management library, and how much of them each process group uses."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from msgspec.structs import replace

from gpubroker_server.adapters.nvml.simulated import SimulatedProbe
from gpubroker_server.core.domain.device import GpuHealth
from gpubroker_server.core.domain.gpu_faults import FATAL_XIDS
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import MIB_BYTES, Mib
from gpubroker_server.core.domain.visible_gpus import (
    VARIABLE,
    GpuNames,
    NamedTwice,
    VisibleGpu,
    visible_gpus,
)
from gpubroker_server.ports.devices import (
    DeviceLost,
    DeviceProbe,
    DeviceReading,
    DevicesFound,
    MeasuredDevice,
    NoDevices,
    ProcessGroup,
)

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The one that Linux starts with; its number is fixed (PROC_PID_INIT_INO)."""


START_SECONDS = 10.0
"""A node waits at most this long for its driver, and then goes on without GPUs until the driver has
started."""
ASK_AGAIN_SECONDS = 60.0
"""After this time, the probe asks the driver again for what it refused or did not show."""
SHARED_PART = 0.9
"""The part of the machine's memory that a GPU without memory of its own offers. The rest is the system's."""
MOST_ERRORS = 100
"""The most critical errors that one look takes over from the driver."""

_RECOVERY = {
    0: "",
    1: "reset",
    2: "reboot",
    3: "",  # to end peer-to-peer traffic: other work goes on
    4: "drain and reset",
    5: "",  # of the fabric's management
    6: "bus reset",
    7: "reboot",
}
"""NVML_GPU_RECOVERY_ACTION_*; what is not listed is unknown."""

NODE_GPUS = "GPUBROKER_NODE_GPUS"
"""A variable in the environment of a node that shares its machine with others: JSON, the indexes of its GPUs,
or [UUID, index, MiB] of each simulated one."""


class GpuChoice(NamedTuple):
    """The GPUs that may be used, as in CUDA_VISIBLE_DEVICES, and what says so."""

    words: str
    by: str


def find_probes(
    simulated: Sequence[ReportedDevice] | None,
    own: str | None = None,
    choice: GpuChoice | None = None,
    shared_mb: Mib | None = None,
) -> Sequence[DeviceProbe]:
    """Return a probe of simulated devices if the configuration has a list of them (even an empty one), else
    of each GPU that the `choice` leaves; without a GPU, one that asks the driver again. What NODE_GPUS says
    (`own`) goes before the configuration and the choice. `shared_mb`: the size of a GPU that has no memory of
    its own; None: SHARED_PART of the machine's."""
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
        choice = GpuChoice(",".join(map(str, indexes)), NODE_GPUS)
    elif simulated is not None:
        return [SimulatedProbe(simulated)]
    thread = ThreadPoolExecutor(1, thread_name_prefix="driver")
    starting = thread.submit(_start_driver, choice, shared_mb)
    thread.shutdown(wait=False)
    try:
        return starting.result(START_SECONDS)
    except TimeoutError:
        return [StartingDriver(starting)]


def restart_driver(choice: GpuChoice | None, shared_mb: Mib | None) -> Sequence[DeviceProbe]:
    """Start the library anew and return what there is then. Only while nothing uses it."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return _start_driver(choice, shared_mb)


def _start_driver(choice: GpuChoice | None, shared_mb: Mib | None) -> Sequence[DeviceProbe]:
    import pynvml  # the only import of it

    try:
        count = _count_gpus(pynvml)
        chosen = _chosen(pynvml, count, choice)
    except pynvml.NVMLError_LibraryNotFound:
        fault: Exception = NoDevices(
            "NVIDIA's library libnvidia-ml.so.1 is not found: there is no driver, or this container was "
            "started without GPUs",
            is_proven=False,
        )
    except pynvml.NVMLError_DriverNotLoaded:
        fault = NoDevices("the NVIDIA driver is not loaded (nvidia-smi, dmesg)", is_proven=False)
    except (pynvml.NVMLError, NamedTwice) as error:
        fault = RuntimeError(str(error))
    else:
        if chosen:
            return [
                NvmlProbe(pynvml, index, shares_pids=shares_pids(), only=only, shared_mb=shared_mb)
                for index, only in chosen
            ]
        why = "the NVIDIA driver shows no GPU"
        if choice is not None and count:
            why = f"{choice.by} is {choice.words!r}, which names none of the {count} GPUs of this machine"
        fault = NoDevices(why, is_proven=True)
        pynvml.nvmlShutdown()  # a driver that has started counts its GPUs no second time
    return [RefusingDriver(fault, partial(_start_driver, choice, shared_mb))]


def _chosen(nvml: Any, count: int, choice: GpuChoice | None) -> list[VisibleGpu]:
    """Return the GPUs of the choice. Raises NamedTwice."""
    if choice is None:
        return [VisibleGpu(index) for index in range(count)]
    try:
        return sorted(visible_gpus(choice.words, [_names_of(nvml, index) for index in range(count)]))
    except NamedTwice as fault:
        nvml.nvmlShutdown()
        raise NamedTwice(f"{choice.by}: {fault}") from None


def _names_of(nvml: Any, index: int) -> GpuNames:
    """The names are empty if the GPU does not answer."""
    try:
        probe = NvmlProbe(nvml, index)
        whole = nvml.nvmlDeviceGetHandleByIndex(index)
        return GpuNames(_text(nvml.nvmlDeviceGetUUID(whole)), probe.instances(whole))
    except nvml.NVMLError:
        return GpuNames("")


def _count_gpus(nvml: Any) -> int:
    """Start the driver and return the number of its GPUs. It is stopped again if it cannot tell."""
    nvml.nvmlInit()
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        raise


def gpus_to_share(wanted: str | None = None) -> list[tuple[int, str]]:
    """(index, UUID) of each whole GPU. `wanted`: as in CUDA_VISIBLE_DEVICES, in this order.

    Empty without an NVIDIA driver. Raises RuntimeError if a GPU does not answer, ValueError for an instance
    or a GPU that is named twice.
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
    try:
        found = visible_gpus(wanted, [GpuNames(uuid) for uuid in uuids])
    except NamedTwice as fault:
        raise ValueError(f"{VARIABLE}: {fault}") from None
    return [(index, uuids[index]) for index, _ in found]


def shares_pids(own_namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Return True if process ids mean the same here as to the driver. In a container with process ids of its
    own, some drivers answer with the host's ids, some with translated ones, and some with translated ones and
    no memory, depending on their release."""
    try:
        return str(own_namespace.readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


class RefusingDriver:
    """A DeviceProbe of a machine whose driver does not start or shows no GPU. It asks the driver again about
    once a minute: drivers are installed and loaded, and GPUs are added, while a node agent runs."""

    name = "the driver"

    def __init__(self, fault: Exception, start: Callable[[], Sequence[DeviceProbe]]) -> None:
        """`fault` is raised until the driver is asked again, with `start`."""
        self._fault = fault
        self._start = start
        self._asked_at = time.monotonic()

    def read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:  # noqa: ARG002  # the port's
        if time.monotonic() - self._asked_at < ASK_AGAIN_SECONDS:
            raise self._fault.with_traceback(None)
        raise DevicesFound(self._start())


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

    def __init__(
        self,
        nvml: Any,
        index: int,
        *,
        shares_pids: bool = True,
        only: tuple[str, ...] | None = None,
        shared_mb: Mib | None = None,
    ) -> None:
        """`only`: the beginnings of the UUIDs of what may be used of it; None: all. `shared_mb`: as for
        `find_probes`."""
        self.name = f"GPU {index}"
        self._only = only
        self._shared_mb = shared_mb
        self._nvml = nvml
        self._index = index
        self._shares_pids = shares_pids
        self._described: dict[str, ReportedDevice] = {}
        """UUID -> the device as it was first read: what the driver keeps for itself varies a little."""
        self._errors: Any = None
        """The event set in which the driver puts critical errors (XID)."""
        self._tells_errors = False
        self._asks_errors_at = 0.0
        self._xid: int | None = None
        self._fatal_xid: int | None = None

    def read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:
        try:
            return self._read(holders)
        except self._nvml.NVMLError_GpuIsLost as fault:
            self._described.clear()
            self._xid = self._fatal_xid = None  # it comes back from a reset or a reboot only
            self._asks_errors_at = 0.0
            self._tells_errors, self._errors = (
                False,
                None,
            )  # a GPU that comes back tells nothing where the lost one did
            raise DeviceLost(str(fault)) from None

    def _read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:
        """Handles are asked for each time, because those of a GPU that was restarted are no longer valid."""
        whole = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        uuid = _text(self._nvml.nvmlDeviceGetUUID(whole))
        split = self._is_split(whole)
        parts = [part for part in self._instances_of(whole) if self._is_usable(part)] if split else []
        if not (parts or self._only is None or self._is_usable(whole)):
            return []
        of_parts = [self._read_one(part, holders, parent=uuid) for part in parts]
        return [self._read_one(whole, holders, split=split), *of_parts]

    def instances(self, whole: Any) -> list[str]:
        """Return the UUIDs of the instances of the GPU."""
        parts = self._instances_of(whole) if self._is_split(whole) else ()
        return [_text(self._nvml.nvmlDeviceGetUUID(part)) for part in parts]

    def _is_usable(self, handle: Any) -> bool:
        return self._only is None or _text(self._nvml.nvmlDeviceGetUUID(handle)).startswith(self._only)

    def _read_one(
        self, handle: Any, holders: Mapping[str, ProcessGroup], *, parent: str = "", split: bool = False
    ) -> DeviceReading:
        nvml, uuid = self._nvml, _text(self._nvml.nvmlDeviceGetUUID(handle))
        try:
            physical_mb, used_mb = self._memory(handle) or self._shared_memory(handle)
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

    def _memory(self, handle: Any) -> tuple[Mib, Mib] | None:
        """(MiB that processes can use, MiB of that in use), without what the driver keeps for itself. None if
        the GPU has no memory of its own.

        Drivers before 510 do not report that part; it is in both then.
        """
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            reserved = memory.reserved
        except nvml.NVMLError:
            try:
                memory, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), 0
            except nvml.NVMLError_NotSupported:
                return None
        if not memory.total:
            return None
        # Releases disagree on whether `used` includes `reserved`; `free` means the same in all.
        physical = memory.total - reserved
        return Mib(physical // MIB_BYTES), Mib((physical - memory.free) // MIB_BYTES)

    def _shared_memory(self, handle: Any) -> tuple[Mib, Mib]:
        """Return the size and the used part of the memory of a GPU that works in the machine's memory (GB10,
        Jetson). The rest of the machine's memory is for other use; if that use takes more than the rest, the
        excess counts as used memory of the GPU."""
        host = psutil.virtual_memory()
        host_mb = host.total // MIB_BYTES
        size_mb = min(self._shared_mb or int(host_mb * SHARED_PART), host_mb)
        beyond_mb = (host.total - host.available) // MIB_BYTES - (host_mb - size_mb)
        processes_mb = sum((self._processes(handle) or {}).values())
        return Mib(size_mb), Mib(min(size_mb, max(0, beyond_mb, processes_mb)))

    def _processes(self, handle: Any) -> Mapping[int, int] | None:
        """Pid -> MiB; None if the driver cannot say of each. A process may be listed for compute and for
        graphics, with the same MiB."""
        found: dict[int, int] | None = None
        for purpose in ("Compute", "Graphics"):
            try:
                listed = self._listed(purpose, handle)
            except self._nvml.NVMLError_NotSupported:
                continue
            if any(process.usedGpuMemory is None for process in listed):
                return None
            found = (found or {}) | {process.pid: process.usedGpuMemory // MIB_BYTES for process in listed}
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
        xid = self._last_xid(handle)
        return GpuHealth(
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=self._value("Temperature", handle, nvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=self._value("ClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._value("ClockInfo", handle, nvml.NVML_CLOCK_MEM),
            ecc_errors=self._value(
                "TotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            xid=xid,
            fatal_xid=self._fatal_xid,
            remap_pending=self._is_remap_pending(handle),
            recovery=self._recovery(handle),
        )

    def _is_remap_pending(self, handle: Any) -> bool | None:
        """True if memory waits for a reset to be replaced: rows, on GPUs before Ampere pages."""
        rows = self._value("RemappedRows", handle)
        if rows is None:
            pages = self._value("RetiredPagesPendingStatus", handle)
            return None if pages is None else bool(pages)
        _correctable, _uncorrectable, is_pending, has_failed = rows
        return bool(is_pending or has_failed)

    def _recovery(self, handle: Any) -> str | None:
        """Return the action that the driver asks for; empty if none, None if it cannot tell. Drivers before
        570 cannot."""
        nvml = self._nvml
        fields = self._value("FieldValues", handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if fields is None or fields[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        return _RECOVERY.get(fields[0].value.uiVal)

    def _value(self, what: str, handle: Any, *arguments: Any) -> Any:
        """None if the device or its driver does not have it."""
        try:
            value = getattr(self._nvml, f"nvmlDeviceGet{what}")(handle, *arguments)
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except self._nvml.NVMLError:
            return None
        return value

    def _last_xid(self, handle: Any) -> int | None:
        nvml = self._nvml
        try:
            if not self._tells_errors and time.monotonic() >= self._asks_errors_at:
                self._asks_errors_at = time.monotonic() + ASK_AGAIN_SECONDS
                self._errors = self._errors or nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._errors)
                self._tells_errors = True
            for _ in range(MOST_ERRORS if self._tells_errors else 0):
                self._xid = nvml.nvmlEventSetWait_v2(self._errors, 0).eventData
                if self._xid in FATAL_XIDS:
                    self._fatal_xid = self._xid
        except nvml.NVMLError_Timeout:
            pass  # all have been told
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError_NotSupported:
            self._asks_errors_at = math.inf
        except nvml.NVMLError:
            self._tells_errors, self._errors = False, None
        return self._xid

    def _utilization(self, handle: Any) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
