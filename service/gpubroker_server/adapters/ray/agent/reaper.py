"""Ends the processes of a run, and proves that none of them is left."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from gpubroker_server.adapters.ray.processes import (
    ProcessId,
    Watched,
    descendants,
    has_stopped,
    kill_all,
    leftovers,
    process_table,
)

FIRST_PAUSE_SECONDS = 0.002
LONGEST_PAUSE_SECONDS = 1.0


async def put_down(runner: Watched) -> None:
    """Kill a run's process with everything below it; back when all of it has ended.

    The process adopts its orphans, so all its descendants are below it for as long as it lives. It is stopped
    first: what stands still starts no child while its tree is being emptied. Waits for ever on a process
    that the kernel does not let go.
    """
    await _until(lambda: has_stopped(runner.id.pid) and not _kill_below(runner.id), stopping=runner)
    runner.signal(signal.SIGKILL)
    await runner.wait()


async def sweep(instance: str, mark: str, log: Path, since_ticks: int = 0) -> None:
    """Kill what a run left behind anywhere on this machine; back when a look around finds nothing."""
    await _until(lambda: not _kill_leftovers(instance, mark, log, since_ticks))


def _kill_below(runner: ProcessId) -> bool:
    left = descendants(runner.pid, process_table())
    kill_all(left)
    return bool(left)


def _kill_leftovers(instance: str, mark: str, log: Path, since_ticks: int) -> bool:
    left = leftovers(instance, mark, log, since_ticks)
    kill_all(left)
    return bool(left)


async def _until(done: Callable[[], bool], stopping: Watched | None = None) -> None:
    """Ask again, less and less often, in a thread: the process table of a large machine takes a while.

    `stopping` is stopped before each look, since others may let it go on; back at once when it has ended.
    """
    pause = FIRST_PAUSE_SECONDS
    while stopping is None or not stopping.ended:
        if stopping is not None:
            stopping.signal(signal.SIGSTOP)
        if await asyncio.to_thread(done):
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
