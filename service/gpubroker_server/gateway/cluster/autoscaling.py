"""What autoscalers read: what waiting tasks lack, what all need together, and what could be given back."""

from typing import Annotated

from fastapi import Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.explain.autoscaling import CapacityAmounts, DemandScope, autoscaling_demand
from gpubroker_server.gateway.http.bodies import Query as QueryModel
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Fault
from gpubroker_server.gateway.http.routing import Resource, answer, view_of
from gpubroker_server.gateway.http.times import AsOf
from gpubroker_server.gateway.parts import Parts

resource = Resource("cluster")


class CapacityView(TypedDict):
    gpus: Annotated[int, Field(description="Whole ones, and as many as parts of GPUs fill.")]
    gpu_mb: int
    cpu: float
    memory_mb: int


class UnmetView(CapacityView):
    tasks: int
    waiting_seconds: Annotated[float, Field(description="Of the task that has waited longest.")]


class UnmetGroupView(UnmetView):
    pool: Annotated[str, Field(description="Empty: the tasks name none.")]
    kinds: Annotated[list[str], Field(description="Any of these; empty: any kind, or no GPU.")]


class SpareNodeView(CapacityView):
    name: str
    kinds: list[str]


class SpareView(CapacityView):
    """Nodes of which nothing is held, and which no waiting task could use."""

    nodes: list[SpareNodeView]


class AutoscalingView(AsOf):
    unmet: Annotated[
        UnmetView, Field(description="Of tasks that wait for room, each in full, and of missing ranks.")
    ]
    used: Annotated[CapacityView, Field(description="Held now: GPUs in whole or in part.")]
    needed: Annotated[CapacityView, Field(description="`used` and `unmet`: what the cluster should have.")]
    groups: Annotated[list[UnmetGroupView], Field(description="`unmet` by pool and kinds.")]
    limited_tasks: Annotated[
        int, Field(description="They wait for a quota or a limit, which no node would raise.")
    ]
    spare: SpareView


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
    AutoscalingView,
    "validation-failed follower-stale",
)
async def get_demand(parts: Parts, query: Annotated[AutoscalingQuery, Query()]) -> Response:
    """Read what an autoscaler needs: what waiting tasks lack and for how long, what all tasks need together,
    and what could be given back.

    Tasks that are held, wait for others, or have memory being freed for them, lack nothing; running elastic
    gangs lack their missing ranks. `gpus` counts parts of GPUs by how many fit on one of the kind that suits
    them best.
    """
    pools = [known.name for known in parts.policy.pools]
    if query.pool and query.pool not in pools:
        detail = f"there is no pool {query.pool!r}; configured are: {', '.join(pools) or 'none'}"
        raise invalid(Fault(pointer="query:pool", detail=detail, code="unknown-pool"))
    scope = DemandScope(query.pool, query.kind, Seconds(query.waited_seconds))
    found = autoscaling_demand(parts.world, parts.policy, parts.clock.now(), scope)
    spare = CapacityAmounts()
    for node in found.spare:
        spare = spare.plus(node.amounts)
    view: AutoscalingView = {
        **parts.freshness.as_of(),
        "unmet": {
            **view_of(CapacityView, found.lacking),
            "tasks": found.tasks,
            "waiting_seconds": max((group.waiting_seconds for group in found.unmet), default=0.0),
        },
        "used": view_of(CapacityView, found.used),
        "needed": view_of(CapacityView, found.used.plus(found.lacking)),
        "groups": [
            {
                "pool": group.pool,
                "kinds": list(group.kinds),
                "tasks": group.tasks,
                "waiting_seconds": group.waiting_seconds,
                **view_of(CapacityView, group.amounts),
            }
            for group in found.unmet
        ],
        "limited_tasks": found.limited_tasks,
        "spare": {
            **view_of(CapacityView, spare),
            "nodes": [
                {"name": node.name, "kinds": list(node.kinds), **view_of(CapacityView, node.amounts)}
                for node in found.spare
            ],
        },
    }
    return answer(view)
