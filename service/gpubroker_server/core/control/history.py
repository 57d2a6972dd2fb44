"""An hour of measured values in bounded memory: one value each ten seconds."""

from array import array
from collections.abc import Iterator, Mapping
from math import nan

from gpubroker_server.core.domain.device import GpuHealth
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.world import World

STEP_SECONDS = Seconds(10.0)
POINTS = 360
DIGITS = 4
"""Digits after the point. The values that are kept have seven in all."""
OLDEST_SECONDS = Seconds(POINTS * STEP_SECONDS)


class History:
    """The history of one value: the mean of each step. It takes 1.5 KB, whatever comes."""

    __slots__ = ("_count", "_means", "_newest")

    def __init__(self) -> None:
        self._means = array("f", [nan]) * POINTS
        self._newest = -1
        """Number of the newest step, counted from 1970."""
        self._count = 0
        """Values in the newest step."""

    def add(self, value: float, at: Instant) -> None:
        """Values come in order of time; one from before the newest step is dropped."""
        number = step_of(at)
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

    def means(self, steps: range) -> list[float | None]:
        """Return the mean of each of these steps, in order; None where there was no value or it is too long
        ago."""
        first = min(max(steps.start, self._newest - POINTS + 1), steps.stop)
        count = max(0, min(steps.stop, self._newest + 1) - first)
        oldest_first = self._means[first % POINTS :] + self._means[: first % POINTS]
        # Only NaN differs from itself; `isnan` takes twice as long.
        kept = [None if value != value else round(value, DIGITS) for value in oldest_first[:count]]
        return [*[None] * (first - steps.start), *kept, *[None] * (steps.stop - first - count)]


def step_of(at: Instant) -> int:
    return int(at / STEP_SECONDS)


class FleetHistory:
    """The past values of all nodes and devices, for people to see."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, History]] = {}
        """Node name or device key -> measure -> values."""
        self._taken: dict[str, Instant] = {}
        """Node name or device key -> the time of the last sample that was taken over."""

    def follow(self, world: World) -> Iterator[None]:
        """Take over the newest samples, node by node: after each one, others may have their turn."""
        for name in list(world.nodes):
            seen = world.node_samples.get(name)
            if seen is not None:
                used_mb = seen.memory_total_mb - seen.memory_available_mb
                of_node = {"cpu": seen.cpu, "memory_used_mb": used_mb, "disk": seen.disk_share}
                self._add(name, seen.at, of_node)
            for key in world.by_node.get(name, ()):
                ledger = world.ledgers[key]
                if ledger.sample is not None:
                    health = seen.gpus.get(ledger.device.uuid) if seen is not None else None
                    health = health or GpuHealth()
                    about = {"used_mb": ledger.sample.used_mb, "utilization": ledger.sample.utilization}
                    about["power_watts"] = health.power_watts
                    about["temperature_celsius"] = health.temperature_celsius
                    self._add(key, ledger.sample.at, about)
            yield
        for gone in self._values.keys() - world.nodes.keys() - world.ledgers.keys():
            del self._values[gone], self._taken[gone]

    def means(self, name: str, steps: range) -> dict[str, list[float | None]]:
        """Return the means by measure, without the measures that were never taken."""
        return {measure: values.means(steps) for measure, values in self._values.get(name, {}).items()}

    def _add(self, name: str, at: Instant, measured: Mapping[str, float | None]) -> None:
        if at <= self._taken.get(name, Instant(0.0)):
            return
        self._taken[name] = at
        values = self._values.setdefault(name, {})
        for measure, value in measured.items():
            if value is not None:
                if measure not in values:
                    values[measure] = History()
                values[measure].add(value, at)
