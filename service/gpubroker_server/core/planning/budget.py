"""Planning in steps: what the parts of the work cost, and where it can be left and resumed."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

# The costs are estimates. They move the ends of turns, and change no plan.

PROBE_KNOWN = 0.2
"""Cost of finding an answer in the cache, in probes of a node."""

PROBE_SIFTED = 0.06
"""Cost of finding in bulk that nothing grew for a demand."""

PROBE_DECIDED = 2.0
"""Cost of taking a task from the queue and deciding on it, beside the search."""

CLOSE_LOOK = 5
"""Cost of probing a node's devices, in units of one quick capacity check."""

PROBES_AT_A_TIME = 8
"""Probes between two yields. A yield resumes every generator above it, so one for each probe would cost more
than the probe."""

Steps = Generator[float, None, T]
"""A piece of work that yields what each part of it cost, in probes of a node, and ends with its result. It
can be left at any yield. The one who drives it counts: see `Slice.take_turn`."""


def finish(steps: Steps[T]) -> T:
    """Do the work to its end at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
