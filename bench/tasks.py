"""The entrypoints that benchmarks run."""

import time

from gpubroker import Stopped, current_task


def noop() -> None:
    """What is left is the way there and back."""


def first_line() -> int:
    """When user code began: nanoseconds of this machine's clock."""
    return time.time_ns()


def victim() -> None:
    """Holds its memory until it is told to leave; then saves a small state and leaves at once."""
    task = current_task()
    task.wait_for_stop()
    task.checkpoint(b"enough to go on from")
    raise Stopped
