"""The loads: cohorts of queues with quotas, and three classes of short work with regular arrivals.

After Kueue's generators, test/performance/scheduler/configs/{baseline,large-scale}/generator.yaml. One unit
of quota is one GiB of GPU memory, a queue is a tenant, and a cohort's quota is one device, since Kueue counts
quota and does not place.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

UNIT_MB = 1024


class WorkClass(Struct, frozen=True, order=True):
    """One class of work: `count` tasks per queue, one every `every_seconds`."""

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
    work: WorkClass


class Shape(Struct, frozen=True):
    name: str
    cohorts: int
    queues: int
    """The number of queues per cohort."""
    quota: int
    """The guaranteed units of each queue."""
    borrow: int
    """The most units that a queue may borrow from its cohort."""
    classes: tuple[WorkClass, ...]
    published: Mapping[str, float]
    """Figure -> published value."""

    @property
    def units(self) -> int:
        return self.cohorts * self.queues * self.quota

    @property
    def tasks(self) -> int:
        return self.cohorts * self.queues * sum(each.count for each in self.classes)

    @property
    def work_unit_seconds(self) -> float:
        per_queue = sum(each.count * each.runs_seconds * each.units for each in self.classes)
        return self.cohorts * self.queues * per_queue

    def shortened(self, share: float) -> "Shape":
        """Return the first part of the load, which has no published figures."""
        if share == 1.0:
            return self
        classes = tuple(replace(each, count=ceil(share * each.count)) for each in self.classes)
        return replace(self, classes=classes, published={})

    def arrivals(self) -> list[Arrival]:
        """Return all arrivals in order of time."""
        return sorted(self._arrivals())

    def _arrivals(self) -> Iterator[Arrival]:
        for cohort in range(self.cohorts):
            for queue in range(self.queues):
                for each in self.classes:
                    for number in range(each.count):
                        yield Arrival(number * each.every_seconds, cohort, queue, each)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "kueue-baseline",
            cohorts=5,
            queues=6,
            quota=20,
            borrow=100,
            classes=(
                WorkClass("small", 350, 0.1, 0.2, 25, 1),
                WorkClass("medium", 100, 0.5, 0.5, 50, 5),
                WorkClass("large", 50, 1.2, 1.0, 75, 20),
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
            classes=(
                WorkClass("small", 35, 0.06, 0.15, 25, 1),
                WorkClass("medium", 11, 0.3, 0.35, 50, 5),
                WorkClass("large", 4, 0.7, 0.7, 75, 20),
            ),
            published={"wall_s": 1179.0, "held_use": 0.386, "wait.small_s": 700.0},
        ),
    )
}
