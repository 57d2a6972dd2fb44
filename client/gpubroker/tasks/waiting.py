"""Wait for the end of a task with repeated requests."""

import time
from math import inf

from gpubroker.errors import WaitTimeout
from gpubroker.tasks.task import Task

_LONG_POLL_SECONDS = 30.0
"""The longest wait in one request; the service answers as soon as the task ends."""


class Deadline:
    def __init__(self, seconds: float | None) -> None:
        """`seconds` is the time until the deadline; None stands for a deadline that never comes."""
        self._seconds = inf if seconds is None else seconds
        self._began = time.monotonic()

    def next_poll_seconds(self) -> float:
        left = self._seconds - (time.monotonic() - self._began)
        return round(min(_LONG_POLL_SECONDS, max(0.0, left)), 3)

    def is_over(self) -> bool:
        return time.monotonic() - self._began >= self._seconds

    def error(self, seen: Task) -> WaitTimeout:
        return WaitTimeout(seen.id, str(seen.raw.get("state")), self._seconds)
