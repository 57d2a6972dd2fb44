"""What the service has learned from past runs; see `gpubroker.models`."""

from dataclasses import dataclass, field

from gpubroker.decoding import Raw, filled, optional


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
