"""Targets of the fleet, and the reasons that keep new work out."""

from typing import Annotated

from msgspec import Meta

from gpubroker.wire.answered import Answered, Overview, Time


class Target(Answered, frozen=True):
    """The bounds within which a measure of a part of the fleet should stay."""

    scope: Annotated[str, Meta(description="`all`, `pool:NAME`, `label:KEY=VALUE` or `node:NAME`.")]
    measure: Annotated[str, Meta(description="`gpu_utilization`, `gpu_memory`, `host_memory` or `disk`.")]
    least: Annotated[float, Meta(description="The lower bound; like all shares here, from 0 to 1.")]
    most: float
    value: Annotated[
        float | None, Meta(description="The last measured value; null if nothing of it is measured.")
    ]
    state: Annotated[str, Meta(description="`in` or `out`.")]
    changed_at: Annotated[Time, Meta(description="The time since when it is in, or out.")]
    background_share: Annotated[
        float | None,
        Meta(
            description="The share that background and idle work may take of it; null if nothing holds it "
            "back."
        ),
    ]
    background_left_mb: Annotated[
        int | None, Meta(description="The part of that memory which may still be started.")
    ]


class Pressure(Answered, frozen=True):
    """A reason to take no more of the work that can wait."""

    measure: str
    value: float | None
    high: float
    activated_at: Time
    refused_below: Annotated[int, Meta(description="Tasks with a lower priority are refused (429).")]


class Targets(Overview[Target], frozen=True):
    backpressure: tuple[Pressure, ...]
