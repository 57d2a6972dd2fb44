"""The table of what an operation may take in each process of the service, for each minor release of Python.

If a count rises, write the new count into its row, and beside it why the operation has to take more. Lower
the row when a change saves calls, so that the next change cannot spend them unseen.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

TOLERANCE = 0.02
GRAIN_BYTES = 16
"""The allocator hands out memory in pieces of this size, so a figure of bytes may be off by one piece."""
GRAIN_CALLS = 0.1
"""A periodic job may fall into the counted time once more. This is its share of calls per item."""

HERE = "bench/cost/bounds.py"


class Bound(NamedTuple):
    most: float
    """The figure as it was counted. `most_of` adds the tolerance."""
    before: float
    """The figure of commit 569b27b1, to show what has been saved since then."""
    reason: str


BOUNDS: dict[tuple[int, int], dict[str, Bound]] = {
    (3, 11): {
        "accept.service.calls": Bound(
            990.67,
            1_487.3,
            "one commit and one plan; the cap of a default priority, and a look for what is wrong each 10 s",
        ),
        "accept.service.live_bytes": Bound(1_655.7, 1_723.6, "a Task of 360 bytes and the queue"),
        "accept.peak_bytes": Bound(15_771.0, 22_895.0, "first count"),
        "batch.service.calls": Bound(65.63, 108.70, "equal tasks are checked once"),
        "batch.service.live_bytes": Bound(515.91, 603.79, "the tasks of a group share its key in the queue"),
        "batch.peak_bytes": Bound(1_754.4, 2_032.4, "first count"),
        "run.service.calls": Bound(3_052.2, 4_385.4, "three commits, one plan"),
        "run.driver.calls": Bound(49.57, 49.65, "first count"),
        "run.agent.calls": Bound(409.25, 1_454.5, "a start, an end and four log lines"),
        "run.runner.calls": Bound(207.00, 301.00, "first count"),
        "run.service.live_bytes": Bound(
            1_795.6,
            1_763.6,
            "more than before by what an accepted task leaves, and stop_cause, upload, outputs",
        ),
        "run.driver.live_bytes": Bound(47.27, 49.75, "first count"),
        "run.agent.live_bytes": Bound(297.68, 294.96, "first count"),
        "run.runner.live_bytes": Bound(28.20, 19.72, "first count"),
        "run.peak_bytes": Bound(
            28_690.0,
            286_138.0,
            "two messages, which begin with 4 KiB: a cycle that plans nothing does not give way between them",
        ),
        "item.service.calls": Bound(31.17, 31.44, "first count"),
        "item.driver.calls": Bound(0.34, 0.35, "first count"),
        "item.agent.calls": Bound(5.59, 39.38, "a result is checked in one call; without what reads /proc"),
        "item.runner.calls": Bound(53.70, 83.80, "the item, its clock and its place in a report"),
        "item.service.live_bytes": Bound(166.72, 167.70, "first count"),
        "item.driver.live_bytes": Bound(4.41, 4.44, "first count"),
        "item.agent.live_bytes": Bound(84.49, 84.49, "first count"),
        "item.runner.live_bytes": Bound(146.27, 146.23, "first count"),
        "item.peak_bytes": Bound(730.98, 788.15, "first count"),
        "proxied.service.calls": Bound(175.00, 176.00, "first count"),
        "proxied.service.live_bytes": Bound(231.66, 231.66, "first count"),
        "proxied.peak_bytes": Bound(6_907.0, 6_907.0, "first count"),
        "first_plan.service.calls": Bound(1_604.7, 2_234.3, "half of it scores places by fragmentation"),
        "first_plan.service.live_bytes": Bound(
            9_550.2, 9_620.2, "more than before, among other things by the field retry_on of a Task"
        ),
        "first_plan.peak_bytes": Bound(10_421.9, 10_897.1, "as live_bytes"),
        "cycle.service.calls": Bound(6_901.2, 8_368.9, "most of it asks the classes that wait"),
        "cycle.service.live_bytes": Bound(
            8_476.5,
            8_292.1,
            "a class remembers the node at which it might fit, which saves its probes",
        ),
        "cycle.peak_bytes": Bound(
            27_390.0, 22_420.5, "the largest blocks of grown nodes, and order keys, kept for one slice"
        ),
    },
}


def faults_of(found: Mapping[str, float], python: tuple[int, int]) -> Iterator[str]:
    """Yield a sentence for each figure above its bound, for each figure without a row, and for each row
    without a figure."""
    table, name = BOUNDS.get(python), f"BOUNDS[{python}] in {HERE}"
    if table is None:
        yield f"there is no {name}; run `python -m bench cost` on this Python and enter its figures"
        return
    for figure, count in found.items():
        bound = table.get(figure)
        if bound is None:
            yield f"{figure} is {count:,.2f} and has no row in {name}; add one, with a reason"
        elif count > most_of(figure, bound):
            yield (
                f"{figure} is {count:,.2f}, and its bound is {bound.most:,.2f}: make the operation cheaper, "
                f'or change the row "{figure}" of {name} and write beside it why the operation has to take '
                "more; `python -m bench cost` shows the functions that are called most"
            )
    for figure in table.keys() - found.keys():
        yield f"{figure} was not counted; remove its row from {name} if nothing takes it any more"


def most_of(figure: str, bound: Bound) -> float:
    """Return the highest count that the bound allows."""
    grain = GRAIN_BYTES if figure.endswith("_bytes") else GRAIN_CALLS
    return bound.most * (1 + TOLERANCE) + grain
