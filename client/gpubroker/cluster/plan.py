"""Whether components fit a fleet; see `Broker.plan`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpubroker.tasks.explanation import Run
from gpubroker.transport.decoding import Raw, each, filled


@dataclass(frozen=True, slots=True)
class PlannedComponent:
    name: str
    count: int = 0
    placed: int = 0
    missing: int = 0
    """So many of it have no place."""
    reason: str = ""
    """Why the first of those has none; a stable token."""
    message: str = ""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class MissingGpus:
    kinds: tuple[str, ...] = ()
    """One of these, as asked for; empty: any."""
    whole_gpus: int = 0
    gpu_mb: int = 0
    """For those that need not be whole."""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Missing:
    """So much more there would have to be, at least."""

    gpus: tuple[MissingGpus, ...] = ()
    cpu: float = 0.0
    memory_mb: int = 0
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Missing":
        return filled(cls, raw, gpus=each(MissingGpus, raw.get("gpus")))


@dataclass(frozen=True, slots=True)
class Displaced(Run):
    """A run that would have to leave, or of a gang that goes on, these ranks."""

    ranks: tuple[int, ...] | None = None
    """None: all of it leaves."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Where each component goes, what is missing, and whom it would displace."""

    fits: bool
    message: str
    components: tuple[PlannedComponent, ...] = ()
    places: tuple[Raw, ...] = ()
    """`component`, `number`, `node`, `devices`, of a gang `rank`, and how many runs it `displaces`."""
    displaced: tuple[Displaced, ...] = ()
    missing: Missing = field(default_factory=Missing)
    """What has no place, less what is left."""
    totals: Mapping[str, Any] = field(default_factory=dict)
    totals_without_colocation: Mapping[str, Any] = field(default_factory=dict)
    """If each role ran by itself that now takes turns with others."""
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "FleetPlan":
        return filled(
            cls,
            raw,
            fits=bool(raw.get("fits")),
            components=each(PlannedComponent, raw.get("components")),
            displaced=each(Displaced, raw.get("displaced")),
            missing=Missing.of(raw.get("missing") or {}),
        )
