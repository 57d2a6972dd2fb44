"""What past runs used and how long they took."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.estimates import Sketch, SketchKey, What
from gpubroker_server.gateway.http.bodies import Query as QueryModel
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, Resource, answer
from gpubroker_server.gateway.parts import Parts

resource = Resource("tasks")


class QuantilesView(TypedDict):
    """Each within 2 % of the true value."""

    n: Annotated[int, Field(description="The number of runs, at most 1000; recent ones count more.")]
    p50: float
    p90: float
    p95: float


class EstimateView(TypedDict):
    """What the runs of one subject used and took on one kind of device."""

    subject: Annotated[str, Field(description="A model type, else a name, else an entrypoint.")]
    kind: Annotated[str, Field(description="Of device; empty for runs without one.")]
    gpu_mb: Annotated[QuantilesView | None, Field(description="The most used of one device, in MiB.")]
    seconds: Annotated[QuantilesView | None, Field(description="How long runs took that did all the work.")]
    needed_runs: Annotated[int, Field(description="So many must be measured before a size is learned.")]


class EstimateList(TypedDict):
    items: list[EstimateView]


class EstimateQuery(QueryModel):
    subject: Annotated[str | None, Field(max_length=500, description="Model type, name or entrypoint.")] = (
        None
    )


@resource.route("GET /estimates", "estimates_list", Scope.TASKS_READ, EstimateList, "validation-failed")
async def list_estimates(call: Call, parts: Parts, query: Annotated[EstimateQuery, Query()]) -> Response:
    """List what your tenant's past runs used and took, by subject and kind of device.

    Runs have the same subject if their tasks have the same model type, else the same name, else the same
    entrypoint.
    """
    view: EstimateList = {"items": list(_views(parts, call.identity.tenant, query.subject))}
    return answer(view)


def _views(parts: Parts, tenant: str, subject: str | None) -> Iterator[EstimateView]:
    """By subject and kind."""
    sketches = parts.world.learned.sketches
    needed = parts.submissions.permissions.policy.learned_least_runs
    known = {
        (topic.subject, topic.kind)
        for topic in sketches
        if topic.tenant == tenant and subject in (None, topic.subject)
    }
    for name, kind in sorted(known):
        yield {
            "subject": name,
            "kind": kind,
            "gpu_mb": _quantiles(sketches.get(SketchKey(tenant, name, kind, What.GPU_MB))),
            "seconds": _quantiles(sketches.get(SketchKey(tenant, name, kind, What.SECONDS))),
            "needed_runs": needed,
        }


def _quantiles(sketch: Sketch | None) -> QuantilesView | None:
    if sketch is None:
        return None
    p50, p90, p95 = (round(sketch.quantile(share) or 0.0, 3) for share in (0.5, 0.9, 0.95))
    return {"n": sketch.n, "p50": p50, "p90": p90, "p95": p95}
