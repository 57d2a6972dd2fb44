"""Processes of this machine, by identity: a pid alone may name another process a moment later."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpubroker.runtime.process import INSTANCE_MARK, RUN_MARK

PROC = Path("/proc")


def boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


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
    """One letter of ps; Z has ended and holds nothing."""


def entry_of(pid: int) -> Entry | None:
    """None if there is no such process."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold spaces and parentheses
    return Entry(ProcessId(pid, int(fields[19])), int(fields[1]), fields[0].decode())


def process_id(pid: int) -> ProcessId:
    """Raises ProcessLookupError if there is no such process."""
    entry = entry_of(pid)
    if entry is None:
        raise ProcessLookupError(pid)
    return entry.id


def process_table() -> dict[int, Entry]:
    """All processes that have not ended, by pid."""
    pids = (int(name) for name in os.listdir(PROC) if name.isdigit())
    entries = (entry_of(pid) for pid in pids)
    return {entry.id.pid: entry for entry in entries if entry is not None and entry.state != "Z"}


def name_of(pid: int) -> str:
    """What the kernel calls it, at most 15 characters; empty if it is gone."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "comm").read_text().strip()
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


def is_alive(process: ProcessId) -> bool:
    entry = entry_of(process.pid)
    return entry is not None and entry.id == process and entry.state != "Z"


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


def marked_runs(instance: str) -> Iterator[tuple[str, ProcessId]]:
    """(mark, process) of everything that runs of this broker started and that is still there."""
    wanted = f"{INSTANCE_MARK}={instance}".encode()
    prefix = f"{RUN_MARK}=".encode()
    for pid, entry in process_table().items():
        with contextlib.suppress(OSError):
            environment = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if wanted in environment:
                for line in environment:
                    if line.startswith(prefix):
                        yield line[len(prefix) :].decode(errors="replace"), entry.id


def holders_of(file: Path) -> Iterator[ProcessId]:
    """Processes that print to this file: children that were forked have no environment of their own."""
    name = str(file)
    for pid, entry in process_table().items():
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):
                if os.readlink(PROC / str(pid) / "fd" / str(descriptor)) == name:
                    yield entry.id
                    break


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
        for thread in os.listdir(PROC / str(pid) / "task"):
            with contextlib.suppress(OSError):
                stat = (PROC / str(pid) / "task" / thread / "stat").read_bytes()
                if stat[stat.rindex(b")") + 2 :][:1] in b"RS":
                    return False
    return True
