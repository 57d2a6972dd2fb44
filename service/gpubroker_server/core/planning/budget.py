"""How much of a turn the planner has spent."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

PROBE_KNOWN = 0.2
"""Cost of finding an answer in the cache, in probes of a node."""

PROBE_SIFTED = 0.06
"""Cost of finding in bulk that nothing grew for a demand."""

Steps = Generator[None, None, T]
"""A piece of work that yields whenever the turn is spent, and ends with its result."""


class ProbeBudget:
    """Counts probes: one is a quick check of a node's capacity; what takes longer counts as several."""

    __slots__ = ("_allowed", "_may_pause", "spent")

    def __init__(self, allowed: float = 0.0, *, may_pause: bool = False) -> None:
        """`may_pause`: work yields in the middle of a task too."""
        self._allowed = allowed
        self._may_pause = may_pause
        self.spent = 0.0

    def allow(self, allowed: float) -> None:
        """Begin a turn of so many probes."""
        self._allowed = allowed
        self.spent = 0.0

    @property
    def is_spent(self) -> bool:
        return self.spent >= self._allowed

    @property
    def calls_for_a_pause(self) -> bool:
        return self._may_pause and self.is_spent


def finish(steps: Steps[T]) -> T:
    """Do the work to its end at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
