"""The entrypoints that benchmarks run."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpubroker import Stopped, current_task

if TYPE_CHECKING:
    import numpy as np


class Worker:
    """The class of the objects of workers."""

    def noop(self) -> None: ...


def noop() -> None:
    """Do nothing, since the overhead is what is measured."""


def spin(number: int, ms: float) -> int:
    """Take `ms` milliseconds of CPU time."""
    end = time.thread_time() + ms / 1000
    while time.thread_time() < end:
        pass
    return number


def last_of(array: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """Read one page of an object, wherever it lies."""
    return float(array[-1])


def first_line() -> int:
    """Return the time at which user code began, in nanoseconds."""
    return time.time_ns()


def victim() -> None:
    """Hold the memory until the stop notice, then save a small checkpoint and end."""
    task = current_task()
    task.wait_for_stop()
    task.checkpoint(b"enough to go on from")
    raise Stopped


def talk(gate: str, lines_per_second: float, seconds: float) -> int:
    """Print numbered lines, each with its time, once the file `gate` exists; return their number."""
    while not Path(gate).exists():
        time.sleep(0.01)
    began, count = time.time(), round(lines_per_second * seconds)
    for number in range(count):
        time.sleep(max(0.0, began + number / lines_per_second - time.time()))
        print(f"{number} {time.time()}")
    return count
