"""Whether components fit a fleet; see `Broker.plan`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpubroker.tasks.explanation import Run
from gpubroker.transport.decoding import Answered, Raw


@dataclass(frozen=True, slots=True)
class PlannedComponent(Answered):
    name: str
    count: int = 0
    placed: int = 0
    missing: int = 0
    """How many have no place."""
    reason: str = ""
    """Why the first of those has no place; a stable token."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class MissingGpus(Answered):
    kinds: tuple[str, ...] = ()
    """Any of these kinds; empty: any kind."""
    whole_gpus: int = 0
    gpu_mb: int = 0
    """For parts of GPUs."""


@dataclass(frozen=True, slots=True)
class Missing(Answered):
    """The least that would have to be added."""

    gpus: tuple[MissingGpus, ...] = ()
    cpu: float = 0.0
    memory_mb: int = 0


@dataclass(frozen=True, slots=True)
class Displaced(Run):
    """A run that would have to leave, or some ranks of a gang that continues."""

    ranks: tuple[int, ...] | None = None
    """None: the whole run leaves."""


@dataclass(frozen=True, slots=True)
class FleetPlan(Answered):
    """Where each component goes, what is missing, and which runs it would displace."""

    fits: bool
    message: str
    components: tuple[PlannedComponent, ...] = ()
    places: tuple[Raw, ...] = ()
    """`component`, `number`, `node`, `devices`, for a gang `rank`, and how many runs it `displaces`."""
    displaced: tuple[Displaced, ...] = ()
    missing: Missing = field(default_factory=Missing)
    """The demand without a place, minus the free memory."""
    totals: Mapping[str, Any] = field(default_factory=dict)
    totals_without_colocation: Mapping[str, Any] = field(default_factory=dict)
    """If each role ran alone instead of taking turns with others."""
