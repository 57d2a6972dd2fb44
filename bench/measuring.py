"""What every benchmark shares: figures as JSON lines, percentiles, and what they were measured with."""

import json
import math
import os
import platform
import sqlite3
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

LIBRARIES = ("gpubroker-server", "fastapi", "uvicorn", "sqlalchemy", "psycopg", "ray")


def versions() -> dict[str, str]:
    libraries = {name: version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version, **libraries}


@dataclass(frozen=True)
class Figure:
    """One measured number. `ratio` is the median of `value / baseline` per round, not of their medians.

    `published` says what a baseline is that was not measured here but published, and under what conditions:
    the ratio compares two different things.
    """

    bench: str
    figure: str
    value: float
    unit: str
    n: int
    """Operations measured, rounds taken together."""
    durability: str = ""
    """What a committed row survives: the settings of the database that was used."""
    baseline: float | None = None
    ratio: float | None = None
    published: str = ""
    versions: dict[str, str] = field(default_factory=versions)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def publish(figure: Figure) -> None:
    """One JSON object on stdout for machines, one sentence on stderr for people."""
    print(json.dumps(asdict(figure)), flush=True)
    against = ""
    if figure.baseline is not None and figure.ratio is not None:
        against = f", {figure.ratio:.2f} of the baseline's {_short(figure.baseline)}"
        against += f", which is {figure.published}" if figure.published else ""
    value = f"{_short(figure.value)} {figure.unit}".rstrip()
    say(f"{figure.figure}: {value}{against} (n = {figure.n:,})")


def _short(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True)
class Pair:
    """One round: the same load on ours and on the baseline, one after the other."""

    ours_per_second: float
    baseline_per_second: float


def median_ratio(rounds: Sequence[Pair]) -> float:
    return statistics.median(pair.ours_per_second / pair.baseline_per_second for pair in rounds)
