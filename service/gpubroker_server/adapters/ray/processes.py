"""Finds, watches and kills processes of this machine. They are identified by pid and start time, because a
pid is soon used for another process."""

import asyncio
import contextlib
import fcntl
import os
import platform
import signal
import struct
import time
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
"""The ioctl of linux/pidfd.h that fills a `struct pidfd_info` of 64 bytes, whose last field is the exit
status."""
_PIDFD_INFO_EXIT = 8
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD in the flags of /proc/<pid>/stat."""
SEARCHES_AFTER_A_FIND = 4
"""The number of whole searches in a row that must find nothing, once one has found a process."""
_READS = 3
BARE_SECONDS = 10.0
"""The time for which a process without arguments and environment may belong to a run."""
_MARKS = frozenset(mark.encode() for mark in (INSTANCE_MARK, NODE_MARK, RUN_MARK))


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def versions() -> dict[str, str]:
    """Return the versions that must be equal on every node of a cluster."""
    return {"python": platform.python_version(), "ray": version("ray")}


class ProcessId(NamedTuple):
    """The pid and the start time of a process. Together with the machine's boot id they identify it for
    ever."""

    pid: int
    start_ticks: int
    """The start time in clock ticks since boot."""


class ProcessEntry(Struct, frozen=True):
    """One line of the process table."""

    id: ProcessId
    parent: int
    state: str
    """The state of the process as one letter, as in ps."""

    @property
    def has_ended(self) -> bool:
        """True for a zombie (Z) or a dead process (X), which neither runs nor holds memory."""
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
    """Return all processes by pid. Those that have ended and wait to be reaped are included only with
    `with_ended`."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    entries = (entry_of(pid) for pid in pids)
    return {
        entry.id.pid: entry for entry in entries if entry is not None and (with_ended or not entry.has_ended)
    }


def name_of(pid: int) -> str:
    """Return the kernel's name of a process, of at most 15 characters; empty if the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def session_of(pid: int) -> int:
    """Return the pid of the leader of a process's session, alive or not; 0 if the process is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def descendants(root: int, table: dict[int, ProcessEntry]) -> list[ProcessId]:
    """Return all descendants of `root`, without `root` itself."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry)
    processes: list[ProcessId] = []
    parents = [root]
    while parents:
        for entry in children.pop(parents.pop(), ()):
            processes.append(entry.id)
            parents.append(entry.id.pid)
    return processes


def ancestors(pid: int, table: dict[int, ProcessEntry]) -> set[int]:
    """Return a process and all its ancestors, as pids."""
    pids: set[int] = set()
    while pid in table and pid not in pids:
        pids.add(pid)
        pid = table[pid].parent
    return pids


def are_related(first: int, second: int, table: dict[int, ProcessEntry]) -> bool:
    """Return True if the two processes are the same, or one is an ancestor of the other."""
    return first in ancestors(second, table) or second in ancestors(first, table)


def is_alive(process: ProcessId) -> bool:
    entry = entry_of(process.pid)
    return entry is not None and entry.id == process and not entry.has_ended


def marks_of(pid: int) -> dict[str, str]:
    """Return the variables in a process's environment that name the run that started it; empty if no run
    did."""
    return _marks_in(_environment_of(pid) or b"")


def _marks_in(environment: bytes) -> dict[str, str]:
    items = (item.partition(b"=") for item in environment.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(text) for name, _, text in items if name in _MARKS}


def _environment_of(pid: int) -> bytes | None:
    """Return the environment of a process; empty if it has none, is gone, or belongs to another user. Return
    None if it cannot be told now.

    A process shows neither arguments nor environment for a moment while it calls exec, and when it ends. As
    both are read one after the other, they are read again before the environment counts as empty.
    """
    with contextlib.suppress(OSError):
        for _ in range(_READS):
            if environment := _read(f"/proc/{pid}/environ"):
                # A process that calls exec between two reads of a large environment cuts it off.
                return environment if len(environment) % _CHUNK else None
            if not _read(f"/proc/{pid}/cmdline"):
                stat = _read(f"/proc/{pid}/stat")
                state, *fields = stat[stat.rindex(b")") + 2 :].split(None, 7)
                has_none = state in (b"Z", b"X") or int(fields[5]) & _KERNEL_THREAD
                return b"" if has_none else None
    return b""


def files_opened_by(pid: int) -> Iterator[str]:
    """Yield the paths of the files that a process has open, as they were when it opened them."""
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def private_mb(pid: int) -> int:
    """Return the host memory of a process in MiB that no file backs, so that the kernel cannot drop it; 0 if
    the process is gone."""
    try:
        fields = _read(f"/proc/{pid}/statm").split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") // 2**20 if len(fields) > 2 else 0


def private_mb_below(roots: Collection[int]) -> dict[int, list[int]]:
    """Return, for each of these processes, its host memory in MiB and that of each of its descendants."""
    table = process_table() if roots else {}
    return {
        root: [private_mb(pid) for pid in (root, *(process.pid for process in descendants(root, table)))]
        for root in roots
    }


def disjoint_trees(roots: Mapping[str, ProcessId]) -> dict[str, frozenset[int]]:
    """Return the pids of each root that is alive and of its descendants. A descendant of two roots belongs
    to the first."""
    table = process_table() if roots else {}
    trees: dict[str, frozenset[int]] = {}
    taken: set[int] = set()
    for name, root in roots.items():
        if root.pid in table and table[root.pid].id == root:
            tree = {root.pid, *(child.pid for child in descendants(root.pid, table))}
            trees[name] = frozenset(tree - taken)
            taken |= tree
    return trees


def has_stopped(pid: int) -> bool:
    """Return True if no thread of a process runs user code any more after SIGSTOP was sent to it."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                stat = _read(f"/proc/{pid}/task/{thread}/stat")
                if stat[stat.rindex(b")") + 2 :].startswith((b"R", b"S")):
                    return False
    return True


