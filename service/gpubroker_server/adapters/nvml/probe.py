"""Reads GPUs through NVIDIA's management library, and attributes their use to process groups."""

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
"""The first pid namespace of Linux, whose number is fixed (PROC_PID_INIT_INO)."""

START_SECONDS = 10.0
"""The longest wait of a node for its driver. After it the node goes on without GPUs until the driver has
started."""
ASK_AGAIN_SECONDS = 60.0
"""The time after which the driver is asked again for a value or a GPU that it did not provide."""
SHARED_PART = 0.9
"""The share of the machine's memory that a GPU without memory of its own offers. The rest is for the
system."""
MAX_ERRORS = 100
"""The most critical errors that one measurement reads from the driver."""

_RECOVERY = {
    0: "",
    1: "reset",
    2: "reboot",
    3: "",  # to end peer-to-peer traffic: other work goes on
    4: "drain and reset",
    5: "",  # to recover the fabric: this is for its own management
    6: "bus reset",
    7: "reboot",
}
"""The recovery action for each value of NVML_GPU_RECOVERY_ACTION_*. Other values are unknown."""

NODE_GPUS = "GPUBROKER_NODE_GPUS"
"""An environment variable of a node that shares its machine with other nodes. Its value is a JSON list with
the index of each of its GPUs, or [UUID, index, MiB] of each simulated one."""


class GpuChoice(NamedTuple):
    """The GPUs that may be used, as in CUDA_VISIBLE_DEVICES, and the name of the setting or variable that
    says so."""

    words: str
    by: str


def find_probes(
    simulated: Sequence[ReportedDevice] | None,
    own: str | None = None,
    choice: GpuChoice | None = None,
    shared_mb: Mib | None = None,
) -> Sequence[DeviceProbe]:
    """Return the probes of this node's devices.

    `own` is the value of NODE_GPUS, which takes precedence over the configuration and the choice. Otherwise
    there is one probe of the simulated devices if the configuration lists these (even an empty list), or
    else one probe for each GPU that the `choice` names. Without a GPU, the only probe is one that asks the
    driver again. `shared_mb` is the size of a GPU that has no memory of its own; None means SHARED_PART of
    the machine's memory."""
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
    """Start the library again and return its probes. Call this only while nothing uses the library."""
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
    """Return the GPUs that the choice names, or all GPUs without a choice. Raises NamedTwice."""
    if choice is None:
        return [VisibleGpu(index) for index in range(count)]
    try:
        return sorted(visible_gpus(choice.words, [_names_of(nvml, index) for index in range(count)]))
    except NamedTwice as fault:
        nvml.nvmlShutdown()
        raise NamedTwice(f"{choice.by}: {fault}") from None


def _names_of(nvml: Any, index: int) -> GpuNames:
    """Return the UUIDs of a GPU and its instances. They are empty if the GPU does not answer."""
    try:
        probe = NvmlProbe(nvml, index)
        whole = nvml.nvmlDeviceGetHandleByIndex(index)
        return GpuNames(_text(nvml.nvmlDeviceGetUUID(whole)), probe.instances(whole))
    except nvml.NVMLError:
        return GpuNames("")


def _count_gpus(nvml: Any) -> int:
    """Start the library and return the number of GPUs. The library is stopped again if it cannot count
    them."""
    nvml.nvmlInit()
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        raise


