"""An hour of measured values in bounded memory: one value each ten seconds."""

from array import array
from math import isnan, nan
from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant, Seconds

STEP_SECONDS = Seconds(10.0)
POINTS = 360


class Point(NamedTuple):
    at: Instant
    value: float


class History:
    """Of one value: the mean of each step. 1.5 KB, whatever comes."""

    __slots__ = ("_count", "_means", "_newest")

    def __init__(self) -> None:
        self._means = array("f", [nan]) * POINTS
        self._newest = -1
        """Number of the newest step, counted from 1970."""
        self._count = 0
        """Values in the newest step."""

    def add(self, value: float, at: Instant) -> None:
        """Values come in order of time; one from before the newest step is dropped."""
        number = int(at / STEP_SECONDS)
        if number < self._newest:
            return
        if number > self._newest:
            for missed in range(max(self._newest + 1, number - POINTS + 1), number + 1):
                self._means[missed % POINTS] = nan
            self._newest, self._count = number, 0
        place = number % POINTS
        self._count += 1
        before = 0.0 if self._count == 1 else self._means[place]
        self._means[place] = before + (value - before) / self._count

    def points(self, since: Instant) -> list[Point]:
        """The oldest first; steps without a value are left out."""
        numbers = range(self._newest - POINTS + 1, self._newest + 1)
        found = (Point(Instant(number * STEP_SECONDS), self._means[number % POINTS]) for number in numbers)
        return [point for point in found if point.at >= since and not isnan(point.value)]
