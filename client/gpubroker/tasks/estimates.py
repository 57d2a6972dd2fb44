"""What the service learned from past runs, and what it expects from that."""

from dataclasses import dataclass
from datetime import datetime

from gpubroker.transport.decoding import Answered


@dataclass(frozen=True, slots=True)
class Quantiles(Answered):
    """Of `n` runs: the values that 50, 90 and 95 % of them did not exceed."""

    n: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0


@dataclass(frozen=True, slots=True)
class Estimate(Answered):
    """What the runs of one subject used on one kind of device; None if nothing was measured."""

    subject: str
    """A model type, else a name, else an entrypoint."""
    kind: str = ""
    """Empty for runs without a device."""
    gpu_mb: Quantiles | None = None
    """A run's peak on one device, in MiB."""
    seconds: Quantiles | None = None
    needed_runs: int = 0
    """So many must be measured before a size is learned."""


@dataclass(frozen=True, slots=True)
class Sizing(Answered):
    """How `gpu_mb: learned` was settled at submit. `gpu_mb` is None for whole devices; for ranks that differ
    it is the largest, and the message describes each."""

    gpu_mb: int | None = None
    p95_mb: int | None = None
    n: int = 0
    kind: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Expected(Answered):
    """When something is likely to happen: 50 % by the first time, 90 % by the second."""

    p50_at: datetime | None = None
    p90_at: datetime | None = None
    p50_seconds: float = 0.0
    """Counted from the answer."""
    p90_seconds: float = 0.0
    n: int = 0
    """How many past runs it is based on."""
    basis: str = ""
    """`stated`, `learned` or `guess`."""


@dataclass(frozen=True, slots=True)
class ForecastsKept(Answered):
    """How accurate past start forecasts were that had the same basis: stated, learned or guess."""

    basis: str
    n: int = 0
    median_error_seconds: float = 0.0
    within_p90: float = 0.0
    """The share that started by the p90; 0.9 is ideal."""
