"""What became of the queued inferences of which a picture has heard since it was made."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from gpubroker_server.core.domain.task import Task, TaskState

WAIT_BOUNDS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
"""Seconds, between which waits are counted."""


class Answered:
    def __init__(self) -> None:
        self.ended: Counter[TaskState] = Counter()
        self.waited_seconds = 0.0
        """Of all that were sent to a model for the first time."""
        self._waits = [0] * (len(WAIT_BOUNDS) + 1)

    def note(self, before: Task, after: Task) -> None:
        """It has changed. Its wait ends when it is sent first, and begins with its submit, or when it may."""
        if not after.is_inference:
            return
        if not before.fence and after.fence and after.started_at is not None:
            since = max(after.submitted_at, before.not_before or after.submitted_at)
            waited_seconds = max(0.0, after.started_at - since)
            self._waits[bisect_left(WAIT_BOUNDS, waited_seconds)] += 1
            self.waited_seconds += waited_seconds
        if after.is_terminal:
            self.ended[after.state] += 1

    def waits(self) -> Sequence[int]:
        """How many waited no longer than each of the bounds, and how many there were."""
        return tuple(accumulate(self._waits))
