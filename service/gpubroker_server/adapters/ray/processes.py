"""Processes of this machine, by identity: a pid alone may name another process a moment later."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpubroker.runtime.process import INSTANCE_MARK, NODE_MARK, RUN_MARK

_CHUNK = 65536
_MARKS = frozenset(mark.encode() for mark in (INSTANCE_MARK, NODE_MARK, RUN_MARK))


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class ProcessId(NamedTuple):
    """With the machine's boot id this names one process for ever."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the process table."""

    id: ProcessId
    parent: int
    state: str
    """One letter, as in ps."""

    @property
    def has_ended(self) -> bool:
        """Z waits to be buried, X is being buried; neither runs or holds anything."""
        return self.state in "ZX"


def entry_of(pid: int) -> Entry | None:
    """None if there is no such process."""
    try:
        stat = _read(f"/proc/{pid}/stat")
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split(None, 20)  # the name before it may hold spaces
    return Entry(ProcessId(pid, int(fields[19])), int(fields[1]), fields[0].decode())


def process_id(pid: int) -> ProcessId:
    """Raises ProcessLookupError if there is no such process."""
    entry = entry_of(pid)
    if entry is None:
        raise ProcessLookupError(pid)
    return entry.id


def process_table() -> dict[int, Entry]:
    """All processes that have not ended, by pid."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    entries = (entry_of(pid) for pid in pids)
    return {entry.id.pid: entry for entry in entries if entry is not None and not entry.has_ended}


def name_of(pid: int) -> str:
    """What the kernel calls it, at most 15 characters; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def session_of(pid: int) -> int:
    """Process id of its session's leader, dead or alive; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def descendants(root: int, table: dict[int, Entry]) -> list[ProcessId]:
    """Everything below `root`, without itself."""
    children: dict[int, list[Entry]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry)
    found: list[ProcessId] = []
    below = [root]
    while below:
        for entry in children.pop(below.pop(), ()):
            found.append(entry.id)
            below.append(entry.id.pid)
    return found


def lineage(pid: int, table: dict[int, Entry]) -> set[int]:
    """A process and everything above it."""
    found: set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid].parent
    return found


def are_related(one: int, other: int, table: dict[int, Entry]) -> bool:
    """Whether one is the other, above it or below it."""
    return one in lineage(other, table) or other in lineage(one, table)


def is_marked(pid: int, instance: str) -> bool:
    """Whether a run of this broker started it, even if it has left the run's tree since."""
    return _has_marks(pid, {f"{INSTANCE_MARK}={instance}".encode()})


def is_alive(process: ProcessId) -> bool:
    entry = entry_of(process.pid)
    return entry is not None and entry.id == process and not entry.has_ended


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """False if it is gone. Never reaches another process that got its pid."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def leftovers(instance: str, mark: str, log: Path, since_ticks: int) -> list[ProcessId]:
    """Everything a run of this broker started, after `since_ticks`, that is still there.

    Found by the mark in its environment, or by the run's log being open: a child that was forked and never
    executed anything shows the environment of the process that it was forked from.
    """
    marks = {f"{RUN_MARK}={mark}".encode(), f"{INSTANCE_MARK}={instance}".encode()}
    young = (entry for entry in process_table().values() if entry.id.start_ticks >= since_ticks)
    ids = (entry.id for entry in young)
    return [id for id in ids if str(log) in opened_by(id.pid) or _has_marks(id.pid, marks)]


def marks_of(pid: int) -> dict[str, str]:
    """What its environment says of the run that it belongs to; empty if it is nobody's."""
    with contextlib.suppress(OSError):
        told = (item.partition(b"=") for item in _read(f"/proc/{pid}/environ").split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(text) for name, _, text in told if name in _MARKS}
    return {}


def opened_by(pid: int) -> Iterator[str]:
    """The files that it has open, by the names that they had then."""
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def _has_marks(pid: int, marks: set[bytes]) -> bool:
    with contextlib.suppress(OSError):
        return marks <= set(_read(f"/proc/{pid}/environ").split(b"\0"))
    return False


def _read(path: str) -> bytes:
    """Small files of /proc, many at a time: a tenth of what `Path.read_bytes` takes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _CHUNK)
        while len(data) % _CHUNK == 0 and (more := os.read(descriptor, _CHUNK)):
            data += more
        return data
    finally:
        os.close(descriptor)


class Watched:
    """A process whose end is noticed at once. Belongs to the running event loop."""

    def __init__(self, process: ProcessId, on_end: Callable[[], None] | None = None) -> None:
        """Raises ProcessLookupError if it is gone."""
        self.id = process
        self._descriptor = os.pidfd_open(process.pid)
        if not is_alive(process):
            os.close(self._descriptor)
            raise ProcessLookupError(process.pid)
        self._ended = asyncio.Event()
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._note_end)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> None:
        await self._ended.wait()

    def signal(self, number: signal.Signals) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Look away; the end is not noticed any more."""
        if not self.ended:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

    def _note_end(self) -> None:
        self.close()
        self._ended.set()
        if self._on_end is not None:
            self._on_end()


def kill_all(processes: Collection[ProcessId]) -> None:
    for process in processes:
        send_signal(process, signal.SIGKILL)


def has_stopped(pid: int) -> bool:
    """Whether every thread of a process that got SIGSTOP stands still (or is in the kernel, or gone)."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                stat = _read(f"/proc/{pid}/task/{thread}/stat")
                if stat[stat.rindex(b")") + 2 :].startswith((b"R", b"S")):
                    return False
    return True
