"""Processes of this machine, by identity: found, watched, killed. A pid alone is soon another process's."""

import asyncio
import contextlib
import fcntl
import os
import platform
import signal
import struct
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from gpubroker.runtime.process import INSTANCE_MARK, NODE_MARK, RUN_MARK
from msgspec import Struct

FIRST_PAUSE_SECONDS = 0.002
LONGEST_PAUSE_SECONDS = 1.0
LONGEST_REAP_PAUSE_SECONDS = 0.1
_CHUNK = 65536
_PIDFD_GET_INFO = 0xC040FF0B
"""ioctl of linux/pidfd.h: fills a `struct pidfd_info` of 64 bytes, the exit status last."""
_PIDFD_INFO_EXIT = 8
_MARKS = frozenset(mark.encode() for mark in (INSTANCE_MARK, NODE_MARK, RUN_MARK))


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def versions() -> dict[str, str]:
    """Return the versions that every node of a cluster needs to share."""
    return {"python": platform.python_version(), "ray": version("ray")}


class ProcessId(NamedTuple):
    """A process's pid and start time. With the machine's boot id they name one process for ever."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot."""


class ProcessEntry(Struct, frozen=True):
    """One line of the process table."""

    id: ProcessId
    parent: int
    state: str
    """The state of the process as one letter, as in ps."""

    @property
    def has_ended(self) -> bool:
        """A zombie (Z) or a dead process (X) neither runs nor holds memory."""
        return self.state in "ZX"


def entry_of(pid: int) -> ProcessEntry | None:
    """Return the entry of a process; None if there is no such process."""
    try:
        stat = _read(f"/proc/{pid}/stat")
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split(None, 20)  # the name before it may hold spaces
    return ProcessEntry(ProcessId(pid, int(fields[19])), int(fields[1]), fields[0].decode())


def process_id(pid: int) -> ProcessId:
    """Return the id of the process. Raises ProcessLookupError if there is no such process."""
    entry = entry_of(pid)
    if entry is None:
        raise ProcessLookupError(pid)
    return entry.id


def process_table(*, with_ended: bool = False) -> dict[int, ProcessEntry]:
    """Return all processes that have not ended, by pid; also those that wait to be reaped, if asked for."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    entries = (entry_of(pid) for pid in pids)
    return {
        entry.id.pid: entry for entry in entries if entry is not None and (with_ended or not entry.has_ended)
    }


def name_of(pid: int) -> str:
    """The kernel's name of it, at most 15 characters; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def session_of(pid: int) -> int:
    """Return the pid of the leader of its session, alive or not; 0 if the process is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def descendants(root: int, table: dict[int, ProcessEntry]) -> list[ProcessId]:
    """Return every process below `root`, without itself."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry)
    found: list[ProcessId] = []
    below = [root]
    while below:
        for entry in children.pop(below.pop(), ()):
            found.append(entry.id)
            below.append(entry.id.pid)
    return found


def ancestors(pid: int, table: dict[int, ProcessEntry]) -> set[int]:
    """A process and everything above it."""
    found: set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid].parent
    return found


def are_related(first: int, second: int, table: dict[int, ProcessEntry]) -> bool:
    """Return True if one is the other, above it or below it."""
    return first in ancestors(second, table) or second in ancestors(first, table)


def is_alive(process: ProcessId) -> bool:
    entry = entry_of(process.pid)
    return entry is not None and entry.id == process and not entry.has_ended


def marks_of(pid: int) -> dict[str, str]:
    """Return what the process's environment says about the run that started it; empty if no run did."""
    with contextlib.suppress(OSError):
        items = (item.partition(b"=") for item in _read(f"/proc/{pid}/environ").split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(text) for name, _, text in items if name in _MARKS}
    return {}


def files_opened_by(pid: int) -> Iterator[str]:
    """The files that it has open, by the names that they had when it opened them."""
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def private_mb(pid: int) -> int:
    """Return the host memory in MiB that no file backs, so that the kernel cannot drop it. 0 if the process
    is gone."""
    try:
        fields = _read(f"/proc/{pid}/statm").split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") // 2**20 if len(fields) > 2 else 0


def private_mb_below(roots: Collection[int]) -> dict[int, list[int]]:
    """Return the host memory of each of these processes, and of each process below it."""
    table = process_table() if roots else {}
    return {
        root: [private_mb(pid) for pid in (root, *(process.pid for process in descendants(root, table)))]
        for root in roots
    }


