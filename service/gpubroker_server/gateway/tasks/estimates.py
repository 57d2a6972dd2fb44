"""The route that lists the measured use and duration of past runs."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Query, Response
from gpubroker.wire.answered import Listed
from gpubroker.wire.forecasts import Estimate, Quantiles
from pydantic import Field

from gpubroker_server.core.domain.estimates import Sketch, SketchKey, What
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.bodies import Query as QueryModel
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.routing import Caller, Resource, answer

resource = Resource("tasks")


class EstimateQuery(QueryModel):
    subject: Annotated[str | None, Field(max_length=500, description="Model type, name or entrypoint.")] = (
        None
    )


@resource.route("GET /estimates", "estimates_list", Scope.TASKS_READ, Listed[Estimate], "validation-failed")
async def list_estimates(caller: Caller, parts: Parts, query: Annotated[EstimateQuery, Query()]) -> Response:
    """List what your tenant's past runs used and took, by subject and kind of device.

    Runs have the same subject if their tasks have the same model type, else the same name, else the same
    entrypoint.
    """
    return answer(Listed(tuple(_estimates(parts, caller.tenant, query.subject))))


def _estimates(parts: Parts, tenant: str, subject: str | None) -> Iterator[Estimate]:
    """Yield the tenant's estimates, sorted by subject and kind of device. `subject` restricts them to one
    subject."""
    sketches = parts.world.learned.sketches
    needed = parts.submissions.permissions.policy.learned_least_runs
    measured = {
        (topic.subject, topic.kind)
        for topic in sketches
        if topic.tenant == tenant and subject in (None, topic.subject)
    }
    for name, kind in sorted(measured):
        gpu_mb, seconds = (
            _quantiles(sketches.get(SketchKey(tenant, name, kind, quantity)))
            for quantity in (What.GPU_MB, What.SECONDS)
        )
        yield Estimate(name, kind, gpu_mb, seconds, needed)


def _quantiles(sketch: Sketch | None) -> Quantiles | None:
    if sketch is None:
        return None
    return Quantiles(sketch.n, *(round(sketch.quantile(share) or 0.0, 3) for share in (0.5, 0.9, 0.95)))
