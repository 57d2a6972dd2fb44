"""The function that each item of a counted array calls, in the virtual time of the event loop."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from gpubroker.runtime import items

from bench.cost.virtual_time import CountedEvent, VirtualLoop, VirtualTimer, WorkOfThreads

ITEM_SECONDS = 0.001

at_item: dict[int, Callable[[], None]] = {}
"""Item number -> the function to call when the item begins."""

_rooms: list[tuple[VirtualLoop, WorkOfThreads]] = []


def settle(loop: VirtualLoop, work: WorkOfThreads) -> None:
    """Make workers of arrays run in virtual time."""
    _rooms.append((loop, work))
    instead = {"Event": partial(CountedEvent, work), "Timer": partial(VirtualTimer, loop)}
    vars(items)["threading"] = SimpleNamespace(**{**vars(threading), **instead})


def work_on(number: int) -> int:
    """Take a millisecond of virtual time, in which everything that is due elsewhere happens."""
    if number in at_item:
        at_item.pop(number)()
    [(loop, work)] = _rooms
    is_over = CountedEvent(work)
    loop.call_soon_threadsafe(loop.call_later, ITEM_SECONDS, is_over.set)
    is_over.wait()
    return number
