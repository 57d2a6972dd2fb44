"""Planning in steps: the costs of the parts of the work, and the points at which it can be left and
resumed."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

# The costs are estimates. They move the ends of turns, and change no plan.

PROBE_KNOWN = 0.2
"""The cost of finding an answer in the cache, in probes of a node."""

PROBE_SIFTED = 0.06
"""The cost of finding in bulk that nothing grew for a demand, in probes of a node."""

PROBE_DECIDED = 2.0
"""The cost of taking a task from the queue and deciding on it, beside the search, in probes of a node."""

CLOSE_LOOK = 5
"""The cost of probing a node's devices, in units of one quick capacity check."""

PROBES_AT_A_TIME = 8
"""The number of probes between two yields. A yield resumes every generator above it, so a yield for each
probe would cost more than the probe."""

Steps = Generator[float, None, T]
"""A piece of work that yields the cost of each of its parts, in probes of a node, and ends with its result.
It can be left at any yield. Its caller adds up the costs (`Slice.take_turn`)."""


def finish(steps: Steps[T]) -> T:
    """Do the work to its end at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
