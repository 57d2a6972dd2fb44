"""Whether components fit a fleet; see `Broker.plan`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpubroker.decoding import Raw, each, filled
from gpubroker.explained import Run


@dataclass(frozen=True, slots=True)
class PlannedComponent:
    name: str
    count: int = 0
    placed: int = 0
    missing: int = 0
    """So many of it have no place."""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Where each component goes, what is missing, and whom it would displace."""

    fits: bool
    message: str
    components: tuple[PlannedComponent, ...] = ()
    places: tuple[Raw, ...] = ()
    """`component`, `node`, `devices`, and how many runs it `displaces`."""
    displaced: tuple[Run, ...] = ()
    """Runs of lower priority that would have to leave."""
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
            places=tuple(raw.get("places") or ()),
            displaced=tuple(map(Run.of, raw.get("displaced") or ())),
        )
