"""Targets of the fleet, what holds background work back, and what keeps new work out."""

from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.control.fleet import TargetSeen
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, Resource, answer, view_of
from gpubroker_server.gateway.http.times import AsOf, Time, rfc3339
from gpubroker_server.gateway.parts import Parts

resource = Resource("cluster")


class TargetView(TypedDict):
    scope: Annotated[str, Field(description="`all`, `pool:NAME`, `label:KEY=VALUE` or `node:NAME`.")]
    measure: Annotated[str, Field(description="`gpu_utilization`, `gpu_memory`, `host_memory` or `disk`.")]
    least: Annotated[float, Field(description="0 to 1, as all shares here.")]
    most: float
    value: Annotated[float | None, Field(description="As last measured; null if nothing of it is measured.")]
    state: Annotated[str, Field(description="`in` or `out`.")]
    changed_at: Annotated[Time, Field(description="Since when it is in, or out.")]
    background_share: Annotated[
        float | None,
        Field(description="What background and idle work may take of it; null if nothing holds it back."),
    ]
    background_left_mb: Annotated[int | None, Field(description="What of that may still be started.")]


class PressureView(TypedDict):
    """A reason to take no more of the work that can wait."""

    measure: str
    value: float | None
    high: float
    activated_at: Time
    refused_below: Annotated[int, Field(description="Tasks with a lower priority are refused (429).")]


class TargetList(AsOf):
    items: list[TargetView]
    backpressure: list[PressureView]


@resource.route("GET /targets", "targets_list", Scope.CLUSTER_READ, TargetList, "follower-stale")
async def list_targets(call: Call, parts: Parts) -> Response:
    """List the targets of the fleet and of its parts: what is measured, whether that is inside, since when.

    The list is empty while no leader has looked. What keeps out the tasks of one tenant is listed for that
    tenant, and with the scope `admin`.
    """
    as_of, leader = parts.freshness.as_of(), parts.leadership.leader()
    fleet = None if leader is None else leader.fleet
    view: TargetList = {**as_of, "items": [], "backpressure": []}
    if fleet is not None:
        view["items"] = [_target_view(one, fleet.background_mb) for one in fleet.targets]
        view["backpressure"] = [
            {
                "measure": one.name,
                "value": one.value,
                "high": one.high,
                "activated_at": rfc3339(one.since),
                "refused_below": one.closed_below,
            }
            for one in fleet.pressures
            if not one.tenant or call.identity.may_see(one.tenant)
        ]
    return answer(view)


def _target_view(one: TargetSeen, background_mb: dict[str, int]) -> TargetView:
    is_controlled = one.share is not None
    left_mb = max(0, background_mb.get(one.scope, 0)) if is_controlled else None
    return view_of(
        TargetView,
        one,
        state="in" if one.is_in else "out",
        changed_at=rfc3339(one.since),
        background_share=one.share,
        background_left_mb=left_mb,
    )
