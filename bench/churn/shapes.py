"""The loads: cohorts of queues with a quota each, and three classes of short work that arrive on a beat.

After Kueue's generators, test/performance/scheduler/configs/{baseline,large-scale}/generator.yaml. One unit
of quota is one GiB of GPU memory, a queue is a tenant, and a cohort's quota is one device, as Kueue counts
quota and places nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

UNIT_MB = 1024


@dataclass(frozen=True, order=True)
class Sort:
    """One class of work: so many per queue, one every so often."""

    name: str
    count: int
    every_seconds: float
    runs_seconds: float
    priority: int
    units: int


class Arrival(NamedTuple):
    at_seconds: float
    cohort: int
    queue: int
    sort: Sort


@dataclass(frozen=True)
class Shape:
    name: str
    cohorts: int
    queues: int
    """Per cohort."""
    quota: int
    """Units that each queue is guaranteed."""
    borrow: int
    """So many more at most, of what the others of its cohort leave."""
    sorts: tuple[Sort, ...]
    published: Mapping[str, float]
    """Figure of the published run -> its value."""

    @property
    def units(self) -> int:
        return self.cohorts * self.queues * self.quota

    @property
    def tasks(self) -> int:
        return self.cohorts * self.queues * sum(sort.count for sort in self.sorts)

    @property
    def work_unit_seconds(self) -> float:
        each = sum(sort.count * sort.runs_seconds * sort.units for sort in self.sorts)
        return self.cohorts * self.queues * each

    def shortened(self, share: float) -> "Shape":
        """The first part of it, in which queues are shorter: nothing published compares with that."""
        if share == 1.0:
            return self
        sorts = tuple(replace(sort, count=ceil(share * sort.count)) for sort in self.sorts)
        return replace(self, sorts=sorts, published={})

    def arrivals(self) -> list[Arrival]:
        """All of them, in order of time."""
        return sorted(self._beats())

    def _beats(self) -> Iterator[Arrival]:
        for cohort in range(self.cohorts):
            for queue in range(self.queues):
                for sort in self.sorts:
                    for number in range(sort.count):
                        yield Arrival(number * sort.every_seconds, cohort, queue, sort)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "kueue-baseline",
            cohorts=5,
            queues=6,
            quota=20,
            borrow=100,
            sorts=(
                Sort("small", 350, 0.1, 0.2, 25, 1),
                Sort("medium", 100, 0.5, 0.5, 50, 5),
                Sort("large", 50, 1.2, 1.0, 75, 20),
            ),
            published={
                "wall_s": 351.1,
                "held_use": 0.559,
                "wait.large_s": 16.5,
                "wait.medium_s": 76.8,
                "wait.small_s": 215.5,
            },
        ),
        Shape(
            "kueue-large",
            cohorts=10,
            queues=100,
            quota=20,
            borrow=100,
            sorts=(
                Sort("small", 35, 0.06, 0.15, 25, 1),
                Sort("medium", 11, 0.3, 0.35, 50, 5),
                Sort("large", 4, 0.7, 0.7, 75, 20),
            ),
            published={"wall_s": 1179.0, "held_use": 0.386, "wait.small_s": 700.0},
        ),
    )
}
