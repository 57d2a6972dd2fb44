"""The entrypoints that benchmarks run."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpubroker import Stopped, current_task

if TYPE_CHECKING:
    import numpy as np


class Worker:
    """What workers of a set are made of."""

    def noop(self) -> None: ...


def noop() -> None:
    """Takes no time: the overhead is what is measured."""


def spin(number: int, ms: float) -> int:
    """Takes so much CPU time."""
    end = time.thread_time() + ms / 1000
    while time.thread_time() < end:
        pass
    return number


def last_of(array: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """Reads one page of an object, wherever it lies."""
    return float(array[-1])


def first_line() -> int:
    """The time at which user code began, in nanoseconds."""
    return time.time_ns()


def victim() -> None:
    """Holds its memory until it is asked to stop, then saves a small checkpoint and ends."""
    task = current_task()
    task.wait_for_stop()
    task.checkpoint(b"enough to go on from")
    raise Stopped


def talk(gate: str, lines_per_second: float, seconds: float) -> int:
    """Print numbered lines with the time of each, from when the gate is there; how many."""
    while not Path(gate).exists():
        time.sleep(0.01)
    began, count = time.time(), round(lines_per_second * seconds)
    for number in range(count):
        time.sleep(max(0.0, began + number / lines_per_second - time.time()))
        print(f"{number} {time.time()}")
    return count
