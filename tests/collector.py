"""What code leaves to Python's collector of reference cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Garbage:
    """What one block of code has left, once it has ended."""

    objects: int = 0


@contextmanager
def garbage() -> Iterator[Garbage]:
    """Count what the block leaves. All that was there before is kept out of the collector's sight: what
    earlier tests have left goes in several passes, and to look at all of it takes seconds."""
    found = Garbage()
    gc.freeze()
    gc.disable()
    try:
        yield found
        found.objects = gc.collect()
    finally:
        gc.enable()
