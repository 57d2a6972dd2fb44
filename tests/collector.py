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
    """Count what the block leaves. What earlier tests have left goes in several passes, as finalizers let go
    of more: it is kept out of sight, so that none of it is counted."""
    found = Garbage()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield found
        found.objects = gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
