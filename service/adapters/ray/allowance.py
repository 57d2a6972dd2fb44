"""How much host memory a process has taken for itself."""

import os
from collections.abc import Iterable

from service.adapters.ray.processes import descendants, process_table

_MIB = 2**20


def too_large(roots: Iterable[int], most_mb: int) -> dict[int, int]:
    """Those of these processes that take more, or have one below them that does, and how much it is."""
    table = process_table()
    found: dict[int, int] = {}
    for root in roots:
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
