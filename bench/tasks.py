"""The entrypoints that benchmarks run."""

import time

from gpubroker import Stopped, current_task


def noop() -> None:
    """Takes no time: the overhead is what is measured."""


def spin(number: int, ms: float) -> int:
    """Takes so much CPU time."""
    end = time.thread_time() + ms / 1000
    while time.thread_time() < end:
        pass
    return number


def first_line() -> int:
    """The time at which user code began, in nanoseconds."""
    return time.time_ns()


def victim() -> None:
    """Holds its memory until it is asked to stop, then saves a small checkpoint and ends."""
    task = current_task()
    task.wait_for_stop()
    task.checkpoint(b"enough to go on from")
    raise Stopped
