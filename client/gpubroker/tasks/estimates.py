"""What the service has learned from past runs, and what it makes of that; see `gpubroker.tasks.task`."""

from dataclasses import dataclass, field
from datetime import datetime

from gpubroker.transport.decoding import Raw, filled, optional


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of `n` runs: half, nine tenths and 19 of 20 of them stayed at or below so much."""

    n: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the runs of one subject took on one kind of device; None where nothing was measured."""

    subject: str
    """A model type, else a name, else an entrypoint."""
    kind: str = ""
    """Empty for runs without a device."""
    gpu_mb: Quantiles | None = None
    """The most that a run used of one device, in MiB."""
    seconds: Quantiles | None = None
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Estimate":
        return filled(
            cls,
            raw,
            gpu_mb=optional(Quantiles, raw.get("gpu_mb")),
            seconds=optional(Quantiles, raw.get("seconds")),
        )


@dataclass(frozen=True, slots=True)
class Sizing:
    """How the size of a task, or of the ranks of a gang, was learned when it was submitted. `gpu_mb` is None
    for whole devices; of ranks that differ it is the largest, and the message tells of each."""

    gpu_mb: int | None = None
    p95_mb: int | None = None
    n: int = 0
    kind: str | None = None
    message: str = ""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Expected:
    """When something is likely to happen: one in two by the first time, nine in ten by the second."""

    p50_at: datetime | None = None
    p90_at: datetime | None = None
    p50_seconds: float = 0.0
    """From when that was told."""
    p90_seconds: float = 0.0
    n: int = 0
    """Of how many runs this speaks; 0: of none."""
    basis: str = ""
    """`stated`, `learned` or `guess`."""
    raw: Raw = field(default_factory=dict, repr=False)
