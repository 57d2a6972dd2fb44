"""How much host memory a process has taken for itself, and which runs have a process that takes too much."""

import asyncio
import os
from collections.abc import Collection, Mapping

import structlog

from gpubroker_server.adapters.ray.agent.run_table import Run
from gpubroker_server.adapters.ray.agent.runner_process import Lane
from gpubroker_server.adapters.ray.processes import descendants, process_table

log = structlog.get_logger("gpubroker.agent")

_MIB = 2**20


async def breakers(runs: Collection[Run], most_mb: int) -> list[Lane]:
    """Lanes of which a process has taken more than `most_mb`, or than a run in it asked for if that is more.
    Each is named once, and says why."""
    lanes: dict[int, Lane] = {}
    limits_mb: dict[int, int] = {}
    for run in runs:
        if run.lane is not None and not run.lane.breach:
            pid = run.lane.watched.id.pid
            lanes[pid] = run.lane
            limits_mb[pid] = max(most_mb, limits_mb.get(pid, 0), run.order.memory_mb)
    if not lanes:
        return []
    broken = []
    for pid, mb in (await asyncio.to_thread(too_large, limits_mb)).items():
        lane = lanes[pid]
        if not lane.watched.ended:
            lane.breach = (
                f"one of its processes took {mb} MiB of host memory, and each may have "
                f"{limits_mb[pid]} MiB here (ray.process_memory_mb, or what the task asks for "
                "as memory_mb where that is more)"
            )
            log.warning("a run takes too much host memory", runner=lane.name, fault=lane.breach)
            broken.append(lane)
    return broken


def too_large(limits_mb: Mapping[int, int]) -> dict[int, int]:
    """Those of these processes that take more, or have one below them that does, and how much it is."""
    table = process_table()
    found: dict[int, int] = {}
    for root, most_mb in limits_mb.items():
        pids = [root, *(process.pid for process in descendants(root, table))]
        largest = max(map(private_mb, pids))
        if largest > most_mb:
            found[root] = largest
    return found


def private_mb(pid: int) -> int:
    """MiB in memory that it shares with no file and nobody else: files that are only mapped can be dropped.
    0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            fields = statm.read().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") // _MIB if len(fields) > 2 else 0
