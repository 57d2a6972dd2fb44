"""What past runs took, as the API tells it: sizes, run times, and when a run is likely to end."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.estimates import Sketch, Topic, What
from gpubroker_server.core.world.world import World


class QuantilesView(TypedDict):
    """Within 2 % of the value that they stand for."""

    n: Annotated[int, Field(description="Runs that they are of, at most 1000; recent ones count more.")]
    p50: float
    p90: float
    p95: float


class EstimateView(TypedDict):
    """What the runs of one subject took on one kind of device."""

    subject: Annotated[str, Field(description="A model type, else a name, else an entrypoint.")]
    kind: Annotated[str, Field(description="Of device; empty for runs without one.")]
    gpu_mb: Annotated[
        QuantilesView | None, Field(description="The most that a run used of one device, in MiB.")
    ]
    seconds: Annotated[QuantilesView | None, Field(description="How long runs took that did all the work.")]


class EstimateList(TypedDict):
    items: list[EstimateView]


class SizingView(TypedDict):
    """How the size of a task, or of the ranks of a gang, was learned from earlier runs when it was submitted.
    Of ranks that may use different devices: the largest, and the message tells of each."""

    gpu_mb: Annotated[int | None, Field(description="Per device; null: whole devices.")]
    p95_mb: Annotated[int | None, Field(description="What 95 of 100 runs stayed below.")]
    n: Annotated[int, Field(description="Runs, or ranks, that were measured by then.")]
    kind: Annotated[str | None, Field(description="Of the devices that they had.")]
    message: str


def estimate_views(world: World, tenant: str, subject: str | None) -> Iterator[EstimateView]:
    """In order of subject and kind; of one subject, if one is given."""
    sketches = world.learned.sketches
    known = {
        (topic.subject, topic.kind)
        for topic in sketches
        if topic.tenant == tenant and subject in (None, topic.subject)
    }
    for name, kind in sorted(known):
        yield {
            "subject": name,
            "kind": kind,
            "gpu_mb": _quantiles(sketches.get(Topic(tenant, name, kind, What.GPU_MB))),
            "seconds": _quantiles(sketches.get(Topic(tenant, name, kind, What.SECONDS))),
        }


def _quantiles(sketch: Sketch | None) -> QuantilesView | None:
    if sketch is None:
        return None
    p50, p90, p95 = (round(sketch.quantile(share) or 0.0, 3) for share in (0.5, 0.9, 0.95))
    return {"n": sketch.n, "p50": p50, "p90": p90, "p95": p95}
