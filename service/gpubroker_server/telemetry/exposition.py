"""Prometheus's text format. Prometheus's own library takes five times as long, and a gateway answers nothing
meanwhile (`bench control`)."""

from collections.abc import Iterable, Iterator, Sequence
from math import isinf
from typing import NamedTuple

LabelNames = tuple[str, ...]
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value."""


class Metric(NamedTuple):
    name: str
    about: str
    kind: str
    parts: Sequence[tuple[str, LabelNames, Samples]]
    """(what is added to the name, labels, samples)"""


def gauge(name: str, about: str, labels: LabelNames, samples: Samples) -> Metric:
    return Metric(name, about, "gauge", (("", labels, samples),))


def counter(name: str, about: str, labels: LabelNames, samples: Samples) -> Metric:
    """Its name ends with `_total`, which is added here."""
    return Metric(f"{name}_total", about, "counter", (("", labels, samples),))


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


def text_of(metrics: Iterable[Metric]) -> str:
    return "".join(_lines(metrics))


def _lines(metrics: Iterable[Metric]) -> Iterator[str]:
    known: dict[LabelNames, dict[tuple[str, ...], str]] = {}
    """Many metrics have the same labels with the same values."""
    for metric in metrics:
        yield f"# HELP {metric.name} {metric.about}\n# TYPE {metric.name} {metric.kind}\n"
        for added, names, samples in metric.parts:
            texts = known.setdefault(names, {})
            for values, value in samples:
                if (labels := texts.get(values)) is None:
                    labels = texts[values] = _labels(names, values)
                number = "+Inf" if isinf(value) else float(value)
                yield f"{metric.name}{added}{labels} {number}\n"


def _labels(names: LabelNames, values: tuple[str, ...]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return f"{{{','.join(sorted(pairs))}}}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
