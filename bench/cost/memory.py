"""Measure the bytes that an operation leaves behind, by process, and those that it takes at most.

The parts of all processes run in one process here, so what allocated a block is told by the file of the
innermost frame that only one of them has. Blocks whose frames say nothing, such as those of the event loop,
are left out.
"""

import gc
import statistics
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from bench.cost.counting import AGENT, CLIENT, DRIVER, RUNNER, SERVICE

FRAMES = 16

_PROCESSES = (
    ("/adapters/ray/driver/process.py", DRIVER),
    ("/adapters/ray/driver/node_link.py", DRIVER),
    ("/adapters/ray/driver/calls.py", DRIVER),
    ("/adapters/ray/agent/runner.py", RUNNER),
    ("/gpubroker/runtime/host.py", RUNNER),
    ("/adapters/ray/agent/", AGENT),
    ("/bench/cost/", CLIENT),
    ("/gpubroker_server/adapters/ray/wire.py", ""),
    ("/gpubroker_server/telemetry/", ""),
    ("/gpubroker_server/", SERVICE),
)
"""(part of a path, the process whose code it is, or nothing if several processes have it). The first entry
that matches counts."""


class Memory(NamedTuple):
    live_bytes: dict[str, float]
    """Process -> the bytes per operation that it has allocated and not freed, after a full collection."""
    peak_bytes: float
    """The largest memory of all processes together above their memory before the operation, as the median
    over the operations."""


async def measure_memory(operate: Callable[[], Awaitable[object]], times: int) -> Memory:
    gc.collect()
    tracemalloc.start(FRAMES)
    peaks = []
    for _ in range(times):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        await operate()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    live = live_by_process()
    return Memory({name: size / times for name, size in live.items()}, statistics.median(peaks))


def live_by_process() -> dict[str, float]:
    """Return the bytes that were allocated since `tracemalloc` began and not freed, by process, and end
    `tracemalloc`."""
    gc.collect()
    live: Counter[str] = Counter()
    for trace in tracemalloc.take_snapshot().traces:
        live[_process_of(trace.traceback)] += trace.size
    tracemalloc.stop()
    return {name: float(size) for name, size in live.items()}


def _process_of(frames: tracemalloc.Traceback) -> str:
    for frame in reversed(frames):  # the innermost frame is the last
        for part, process in _PROCESSES:
            if part in frame.filename:
                if process:
                    return process
                break
    return CLIENT
