"""Measures the devices of a machine, each GPU in a thread of its own: one that hangs holds up no other."""

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
"""Samples of other devices wait no longer for one that does not answer. Three of the usual periods make a
sample too old to plan by."""
RESTART_SECONDS = 60.0
"""If no device has answered for so long, the driver's library is started anew: some GPUs are back for new
processes only, and their number is that of the first start."""
SILENT_SECONDS = 30.0
"""A device that could not be measured for so long is reported, and no run that has ended waits for it."""

Holders = Mapping[str, ProcessGroup]


class NotMeasured(Exception):
    """A device that a caller needs to know about could not be measured."""


class Inventory(Struct, frozen=True):
    devices: tuple[ReportedDevice, ...]
    """The devices of the machine, without lost ones."""
    faults: tuple[tuple[str, str], ...]
    """(UUID, or the device's usual name while its UUID is unknown; why the device cannot be used)"""
    complete: bool
    """True if every GPU has been read or is lost, so that a device that is not in the list is not in use."""
    absence: str = ""
    """Why the machine shows no GPU at all; empty if it shows one, or if that is a fault."""


class GpuThread:
    """One probe, its thread, and what was last read."""

    def __init__(self, probe: DeviceProbe) -> None:
        self.devices: tuple[ReportedDevice, ...] | None = None
        """None before the first answer; empty while lost."""
        self.is_lost = False
        self.absence = ""
        """Why there is no device, if the machine shows none."""
        self.health: dict[str, GpuHealth] = {}
        """UUID -> health as last read, of the GPUs that answer now."""
        self.found: Sequence[DeviceProbe] | None = None
        """The devices that are to be asked instead."""
        self._probe = probe
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=probe.name)
        self._began: float | None = None
        """When the call began that is under way."""
        self._names: tuple[str, ...] = (probe.name,)
        """The names of the device in faults: the UUIDs if they are known."""
        self._silent: dict[str, tuple[str, float]] = {}
        """Device that cannot be measured -> (reason, since when)."""

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
        """A question would wait behind one that is not answered."""
        began = self._began  # its thread may set it back at any moment
        return began is not None and time.monotonic() - began > STRAGGLER_SECONDS

    async def measure(self, holders: Holders) -> list[MeasuredDevice]:
        """Empty if it cannot be measured."""
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
        """A device that was measured before may fail once without being reported."""
        if self.absence:
            return
        at_once = self.devices is None or self.is_lost
        for name, (fault, _) in self._silent.items():
            if at_once or not self._is_awaited(name):
                yield name, fault

    def awaited(self) -> set[str]:
        """The devices of which a measurement is soon to be had; the empty name for any that is unknown."""
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
    """All devices of a machine. It has one thread per GPU, and one more, however many calls hang."""

    def __init__(
        self, probes: Sequence[DeviceProbe], restart: Callable[[], Sequence[DeviceProbe]] | None = None
    ) -> None:
        """`restart` starts the driver's library anew and returns what there is then. It may hang."""
        self._gpus = list(map(GpuThread, probes))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meter")
        self._restart = restart
        self._restarting: Future[Sequence[DeviceProbe]] | None = None
        self._out_since: float | None = None
        """The time since which no device answers."""

    def inventory(self) -> Inventory:
        """Return the devices as last measured. MIG instances are numbered after all GPUs."""
        devices = [device for gpu in self._gpus for device in gpu.devices or ()]
        whole = [device for device in devices if device.simulated or not device.parent]
        parts = [device for device in devices if device.parent and not device.simulated]
        numbered = [replace(part, index=len(self._gpus) + n) for n, part in enumerate(parts)]
        faults = sorted(fault for gpu in self._gpus for fault in gpu.faults())
        complete = all(gpu.devices is not None for gpu in self._gpus)
        absence = next((gpu.absence for gpu in self._gpus if gpu.absence), "")
        return Inventory((*whole, *numbered), tuple(faults), complete, absence)

    def health(self) -> dict[str, GpuHealth]:
        """Return the health of the GPUs that were measured the last time, by UUID."""
        return {uuid: health for gpu in self._gpus for uuid, health in gpu.health.items()}

    async def measure(
        self,
        holders: Callable[[], Holders],
        needed: Collection[str] = (),
        timeout_seconds: float = MEASURE_SECONDS,
    ) -> Sequence[MeasuredDevice]:
        """`holders` is called in a thread. Devices that do not answer are left out.

        Waits longer for the `needed` UUIDs, and for GPUs that are asked for the first time.

        Raises TimeoutError, and NotMeasured if a needed one is in this machine and was not silent for long.
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
        """Start the library anew if no device has answered for long: nothing is lost by it then."""
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
