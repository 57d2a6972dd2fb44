"""Whether a set of components fits the fleet, or another one. Nothing is stored."""

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches

from fastapi import APIRouter, Response

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, Mib, Seconds
from gpubroker_server.core.explain.fit import Component, planning
from gpubroker_server.core.explain.planned_fleet import Machine, fleet_of
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.devices import as_of
from gpubroker_server.gateway.explain.plan import MOST_TASKS, FleetPlanView, PlanFleet, PlannedNodes
from gpubroker_server.gateway.explain.plan_views import plan_view
from gpubroker_server.gateway.http.concurrency import aside
from gpubroker_server.gateway.http.faults import refused
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.parts import GatewayParts
from gpubroker_server.gateway.status.task_view import priority_of
from gpubroker_server.gateway.submission.demand import demand_of
from gpubroker_server.gateway.submission.permission import check_priority
from gpubroker_server.gateway.submission.resources import Resources
from gpubroker_server.gateway.submission.submissions import demand_in

LIMIT_SECONDS = Seconds(10.0)

router = APIRouter(route_class=DirectRoute, tags=["cluster"])


@router.post(
    "/plan",
    operation_id="plan",
    dependencies=[needs(Scope.CLUSTER_READ)],
    response_model=FleetPlanView,
    responses=problems(
        "malformed-json",
        "unauthenticated",
        "forbidden",
        "priority-not-allowed",
        "payload-too-large",
        "unsupported-media-type",
        "validation-failed",
        "pool-mismatch",
        "too-many-requests",
        "follower-stale",
    ),
)
async def plan_components(call: Call, body: PlanFleet) -> Response:
    """Say whether components fit the fleet: where each goes, what is missing, and whom it would displace.

    With `fleet`, on such machines, empty; otherwise beside what runs on those that are there. Of what waits
    in the queue only those count for whom a forecast keeps room. One plan is worked out at a time.
    """
    parts, now = call.parts, call.parts.clock.now()
    as_of(parts)
    tenant = _tenant(call, body)
    components = [_component(call, body, index, tenant) for index in range(len(body.components))]
    if sum(one.count * max(1, len(one.demand.bundles)) for one in components) > MOST_TASKS:
        detail = f"at most {MOST_TASKS} tasks and ranks of gangs in all"
        raise refused([Fault(pointer="/components", detail=detail, code="too-many")])
    async with parts.plans.take():
        if body.fleet is None:
            world, policy, forecasts = parts.world.snapshot(), parts.policy, parts.forecasts()
        else:
            world, policy, forecasts = _fleet(body.fleet, parts, now), _policy(body, parts.policy), ()
        try:
            plan = await aside(planning(world, components, tenant, policy, now, forecasts), LIMIT_SECONDS)
        except TimeoutError:
            detail = (
                f"this takes longer than {LIMIT_SECONDS:g} s to work out; ask about fewer tasks at a time"
            )
            raise refused([Fault(pointer="/components", detail=detail, code="too-long")]) from None
    return answer(plan_view(world, components, plan, call.identity, now))


def _tenant(call: Call, body: PlanFleet) -> str:
    mine = call.identity.tenant
    if body.tenant is None or body.tenant == mine:
        return mine
    if not call.identity.may(Scope.ADMIN):
        raise Problem(
            "forbidden",
            f'token "{call.identity.name}" is of tenant "{mine}"; planning for tenant "{body.tenant}" needs '
            "the scope admin; leave tenant out, or name your own",
            errors=[Fault(pointer="/tenant", detail=f'only "{mine}"', code="other-tenant")],
        )
    _check_known(body.tenant, call.parts)
    return body.tenant


def _check_known(tenant: str, parts: GatewayParts) -> None:
    """A typing error would be planned as a tenant that has nothing and may have what anybody may."""
    world, listed = parts.world, {rule.name for rule in parts.policy.tenants} - {"*"}
    known = {*listed, *parts.identity.tenants(), *world.accounts, *world.queue.tenants}
    if tenant not in known:
        near = get_close_matches(tenant, sorted(known), n=1)
        meant = f'did you mean "{near[0]}"?' if near else "GET /tenants lists them"
        detail = (
            f'there is no tenant "{tenant}": none is configured so, and none has a token or tasks; {meant}'
        )
        raise refused([Fault(pointer="/tenant", detail=detail, code="unknown")])


def _policy(body: PlanFleet, policy: Policy) -> Policy:
    """What tenants may have of the fleet that is there says nothing about another, unless one is named."""
    return replace(policy, tenants=()) if body.tenant is None else policy


def _component(call: Call, body: PlanFleet, index: int, tenant: str) -> Component:
    asked, at, defaults = body.components[index], f"/components/{index}", call.parts.defaults
    task = asked.as_task()
    priority = priority_of(task, defaults)
    check_priority(call, priority, tenant, at=f"{at}/priority")
    demand, _ = demand_in(call, task, tenant, at=f"{at}/resources")
    if body.fleet is not None and body.tenant is None:
        demand = _without_limits(demand)
    roles = [Resources.model_validate(role.model_dump()) for role in asked.resources.roles.values()]
    apart = tuple(demand_of(task.model_copy(update={"resources": role}), defaults) for role in roles)
    return Component(asked.name, asked.count, demand, priority, apart)


def _without_limits(demand: Demand) -> Demand:
    """Without those of how many tasks of a tenant or a label run at once; what its pool has still counts."""
    pools = tuple((name, amount) for name, amount in demand.slots if name.startswith("pool:"))
    return replace(demand, slots=pools)


def _fleet(nodes: Iterable[PlannedNodes], parts: GatewayParts, now: Instant) -> World:
    limits = parts.policy.custom_limits
    custom = tuple(sorted((limit.name, limit.amount) for limit in limits if limit.per_node))
    machines = (
        Machine(
            f"{kind.name}{number + 1}" if kind.count > 1 else kind.name,
            kind.cpu,
            Mib(kind.memory_mb),
            tuple((gpu.kind, Mib(gpu.memory_mb)) for gpu in kind.gpus for _ in range(gpu.count)),
            tuple(sorted(kind.labels.items())),
            custom,
        )
        for kind in nodes
        for number in range(kind.count)
    )
    return fleet_of(machines, parts.kinds, now)