def disjoint_trees(roots: Mapping[str, ProcessId]) -> dict[str, frozenset[int]]:
    """Return each process that is alive, with everything below it. A process below two of them belongs to the
    first."""
    table = process_table() if roots else {}
    found: dict[str, frozenset[int]] = {}
    taken: set[int] = set()
    for name, root in roots.items():
        if root.pid in table and table[root.pid].id == root:
            tree = {root.pid, *(child.pid for child in descendants(root.pid, table))}
            found[name] = frozenset(tree - taken)
            taken |= tree
    return found


def has_stopped(pid: int) -> bool:
    """Return True if no thread of a process that got SIGSTOP runs user code any more."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                stat = _read(f"/proc/{pid}/task/{thread}/stat")
                if stat[stat.rindex(b")") + 2 :].startswith((b"R", b"S")):
                    return False
    return True


def _read(path: str) -> bytes:
    """Read a file of /proc, of which there are many small ones: ten times as fast as `Path.read_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _CHUNK)
        while len(data) % _CHUNK == 0 and (more := os.read(descriptor, _CHUNK)):
            data += more
        return data
    finally:
        os.close(descriptor)


def exit_status_of(descriptor: int) -> int | None:
    """Return the status, in the form of `os.wait`, of a process for which its parent has waited; None on
    kernels before 6.15, which tell only the parent."""
    with contextlib.suppress(OSError):
        info = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
        known, status = struct.unpack("=Q52xi", info)
        if known & _PIDFD_INFO_EXIT:
            return int(status)
    return None


class WatchedProcess:
    """Notices the end of a process at once. Belongs to the running event loop."""

    def __init__(self, process: ProcessId, on_end: Callable[[], None] | None = None) -> None:
        """Raise ProcessLookupError if the process is gone."""
        self.id = process
        self._descriptor = os.pidfd_open(process.pid)
        self._release = weakref.finalize(self, os.close, self._descriptor)
        if not is_alive(process):
            self._release()
            raise ProcessLookupError(process.pid)
        self._ended = asyncio.Event()
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._note_end)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def exit_status(self) -> int | None:
        """Return the exit status, as `exit_status_of`. Waits a moment for the parent of a process that has
        ended."""
        pause = FIRST_PAUSE_SECONDS
        while (
            (entry := entry_of(self.id.pid)) is not None
            and entry.id == self.id
            and pause < LONGEST_REAP_PAUSE_SECONDS
        ):
            await asyncio.sleep(pause)
            pause *= 2
        return exit_status_of(self._descriptor) if self._release.alive else None

    async def wait(self) -> None:
        await self._ended.wait()

    def signal(self, number: signal.Signals) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Stop watching; the end is not noticed any more."""
        if not self.ended:
            self._loop.remove_reader(self._descriptor)
        self._release()

    def _note_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._ended.set()
        if self._on_end is not None:
            self._on_end()


def send_signal(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to the process if it still exists. Never reaches another process that got its pid."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if is_alive(process):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def kill_all(processes: Collection[ProcessId]) -> None:
    for process in processes:
        send_signal(process, signal.SIGKILL)


async def kill_tree(root: WatchedProcess) -> None:
    """Kill a run's process with everything below it; back when all of it has ended.

    The process adopts its orphans, so all its descendants are below it while it lives. It is stopped first,
    so that it starts no child while its tree is being emptied. Waits for ever on a process that the kernel
    does not release.
    """

    def is_emptied() -> bool:
        below = descendants(root.id.pid, process_table())
        kill_all(below)
        return not below

    await _until(lambda: has_stopped(root.id.pid) and is_emptied(), stopping=root)
    root.signal(signal.SIGKILL)
    await root.wait()


async def kill_leftovers(instance: str, mark: str, log: Path, since_ticks: int = 0) -> None:
    """Kill everything that a run of this broker started after `since_ticks`; back when none of it is left.

    Found by the mark in its environment, or by the run's log being open: a child that was forked and never
    called exec shows the environment of the process that it was forked from.
    """
    marks = {RUN_MARK: mark, INSTANCE_MARK: instance}

    def is_left(pid: int) -> bool:
        return str(log) in files_opened_by(pid) or marks.items() <= marks_of(pid).items()

    def are_gone() -> bool:
        ids = [
            e.id for e in process_table().values() if e.id.start_ticks >= since_ticks and is_left(e.id.pid)
        ]
        kill_all(ids)
        return not ids

    await _until(are_gone)


async def _until(done: Callable[[], bool], stopping: WatchedProcess | None = None) -> None:
    """Ask again, less and less often, in a thread: reading the process table of a large machine takes time.

    `stopping` gets SIGSTOP before each look, since others may continue it; back at once when it has ended.
    """
    pause = FIRST_PAUSE_SECONDS
    while stopping is None or not stopping.ended:
        if stopping is not None:
            stopping.signal(signal.SIGSTOP)
        if await asyncio.to_thread(done):
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
