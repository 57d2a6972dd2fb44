"""Measures the CPUs, memory, disks and network of a node's machine, and Ray's object store there."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from operator import sub
from pathlib import Path
from typing import NamedTuple

import psutil
import structlog
from gpubroker.runtime.messages import Report
from msgspec.structs import astuple

from gpubroker_server.adapters.ray.peers import PeerPorts
from gpubroker_server.core.domain.device import GpuHealth
from gpubroker_server.core.domain.units import MIB_BYTES

log = structlog.get_logger("gpubroker.agent")

ANSWER_SECONDS = 0.5
"""The longest wait of a sample for a file system. After it the file system is left out of the sample, and is
asked again only once it has answered."""
MAX_BYTES = 2**62
"""The largest size that is reported of a file system. Some network file systems report a size beyond the
limit of a report's field."""
PRESSURE = Path("/proc/pressure/memory")

Answer = tuple[int, ...] | None


class FileQuestion:
    """A question about files that can be asked again and again. It has a thread of its own, because a file
    on a hung mount blocks the thread."""

    def __init__(self, path: str, ask: Callable[[str], tuple[int, ...]]) -> None:
        self._path = path
        self._ask = ask
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path)
        self._asked: Future[Answer] | None = None
        self._fault = ""
        """The reason why the last answer is missing."""

    def begin(self) -> "asyncio.Future[Answer] | None":
        """Ask the question. Returns the future answer, which is None if the question fails; returns None if
        the previous question has no answer yet."""
        if self._asked is not None and not self._asked.done():
            self._note("it does not answer")
            return None
        self._asked = self._thread.submit(self._answer)
        return asyncio.wrap_future(self._asked)

    def _answer(self) -> Answer:
        try:
            answer = self._ask(self._path)
        except OSError as fault:
            self._note(fault.strerror or repr(fault))
            return None
        self._fault = ""
        return answer

    def _note(self, fault: str) -> None:
        if fault != self._fault:
            self._fault = fault
            log.warning("a directory cannot be measured", path=self._path, fault=fault)


class RaySession(NamedTuple):
    """The session of Ray on a node."""

    directory: str
    spill_directory: str
    """The directory into which Ray spills objects when memory is short, unless Ray is configured
    otherwise."""
    object_store_bytes: int
    """The size of the object store; 0 if the session has none, or it is unknown."""


class Network(NamedTuple):
    received_bytes: int
    sent_bytes: int
    share: float | None
    """The share of its speed that the busiest interface has used since the previous measurement, in its
    busier direction; None if no interface has a known speed."""


class NetworkMeter:
    """Measures the traffic of all network interfaces but loopback."""

    def __init__(self) -> None:
        self._bytes: Mapping[str, tuple[int, int]] = {}
        """The bytes that each interface had received and sent at the previous measurement."""
        self._read_at = 0.0

    def read(self) -> Network:
        before, seconds = self._bytes, time.monotonic() - self._read_at
        counters = psutil.net_io_counters(pernic=True).items()
        self._bytes = {
            name: (counts.bytes_recv, counts.bytes_sent) for name, counts in counters if name != "lo"
        }
        self._read_at += seconds
        shares = [
            8 * max(map(sub, self._bytes[name], before[name])) / (about.speed * 1e6 * seconds)
            for name, about in psutil.net_if_stats().items()
            if about.speed and name in self._bytes and name in before
        ]
        share = max(0.0, min(1.0, max(shares))) if shares else None
        received, sent = map(sum, zip((0, 0), *self._bytes.values(), strict=True))
        return Network(received, sent, share)


class HostMeter:
    def __init__(self, session: RaySession, directories: Iterable[str]) -> None:
        """`directories` are those whose file systems are measured besides that of the session."""
        paths = dict.fromkeys((session.directory, *directories))
        self._disks = {path: FileQuestion(path, room_and_device_of) for path in paths}
        self._spill = FileQuestion(session.spill_directory, _total_mb)
        self._store_mb = session.object_store_bytes // MIB_BYTES
        self._network = NetworkMeter()
        self.peers = PeerPorts()
        psutil.cpu_percent()  # each call measures the time since the previous one

    async def report(self, gpus: Mapping[str, GpuHealth]) -> Report:
        """Return a `node_sampled` report with the values that are available within ANSWER_SECONDS."""
        at, memory, network = time.time(), psutil.virtual_memory(), self._network.read()
        cpu = min(1.0, psutil.cpu_percent() / 100)
        asked = {path: answer for path, disk in self._disks.items() if (answer := disk.begin())}
        spill = self._spill.begin() if self._store_mb else None
        if waited := [*asked.values(), *([spill] if spill else ())]:
            await asyncio.wait(waited, timeout=ANSWER_SECONDS)
        rooms = {path: room for path, answer in asked.items() if (room := _given(answer))}
        # All directories on one disk get equal numbers, by which the leader recognizes the shared disk.
        by_device = {device: (total, free) for total, free, device in rooms.values()}
        disks = [(path, *by_device[device]) for path, (_, _, device) in rooms.items()]
        spilled = _given(spill)
        return (
            "node_sampled",
            at,
            cpu,
            memory.total // MIB_BYTES,
            memory.available // MIB_BYTES,
            _memory_pressure(),
            disks,
            network.received_bytes,
            network.sent_bytes,
            (self._store_mb, spilled[0] if spilled else None) if self._store_mb else None,
            {uuid: astuple(health) for uuid, health in gpus.items()},
            network.share,
            self.peers.unreached,
        )


def _given(answer: "asyncio.Future[Answer] | None") -> Answer:
    return answer.result() if answer is not None and answer.done() else None


def room_of(path: str) -> tuple[int, int]:
    """Return the total and the free bytes of a file system, as `df` shows them: without bytes that are
    reserved for root or by a quota."""
    status = os.statvfs(path)
    used, free = status.f_blocks - status.f_bfree, status.f_bavail
    total_bytes, free_bytes = (used + free) * status.f_frsize, free * status.f_frsize
    return min(total_bytes, MAX_BYTES), min(free_bytes, MAX_BYTES)


def room_and_device_of(path: str) -> tuple[int, int, int]:
    """Return the total and the free bytes of a file system, as `room_of` does, and its device number."""
    return *room_of(path), os.stat(path).st_dev


def _total_mb(path: str) -> tuple[int]:
    """Return the MiB of the files in a spill directory; 0 before Ray has made it. Ray may delete files
    meanwhile."""
    total_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                total_bytes += os.stat(os.path.join(path, name)).st_size
    return (total_bytes // MIB_BYTES,)


def _memory_pressure() -> float | None:
    """Return the share of the last 10 s in which processes waited for memory; None if the kernel does not
    report it."""
    try:
        fields = PRESSURE.read_text().split()
        return min(1.0, float(fields[1].removeprefix("avg10=")) / 100)
    except (OSError, IndexError, ValueError):
        return None