def gpus_to_share(wanted: str | None = None) -> list[tuple[int, str]]:
    """Return the index and the UUID of each whole GPU, or of those that `wanted` names, in its order.
    `wanted` has the form of CUDA_VISIBLE_DEVICES.

    Returns nothing without an NVIDIA driver. Raises RuntimeError if a GPU does not answer, and ValueError
    for an instance or a GPU that is named twice.
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
        visible = visible_gpus(wanted, [GpuNames(uuid) for uuid in uuids])
    except NamedTwice as fault:
        raise ValueError(f"{VARIABLE}: {fault}") from None
    return [(index, uuids[index]) for index, _ in visible]


def shares_pids(own_namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Return True if this process and the driver have the same process ids. In a container with its own
    process ids, some releases of the driver answer with the host's ids, some with translated ids, and some
    with translated ids but no memory."""
    try:
        return str(own_namespace.readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


class RefusingDriver:
    """A DeviceProbe of a machine whose driver does not start or shows no GPU. It asks the driver again about
    once a minute, because a driver may be installed or loaded, or a GPU added, while a node agent runs."""

    name = "the driver"

    def __init__(self, fault: Exception, start: Callable[[], Sequence[DeviceProbe]]) -> None:
        """`fault` is raised until the driver is asked again by a call of `start`."""
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

    Use is attributed to no holder if NVML does not report the memory of each process (MIG, some drivers), or
    reports it with process ids of another namespace (`shares_pids` is False).
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
        """`only` has the beginnings of the UUIDs of the GPU or the instances that may be used; None allows
        all. `shared_mb` is that of `find_probes`."""
        self.name = f"GPU {index}"
        self._only = only
        self._shared_mb = shared_mb
        self._nvml = nvml
        self._index = index
        self._shares_pids = shares_pids
        self._described: dict[str, ReportedDevice] = {}
        """Each device as it was first read, by UUID. It is kept, because the memory that the driver reserves
        varies a little."""
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
            self._xid = self._fatal_xid = None  # a lost GPU comes back only after a reset or a reboot
            self._asks_errors_at = 0.0
            # The event set of a lost GPU gets no events after the GPU is back.
            self._tells_errors, self._errors = False, None
            raise DeviceLost(str(fault)) from None

    def _read(self, holders: Mapping[str, ProcessGroup]) -> Sequence[DeviceReading]:
        """Read the GPU and its usable instances. The handles are looked up each time, because those of a GPU
        that was reset are no longer valid."""
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
        """Yield the handles of the GPU's instances. Empty slots are skipped."""
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
        """Return the MiB that processes can use and the MiB of these in use, without the memory that the
        driver reserves; None if the GPU has no memory of its own.

        Drivers before 510 do not report the reserved memory; it is then included in both values.
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
        # Releases disagree on whether `used` includes `reserved`; the meaning of `free` is equal in all.
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
        """Return the MiB of each process by pid; None if the driver does not report it for each. A process
        may be listed for both compute and graphics, with equal MiB."""
        used_mb: dict[int, int] | None = None
        for purpose in ("Compute", "Graphics"):
            try:
                listed = self._listed(purpose, handle)
            except self._nvml.NVMLError_NotSupported:
                continue
            if any(process.usedGpuMemory is None for process in listed):
                return None
            used_mb = (used_mb or {}) | {
                process.pid: process.usedGpuMemory // MIB_BYTES for process in listed
            }
        return used_mb

    def _listed(self, purpose: str, handle: Any) -> Sequence[Any]:
        """Return the processes by the newest query that the driver supports. Version 3 is missing before 510
        and in some releases of 535."""
        name = f"nvmlDeviceGet{purpose}RunningProcesses"
        try:
            newest: Sequence[Any] = getattr(self._nvml, f"{name}_v3")(handle)
        except self._nvml.NVMLError_FunctionNotFound:
            newest = getattr(self._nvml, f"{name}_v2")(handle)
        return newest

    def _is_split(self, handle: Any) -> bool:
        """Return True if the GPU is split into instances (MIG). Their processes are not listed with the
        whole device."""
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
        """Return True if faulty memory waits for a reset to be replaced: rows, or pages on GPUs before
        Ampere. None if unknown."""
        rows = self._value("RemappedRows", handle)
        if rows is None:
            pages = self._value("RetiredPagesPendingStatus", handle)
            return None if pages is None else bool(pages)
        _correctable, _uncorrectable, is_pending, has_failed = rows
        return bool(is_pending or has_failed)

    def _recovery(self, handle: Any) -> str | None:
        """Return the recovery action that the driver asks for; empty if it asks for none. None if it is
        unknown, as with drivers before 570."""
        nvml = self._nvml
        fields = self._value("FieldValues", handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if fields is None or fields[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        return _RECOVERY.get(fields[0].value.uiVal)

    def _value(self, what: str, handle: Any, *arguments: Any) -> Any:
        """Return a value of the device; None if the device or its driver does not have it."""
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
            for _ in range(MAX_ERRORS if self._tells_errors else 0):
                self._xid = nvml.nvmlEventSetWait_v2(self._errors, 0).eventData
                if self._xid in FATAL_XIDS:
                    self._fatal_xid = self._xid
        except nvml.NVMLError_Timeout:
            pass  # there is no further error
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
    """Return a value as text, because older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
