"""The metrics of a scrape as values, and their text, which Prometheus's library writes."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

LabelNames = tuple[str, ...]
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of the values of the labels and the value of the metric."""


class Metric(NamedTuple):
    """A metric with all its values, so that another thread may write it."""

    name: str
    about: str
    kind: str
    parts: Sequence[tuple[str, LabelNames, Sequence[tuple[tuple[str, ...], float]]]]
    """(the suffix of the name, the labels, the samples)"""


def gauge(name: str, about: str, labels: LabelNames, samples: Samples) -> Metric:
    return Metric(name, about, "gauge", (("", labels, tuple(samples)),))


def counter(name: str, about: str, labels: LabelNames, samples: Samples) -> Metric:
    """Return a counter. `_total` is appended to its name."""
    return Metric(name, about, "counter", (("_total", labels, tuple(samples)),))


class Buckets(NamedTuple):
    """The counts of one histogram."""

    labels: tuple[str, ...]
    counts: Sequence[int]
    """The number of values that are not above each bound. The last one is the number of all values."""
    total: float


def histogram(
    name: str, about: str, labels: LabelNames, bounds: Sequence[float], found: Sequence[Buckets]
) -> Metric:
    ends = [*map(str, bounds), "+Inf"]
    buckets = [
        ((*series.labels, end), count)
        for series in found
        for end, count in zip(ends, series.counts, strict=True)
    ]
    parts = (
        ("_bucket", (*labels, "le"), buckets),
        ("_count", labels, [(series.labels, series.counts[-1]) for series in found]),
        ("_sum", labels, [(series.labels, series.total) for series in found]),
    )
    return Metric(name, about, "histogram", parts)


_DURATION_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class DurationCollector:
    """Counts durations in a histogram. All calls must come from one event loop.

    Counting takes a tenth of the time of the library's histogram, because there are no locks.
    """

    def __init__(self, name: str, about: str, labels: LabelNames) -> None:
        self._name = name
        self._about = about
        self._labels = labels
        self._counts: dict[tuple[str | int, ...], list[int]] = {}
        """The counts of each bucket, the last of which is for longer durations, by the values of the
        labels."""
        self._seconds: dict[tuple[str | int, ...], float] = {}

    def note(self, key: tuple[str | int, ...], seconds: float) -> None:
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(_DURATION_BOUNDS) + 1)
            self._seconds[key] = 0.0
        counts[bisect_left(_DURATION_BOUNDS, seconds)] += 1
        self._seconds[key] += seconds

    def metric(self) -> Metric:
        series = [
            Buckets(tuple(map(str, key)), tuple(accumulate(counts)), self._seconds[key])
            for key, counts in self._counts.items()
        ]
        return histogram(self._name, self._about, self._labels, _DURATION_BOUNDS, series)


def text_of(metrics: Sequence[Metric]) -> bytes:
    """Return the metrics in Prometheus's text format.

    This takes most of a second for a large fleet, so call it in a thread.
    """
    registry = CollectorRegistry()
    registry.register(_Read(metrics))
    return generate_latest(registry)


class _Read(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        for metric in self._metrics:
            family = Family(metric.name, metric.about, metric.kind)
            for added, names, samples in metric.parts:
                for values, value in samples:
                    family.add_sample(metric.name + added, dict(zip(names, values, strict=True)), value)
            yield family