def _read(path: str) -> bytes:
    """Return the contents of a file of /proc. This is ten times as fast as `Path.read_bytes`, and many small
    files are read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _CHUNK)
        while len(data) % _CHUNK == 0 and (more := os.read(descriptor, _CHUNK)):
            data += more
        return data
    finally:
        os.close(descriptor)


def exit_status_of(descriptor: int) -> int | None:
    """Return the status, as `os.wait` returns it, of a process that its parent has reaped; None on kernels
    before 6.15, which tell it only to the parent."""
    with contextlib.suppress(OSError):
        info = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
        known, status = struct.unpack("=Q52xi", info)
        if known & _PIDFD_INFO_EXIT:
            return int(status)
    return None


class WatchedProcess:
    """Watches a process and calls `on_end` as soon as it ends. It uses the running event loop."""

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
        """Return the exit status as `exit_status_of` does. If the process has ended, this waits a moment
        until its parent has reaped it."""
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
        """Stop watching. `on_end` is not called any more."""
        if not self.ended:
            self._loop.remove_reader(self._descriptor)
        self._release()

    def _note_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._ended.set()
        if self._on_end is not None:
            self._on_end()


def send_signal(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to the process if it still exists. The signal never reaches another process with the
    same pid."""
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
    """Kill a run's process and all its descendants, and return when all of them have ended.

    The process adopts its orphans, so all its descendants are below it while it lives. It is stopped first,
    so that it starts no child while its descendants are killed. This waits for ever if the kernel does not
    release a process.
    """

    def is_emptied() -> bool:
        below = descendants(root.id.pid, process_table())
        kill_all(below)
        return not below

    await _until(lambda: has_stopped(root.id.pid) and is_emptied(), stopping=root)
    root.signal(signal.SIGKILL)
    await root.wait()


async def kill_leftovers(instance: str, mark: str, log: Path, since_ticks: int = 0) -> None:
    """Kill all processes of a run of this broker that began after `since_ticks`, and return when none of
    them is left.

    A process belongs to the run if its environment has the run's mark, or if it has the run's log open. The
    mark alone is not enough: a child that was forked and never called exec shows the environment of its
    parent. A process that is just calling exec, or ending, shows nothing: it is looked at again, for a while.
    """
    marks = {RUN_MARK: mark, INSTANCE_MARK: instance}
    bare_since: dict[ProcessId, float] = {}
    searches_to_come = 1

    def is_left(process: ProcessId) -> bool | None:
        """Return None if that cannot be told now."""
        if str(log) in files_opened_by(process.pid):
            return True
        environment = _environment_of(process.pid)
        if environment is not None:
            return marks.items() <= _marks_in(environment).items()
        since = bare_since.setdefault(process, time.monotonic())
        return None if time.monotonic() - since < BARE_SECONDS else False

    def are_gone() -> bool:
        nonlocal searches_to_come
        new = [e.id for e in process_table().values() if e.id.start_ticks >= since_ticks]
        found = [(process, is_left(process)) for process in new]
        kill_all([process for process, left in found if left])
        if any(left is not False for _, left in found):
            # One that was started during this search may not be in the table that the search has read.
            searches_to_come = SEARCHES_AFTER_A_FIND
            return False
        searches_to_come -= 1
        return searches_to_come <= 0

    await _until(are_gone)


async def _until(done: Callable[[], bool], stopping: WatchedProcess | None = None) -> None:
    """Call `done` at growing intervals until it returns True. It runs in a thread, because reading the
    process table of a large machine takes time.

    `stopping` gets SIGSTOP before each call, because another process may continue it. This returns at once
    when `stopping` has ended.
    """
    pause = FIRST_PAUSE_SECONDS
    while stopping is None or not stopping.ended:
        if stopping is not None:
            stopping.signal(signal.SIGSTOP)
        if await asyncio.to_thread(done):
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
