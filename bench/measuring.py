"""Figures as JSON lines, with the versions they were measured with; percentiles and ratios."""

import json
import math
import os
import platform
import sqlite3
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version

from msgspec import Struct, field, to_builtins

LIBRARIES = ("gpubroker-server", "fastapi", "uvicorn", "sqlalchemy", "psycopg", "ray")


def versions() -> dict[str, str]:
    libraries = {name: version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version, **libraries}


class Figure(Struct, frozen=True):
    """One measured number. `ratio` is the median of `value / baseline` per round, not the ratio of medians.

    `published` describes a baseline that was published instead of measured here, and its conditions.
    """

    bench: str
    figure: str
    value: float
    unit: str
    n: int
    """The number of operations measured, over all rounds."""
    durability: str = ""
    """The database and its durability settings."""
    baseline: float | None = None
    ratio: float | None = None
    published: str = ""
    versions: dict[str, str] = field(default_factory=versions)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def publish(figure: Figure) -> None:
    """Write one JSON object to stdout and one sentence to stderr."""
    print(json.dumps(to_builtins(figure)), flush=True)
    against = ""
    if figure.baseline is not None and figure.ratio is not None:
        against = f", {figure.ratio:.2f} of the baseline's {_short(figure.baseline)}"
        against += f", which is {figure.published}" if figure.published else ""
    value = f"{_short(figure.value)} {figure.unit}".rstrip()
    report(f"{figure.figure}: {value}{against} (n = {figure.n:,})")


def _short(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


class Pair(Struct, frozen=True):
    """One round: the same load on the service and on the baseline, one after the other."""

    ours_per_second: float
    baseline_per_second: float


def compared(
    bench: str, figure: str, unit: str, rounds: Sequence[Pair], n: int, durability: str = ""
) -> Figure:
    """Return a figure with the medians of both sides, and of their ratios per round."""
    return Figure(
        bench,
        figure,
        statistics.median(pair.ours_per_second for pair in rounds),
        unit,
        n,
        durability,
        statistics.median(pair.baseline_per_second for pair in rounds),
        statistics.median(pair.ours_per_second / pair.baseline_per_second for pair in rounds),
    )
