"""What a scrape reads, and how Prometheus's library writes it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

LabelNames = tuple[str, ...]
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value."""


class Metric(NamedTuple):
    """Read in full when it is made, so that another thread may write it."""

    name: str
    about: str
    kind: str
    parts: Sequence[tuple[str, LabelNames, Sequence[tuple[tuple[str, ...], float]]]]
    """(what is added to the name, labels, samples)"""


def gauge(name: str, about: str, labels: LabelNames, samples: Samples) -> Metric:
    return Metric(name, about, "gauge", (("", labels, tuple(samples)),))


def counter(name: str, about: str, labels: LabelNames, samples: Samples) -> Metric:
    """Its name ends with `_total`, which is added here."""
    return Metric(name, about, "counter", (("_total", labels, tuple(samples)),))


class Buckets(NamedTuple):
    """One histogram."""

    labels: tuple[str, ...]
    counts: Sequence[int]
    """So many were not above each bound; the last are all."""
    total: float


def histogram(
    name: str, about: str, labels: LabelNames, bounds: Sequence[float], found: Sequence[Buckets]
) -> Metric:
    ends = [*map(str, bounds), "+Inf"]
    buckets = [
        ((*one.labels, end), count) for one in found for end, count in zip(ends, one.counts, strict=True)
    ]
    parts = (
        ("_bucket", (*labels, "le"), buckets),
        ("_count", labels, [(one.labels, one.counts[-1]) for one in found]),
        ("_sum", labels, [(one.labels, one.total) for one in found]),
    )
    return Metric(name, about, "histogram", parts)


def text_of(metrics: Sequence[Metric]) -> bytes:
    """Of a large fleet it takes most of a second: on a thread, so that a gateway answers meanwhile."""
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
