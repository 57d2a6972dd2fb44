"""The route for autoscalers: the demand that waiting tasks lack, the demand of all tasks together, and the
nodes that could be given back."""

from typing import Annotated

from fastapi import Query, Response
from gpubroker.wire.fleet import AutoscalingDemand, Spare, Unmet
from msgspec.structs import asdict
from pydantic import Field

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.explain.autoscaling import DemandScope, autoscaling_demand, plus, total_of
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.bodies import Query as QueryModel
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Fault
from gpubroker_server.http.routing import Resource, answer

resource = Resource("cluster")


class AutoscalingQuery(QueryModel):
    pool: Annotated[
        str | None, Field(max_length=200, description="This pool alone; empty: tasks without one.")
    ] = None
    kind: Annotated[
        str, Field(max_length=200, description="Nodes and GPUs of this kind, and demands that may use it.")
    ] = ""
    waited_seconds: Annotated[
        float, Field(ge=0, description="Tasks that have waited for at least so long.")
    ] = 0.0


@resource.route(
    "GET /autoscaling/demand",
    "autoscaling_demand",
    Scope.CLUSTER_READ,
    AutoscalingDemand,
    "validation-failed follower-stale",
)
async def get_demand(parts: Parts, query: Annotated[AutoscalingQuery, Query()]) -> Response:
    """Read what an autoscaler needs: what waiting tasks lack and for how long, what all tasks need together,
    and what could be given back.

    Tasks that are held, that wait for other tasks, or for which memory is being freed lack nothing. Running
    elastic gangs lack their missing ranks. In `gpus`, a part of a GPU counts as 1/n, where n such parts fit
    on one GPU of the kind that suits them best.
    """
    pools = [pool.name for pool in parts.policy.pools]
    if query.pool and query.pool not in pools:
        detail = f"there is no pool {query.pool!r}; configured are: {', '.join(pools) or 'none'}"
        raise invalid(Fault(pointer="query:pool", detail=detail, code="unknown-pool"))
    scope = DemandScope(query.pool, query.kind, Seconds(query.waited_seconds))
    demand = autoscaling_demand(parts.world, parts.policy, parts.clock.now(), scope)
    waited_seconds = max((group.waiting_seconds for group in demand.unmet), default=0.0)
    return answer(
        AutoscalingDemand(
            **parts.freshness.moment(),
            unmet=Unmet(**asdict(demand.lacking), tasks=demand.tasks, waiting_seconds=waited_seconds),
            used=demand.used,
            needed=plus(demand.used, demand.lacking),
            groups=demand.unmet,
            limited_tasks=demand.limited_tasks,
            spare=Spare(**asdict(total_of(demand.spare)), nodes=demand.spare),
        )
    )
