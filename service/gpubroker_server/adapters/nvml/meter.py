"""Measures the devices of a machine. Each GPU has its own thread, so that a GPU that hangs delays no
other."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.device import GpuHealth
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.ports.devices import (
    DeviceLost,
    DeviceProbe,
    DeviceReading,
    DevicesFound,
    MeasuredDevice,
    NoDevices,
    ProcessGroup,
)

MEASURE_SECONDS = 30.0
STRAGGLER_SECONDS = 2.0
"""The longest wait of the other devices' samples for a device that does not answer. A sample is too old to
plan by after three of the usual periods."""
RESTART_SECONDS = 60.0
"""The time without an answer of any device after which the driver's library is started again. After a fault,
some GPUs are visible only to a new start of the library, and it counts the GPUs only then."""
SILENT_SECONDS = 30.0
"""The time after which a device that cannot be measured is reported. Runs that have ended do not wait for it
any longer."""

Holders = Mapping[str, ProcessGroup]


class NotMeasured(Exception):
    """A device that a caller needs to know about could not be measured."""


class Inventory(Struct, frozen=True):
    devices: tuple[ReportedDevice, ...]
    """The devices of the machine, without lost ones."""
    faults: tuple[tuple[str, str], ...]
    """The UUID of each device that cannot be used, or its name while its UUID is unknown, and the reason."""
    complete: bool
    """True if every GPU has been read or is lost. A device that is not in the list is then not in use."""
    absence: str = ""
    """The reason why the machine shows no GPU at all; empty if it shows one, or if their absence is a
    fault."""


class GpuThread:
    """A probe with its thread and the values that were last read."""

    def __init__(self, probe: DeviceProbe) -> None:
        self.devices: tuple[ReportedDevice, ...] | None = None
        """The devices of the probe; None before the first answer, and empty while they are lost."""
        self.is_lost = False
        self.absence = ""
        """The reason why there is no device; empty if there is one."""
        self.health: dict[str, GpuHealth] = {}
        """The health of the GPUs that answer now, as last read, by UUID."""
        self.found: Sequence[DeviceProbe] | None = None
        """The probes that replace this one, once the driver has found devices."""
        self._probe = probe
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=probe.name)
        self._began: float | None = None
        """The time when the present call began; None between calls."""
        self._names: tuple[str, ...] = (probe.name,)
        """The names by which faults name the devices: their UUIDs, or the name of the probe while these are
        unknown."""
        self._silent: dict[str, tuple[str, float]] = {}
        """The devices that cannot be measured, each with the reason and the time since when."""

    @property
    def is_new(self) -> bool:
        """True if the driver was never asked."""
        return self.devices is None and self._began is None and not self._silent

    @property
    def is_out(self) -> bool:
        """True if the driver has answered before, none of its devices can be measured now, and no question is
        under way."""
        if self.devices is None or self.absence or self._began is not None:
            return False
        return bool(self._silent) and {device.uuid for device in self.devices} <= self._silent.keys()

    @property
    def hangs(self) -> bool:
        """True if a new question would wait behind one that has no answer for STRAGGLER_SECONDS."""
        began = self._began  # read once, because the thread may set it to None at any moment
        return began is not None and time.monotonic() - began > STRAGGLER_SECONDS

    async def measure(self, holders: Holders) -> list[MeasuredDevice]:
        """Return the measured devices; empty if they cannot be measured."""
        try:
            read = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, holders)
        except DeviceLost as lost:
            self.devices, self.is_lost = (), True
            self._note(self._names, str(lost))
            return []
        except NoDevices as none:
            self.devices, self.absence = () if none.is_proven else None, str(none)
            self._note(self._names, self.absence)
            return []
        except DevicesFound as answer:
            self.found = answer.probes
            return []
        except Exception as fault:
            self._note(self._names, str(fault) or repr(fault))
            return []
        self.devices, self.is_lost = tuple(reading.device for reading in read), False
        self._names = tuple(device.uuid for device in self.devices)
        failed = {reading.device.uuid: reading.fault for reading in read if reading.measured is None}
        self._silent = {name: about for name, about in self._silent.items() if name in failed}
        for uuid, why in failed.items():
            self._note([uuid], why)
        measured = [reading.measured for reading in read if reading.measured is not None]
        self.health = {device.uuid: device.health for device in measured if device.health is not None}
        return measured

    def note_silence(self) -> None:
        self._note(self._names, "the driver does not answer")

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield the devices that cannot be used, each with the reason. A device that was measured before is
        reported only after SILENT_SECONDS."""
        if self.absence:
            return
        at_once = self.devices is None or self.is_lost
        for name, (fault, _) in self._silent.items():
            if at_once or not self._is_awaited(name):
                yield name, fault

    def awaited(self) -> set[str]:
        """Return the UUIDs of the devices of which a measurement is expected soon. The empty name stands for
        unknown devices."""
        if self.devices is None:
            return {""} if all(map(self._is_awaited, self._names)) else set()
        return {device.uuid for device in self.devices if self._is_awaited(device.uuid)}

    def _is_awaited(self, name: str) -> bool:
        _, since = self._silent.get(name, ("", time.monotonic()))
        return time.monotonic() - since < SILENT_SECONDS

    def _note(self, names: Iterable[str], fault: str) -> None:
        for name in names:
            self.health.pop(name, None)
            _, since = self._silent.get(name, ("", time.monotonic()))
            self._silent[name] = fault, since

    def _read(self, holders: Holders) -> Sequence[DeviceReading]:
        self._began = time.monotonic()
        try:
            return self._probe.read(holders)
        finally:
            self._began = None


