"""An hour of measured values in bounded memory, with one value for each ten seconds."""

from array import array
from collections.abc import Iterator, Mapping
from math import nan

from gpubroker_server.core.domain.device import GpuHealth
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.world import World

STEP_SECONDS = Seconds(10.0)
POINTS = 360
DIGITS = 4
"""The decimal digits of a mean. The stored values have about seven digits in all."""
OLDEST_SECONDS = Seconds(POINTS * STEP_SECONDS)


class History:
    """The history of one value: the mean of each step. It takes 1.5 KB, however many values are added."""

    __slots__ = ("_count", "_means", "_newest")

    def __init__(self) -> None:
        self._means = array("f", [nan]) * POINTS
        self._newest = -1
        """The number of the newest step, counted from 1970."""
        self._count = 0
        """The number of values in the newest step."""

    def add(self, value: float, at: Instant) -> None:
        """Add a value. Values must come in order of time: a value from before the newest step is dropped."""
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
        """Return the mean of each of these steps, in order; None for a step without a value, and for one that
        is too long ago."""
        first = min(max(steps.start, self._newest - POINTS + 1), steps.stop)
        count = max(0, min(steps.stop, self._newest + 1) - first)
        oldest_first = self._means[first % POINTS :] + self._means[: first % POINTS]
        # Only NaN differs from itself; `isnan` takes twice as long.
        recent = [None if value != value else round(value, DIGITS) for value in oldest_first[:count]]
        return [*[None] * (first - steps.start), *recent, *[None] * (steps.stop - first - count)]


def step_of(at: Instant) -> int:
    return int(at / STEP_SECONDS)


class FleetHistory:
    """The past values of all nodes and devices, which are shown to people."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, History]] = {}
        """Node name or device key -> measure -> its history."""
        self._taken: dict[str, Instant] = {}
        """Node name or device key -> the time of the last sample that was added."""

    def follow(self, world: World) -> Iterator[None]:
        """Add the newest samples, node by node. The iterator yields after each node so that other work can
        run."""
        for name in list(world.nodes):
            sample = world.node_samples.get(name)
            if sample is not None:
                used_mb = sample.memory_total_mb - sample.memory_available_mb
                of_node = {"cpu": sample.cpu, "memory_used_mb": used_mb, "disk": sample.disk_share}
                self._add(name, sample.at, of_node)
            for key in world.by_node.get(name, ()):
                ledger = world.ledgers[key]
                if ledger.sample is not None:
                    health = sample.gpus.get(ledger.device.uuid) if sample is not None else None
                    health = health or GpuHealth()
                    about = {"used_mb": ledger.sample.used_mb, "utilization": ledger.sample.utilization}
                    about["power_watts"] = health.power_watts
                    about["temperature_celsius"] = health.temperature_celsius
                    self._add(key, ledger.sample.at, about)
            yield
        for gone in self._values.keys() - world.nodes.keys() - world.ledgers.keys():
            del self._values[gone], self._taken[gone]

    def means(self, name: str, steps: range) -> dict[str, list[float | None]]:
        """Return the means of a node or device by measure. Measures that were never taken are left out."""
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
