"""The route that lists the targets of the fleet, and the measures for which new work is refused."""

from fastapi import Response
from gpubroker.wire.answered import Time
from gpubroker.wire.targets import Pressure, Target, Targets

from gpubroker_server.core.control.fleet import TargetSeen
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.routing import Caller, Resource, answer

resource = Resource("cluster")


@resource.route("GET /targets", "targets_list", Scope.CLUSTER_READ, Targets, "follower-stale")
async def list_targets(caller: Caller, parts: Parts) -> Response:
    """List the targets of the fleet and of its parts: the measured value, whether it is within the target,
    and since when.

    The list is empty until a leader has measured the targets. Backpressure on the tasks of a single tenant is
    listed only for tokens of that tenant and tokens with the scope `admin`.
    """
    moment, leader = parts.freshness.moment(), parts.leadership.leader()
    fleet = None if leader is None else leader.fleet
    if fleet is None:
        return answer(Targets(**moment, items=(), backpressure=()))
    return answer(
        Targets(
            **moment,
            items=tuple(_target(target, fleet.background_mb) for target in fleet.targets),
            backpressure=tuple(
                Pressure(
                    pressure.name,
                    pressure.value,
                    pressure.high,
                    Time.at(pressure.since),
                    pressure.closed_below,
                )
                for pressure in fleet.pressures
                if not pressure.tenant or caller.may_see(pressure.tenant)
            ),
        )
    )


def _target(target: TargetSeen, background_mb: dict[str, int]) -> Target:
    return Target(
        scope=target.scope,
        measure=target.measure,
        least=target.least,
        most=target.most,
        value=target.value,
        state="in" if target.is_in else "out",
        changed_at=Time.at(target.since),
        background_share=target.share,
        background_left_mb=None if target.share is None else max(0, background_mb.get(target.scope, 0)),
    )