class DeviceMeter:
    """Measures all devices of a machine. It has one thread per GPU and one more, however many calls hang."""

    def __init__(
        self, probes: Sequence[DeviceProbe], restart: Callable[[], Sequence[DeviceProbe]] | None = None
    ) -> None:
        """`restart` starts the driver's library again and returns the probes that it then has. It may
        hang."""
        self._gpus = list(map(GpuThread, probes))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meter")
        self._restart = restart
        self._restarting: Future[Sequence[DeviceProbe]] | None = None
        self._out_since: float | None = None
        """The time since when no device answers; None while one does."""

    def inventory(self) -> Inventory:
        """Return the devices as last measured. MIG instances get the indexes after those of all GPUs."""
        devices = [device for gpu in self._gpus for device in gpu.devices or ()]
        whole = [device for device in devices if device.simulated or not device.parent]
        parts = [device for device in devices if device.parent and not device.simulated]
        numbered = [replace(part, index=len(self._gpus) + n) for n, part in enumerate(parts)]
        faults = sorted(fault for gpu in self._gpus for fault in gpu.faults())
        complete = all(gpu.devices is not None for gpu in self._gpus)
        absence = next((gpu.absence for gpu in self._gpus if gpu.absence), "")
        return Inventory((*whole, *numbered), tuple(faults), complete, absence)

    def health(self) -> dict[str, GpuHealth]:
        """Return the health of the GPUs that answered the last measurement, by UUID."""
        return {uuid: health for gpu in self._gpus for uuid, health in gpu.health.items()}

    async def measure(
        self,
        holders: Callable[[], Holders],
        needed: Collection[str] = (),
        timeout_seconds: float = MEASURE_SECONDS,
    ) -> Sequence[MeasuredDevice]:
        """Measure all devices; those that do not answer are left out. `holders` is called in a thread.

        This waits longer for the devices in `needed`, and for GPUs that are asked for the first time.

        Raises TimeoutError, and NotMeasured if a needed device of this machine did not answer and has not
        been silent for SILENT_SECONDS.
        """
        if any(gpu.found is not None for gpu in self._gpus):
            self._gpus = [new for gpu in self._gpus for new in _instead(gpu)]
        await self._start_anew()
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_seconds
        async with asyncio.timeout(timeout_seconds):
            groups = await loop.run_in_executor(self._thread, holders)
        asked = {asyncio.ensure_future(gpu.measure(groups)): gpu for gpu in self._gpus if not gpu.hangs}
        wanted = {call for call, gpu in asked.items() if gpu.is_new or _has(gpu, needed)}
        await _wait(asked, min(STRAGGLER_SECONDS, timeout_seconds))
        await _wait(wanted, until - loop.time())
        measured: list[MeasuredDevice] = []
        for call in asked:
            if call.done():
                measured += call.result()
            else:
                call.cancel()
        for gpu in self._gpus:
            if gpu.hangs:
                gpu.note_silence()
        self._require(set(needed) - {device.uuid for device in measured})
        return measured

    async def _start_anew(self) -> None:
        """Start the library again if no device has answered for RESTART_SECONDS. No measurement is lost by
        that."""
        if self._restart is None or not self._gpus or not all(gpu.is_out for gpu in self._gpus):
            self._out_since = None
            return
        now = time.monotonic()
        self._out_since = now if self._out_since is None else self._out_since
        if self._restarting is None and now - self._out_since >= RESTART_SECONDS:
            thread = ThreadPoolExecutor(1, thread_name_prefix="driver")
            self._restarting = thread.submit(self._restart)
            thread.shutdown(wait=False)
        if self._restarting is not None:
            await asyncio.wait([asyncio.wrap_future(self._restarting)], timeout=STRAGGLER_SECONDS)
            if self._restarting.done():
                self._gpus = list(map(GpuThread, self._restarting.result()))
                self._restarting, self._out_since = None, None

    def _require(self, missing: set[str]) -> None:
        awaited = {name for gpu in self._gpus for name in gpu.awaited()}
        known = {device.uuid for gpu in self._gpus for device in gpu.devices or ()}
        silent = {uuid for uuid in missing if uuid in awaited or ("" in awaited and uuid not in known)}
        if silent:
            raise NotMeasured(f"no answer of {', '.join(sorted(silent))}")


def _has(gpu: GpuThread, uuids: Collection[str]) -> bool:
    return any(device.uuid in uuids for device in gpu.devices or ())


def _instead(gpu: GpuThread) -> list[GpuThread]:
    return [gpu] if gpu.found is None else list(map(GpuThread, gpu.found))


async def _wait(calls: Collection["asyncio.Future[list[MeasuredDevice]]"], seconds: float) -> None:
    if calls:
        await asyncio.wait(calls, timeout=max(0.0, seconds))
