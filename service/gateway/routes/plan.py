"""Whether a set of components fits the fleet, or another one. Nothing is stored."""

from collections.abc import Generator, Iterable
from dataclasses import asdict
from math import inf

from fastapi import APIRouter, Response

from service.core.fleet import Component, FleetPlan, Machine, fleet_of, planning
from service.core.kinds import Kind
from service.core.units import Instant, Mib, Seconds
from service.core.world import World
from service.gateway.advice import place_views, run_view
from service.gateway.demands import demand_of
from service.gateway.direct import Call, DirectRoute, answer, needs, problems
from service.gateway.faults import refused
from service.gateway.identity import Scope
from service.gateway.intake import take_in
from service.gateway.overview import as_of
from service.gateway.planning import (
    MOST_TASKS,
    ComponentView,
    FleetPlanView,
    PlanFleet,
    PlannedComponent,
    PlannedNodes,
)
from service.gateway.problems import Fault
from service.gateway.resources import Resources
from service.gateway.turns import TURN_SECONDS, in_turns

LIMIT_SECONDS = Seconds(10.0)

UNPAUSED_SECONDS = Seconds(0.5)
"""For the fleet that is there, which changes if others have their turn."""

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
    in the queue only those count for whom a forecast keeps room.
    """
    parts, now = call.parts, call.parts.clock.now()
    as_of(parts)
    if sum(component.count for component in body.components) > MOST_TASKS:
        raise refused([Fault(pointer="/components", detail=f"at most {MOST_TASKS} in all", code="too-many")])
    components = [await _component(call, component) for component in body.components]
    world = parts.world if body.fleet is None else _fleet(body.fleet, parts.kinds, now)
    forecasts = parts.forecasts() if body.fleet is None else ()
    steps = planning(world, components, call.identity.tenant, parts.policy, now, forecasts)
    async with parts.plans.take():
        plan = await _carried_out(steps, may_pause=body.fleet is not None)
    return answer(_view(call, world, body, plan, now))


async def _carried_out(steps: Generator[None, None, FleetPlan], *, may_pause: bool) -> FleetPlan:
    """In turns with all else that the service does, if what it reads does not change meanwhile."""
    limit = LIMIT_SECONDS if may_pause else UNPAUSED_SECONDS
    try:
        return await in_turns(steps, limit, inf if not may_pause else TURN_SECONDS)
    except TimeoutError:
        detail = f"this takes longer than {limit:g} s to work out; ask about fewer tasks at a time"
        raise refused([Fault(pointer="/components", detail=detail, code="too-long")]) from None


async def _component(call: Call, asked: PlannedComponent) -> Component:
    if asked.resources.bundles:
        detail = f"{asked.name} is a gang; plan its ranks as components of their own"
        raise refused([Fault(pointer="/components", detail=detail, code="gang")])
    task, _ = await take_in(call, asked)
    apart = tuple(
        demand_of(
            asked.model_copy(update={"resources": Resources.model_validate(role.model_dump())}),
            call.parts.defaults,
        )
        for role in asked.resources.roles.values()
    )
    return Component(asked.name, asked.count, task.demand, task.priority, apart)


def _fleet(nodes: list[PlannedNodes], kinds: Iterable[Kind], now: Instant) -> World:
    machines = (
        Machine(
            f"{kind.name}{number + 1}" if kind.count > 1 else kind.name,
            kind.cpu,
            Mib(kind.memory_mb),
            tuple((gpu.kind, Mib(gpu.memory_mb)) for gpu in kind.gpus for _ in range(gpu.count)),
            tuple(sorted(kind.labels.items())),
        )
        for kind in nodes
        for number in range(kind.count)
    )
    return fleet_of(machines, kinds, now)


def _view(call: Call, world: World, body: PlanFleet, plan: FleetPlan, now: Instant) -> FleetPlanView:
    parts: list[ComponentView] = [
        {
            "name": component.name,
            "count": component.count,
            "placed": component.count - plan.missing.get(component.name, 0),
            "missing": plan.missing.get(component.name, 0),
        }
        for component in body.components
    ]
    return {
        "fits": plan.fits,
        "message": _message(plan),
        "components": parts,
        "places": [
            {
                **place_views(world, (placed.place,))[0],
                "component": placed.component,
                "displaces": len(placed.displaced),
            }
            for placed in plan.placed
        ],
        "displaced": [run_view(world, run, call.identity, now) for run in plan.displaced],
        "totals": {**asdict(plan.totals)},  # type: ignore[typeddict-item]  # the same fields
        "totals_without_colocation": {**asdict(plan.totals_apart)},  # type: ignore[typeddict-item]
    }


def _message(plan: FleetPlan) -> str:
    if not plan.fits:
        missing = ", ".join(f"{count} of {name}" for name, count in plan.missing.items())
        return f"it does not fit: there is no place for {missing}"
    if not plan.displaced:
        return "it fits"
    runs = "1 run" if len(plan.displaced) == 1 else f"{len(plan.displaced)} runs"
    return f"it fits if {runs} of lower priority leave"
