"""The route that checks whether components fit the present fleet or a fleet in the body. Nothing is
stored."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Self

from fastapi import Response
from gpubroker.wire.forecasts import Sizing
from gpubroker.wire.plans import FleetPlan
from msgspec.structs import replace
from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gpubroker_server.core.admission.admit import no_such, unknown_rank_profiles
from gpubroker_server.core.admission.defaults import first
from gpubroker_server.core.admission.demands import demand_of, settled_demand
from gpubroker_server.core.admission.facts import refused_at
from gpubroker_server.core.admission.sizing import UNKNOWN_SIZE
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds
from gpubroker_server.core.explain.fit import MAX_RUNS, Component, Machine, fleet_of, plan_fleet
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.explain.plan import shown_plan
from gpubroker_server.gateway.explain.viewpoint import viewpoint
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.known_names import unknown_tenant
from gpubroker_server.gateway.submission.resources import (
    MAX_MB,
    MemoryMb,
    NamedResources,
    ProfileName,
    Resources,
)
from gpubroker_server.gateway.submission.task_body import Placement, Priority
from gpubroker_server.gateway.submission.translation import asked_of
from gpubroker_server.http.bodies import NAME, Body, JsonBody, KindName, Labels, line
from gpubroker_server.http.faults import invalid, problem_of, refuse
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.routing import Caller, Resource, answer
from gpubroker_server.http.waiters import run_in_thread

resource = Resource("cluster")

LIMIT_SECONDS = Seconds(10.0)
MAX_TASKS = 2000
"""The largest number of tasks of all components together, including the ranks of gangs."""
MAX_MACHINES = 1000
MAX_GPUS = 10_000

_NAME = StringConstraints(pattern=NAME)


class PlannedComponent(Body):
    """`count` tasks of one demand that all run at once. With `resources.bundles`, the component is `count`
    gangs, each of which is placed with all its ranks or not at all."""

    name: Annotated[str, _NAME]
    count: Annotated[int, Field(ge=1, le=MAX_TASKS)] = 1
    priority: Priority | None = None
    model_type: Annotated[str, line(100), Field(description="Selects the operator's defaults.")] = ""
    profile: ProfileName = ""
    resources: NamedResources
    placement: Placement = "pack"
    labels: Annotated[Labels, Field(description="For limits on how many tasks of a label run.")] = Field(
        default_factory=dict
    )


class PlannedGpus(Body):
    kind: KindName = "GPU"
    memory_mb: Annotated[int, Field(ge=1, le=MAX_MB, description="What may be leased of each.")]
    count: Annotated[int, Field(ge=1, le=64)] = 1


class PlannedNodes(Body):
    """`count` equal machines."""

    name: Annotated[str, _NAME] = "node"
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    cpu: Annotated[float, Field(ge=0, le=100_000)]
    memory_mb: Annotated[MemoryMb, Field(description="Default: as much as needed.")] = 1_073_741_824
    gpus: Annotated[list[PlannedGpus], Field(max_length=16)] = Field(default_factory=list)
    labels: Labels = Field(default_factory=dict)


class PlanFleet(Body):
    components: Annotated[list[PlannedComponent], Field(min_length=1, max_length=100)]
    fleet: (
        Annotated[
            list[PlannedNodes],
            Field(min_length=1, max_length=100, description="The machines. Default: the present fleet."),
        ]
        | None
    ) = None
    tenant: (
        Annotated[
            str,
            line(63, 1),
            Field(
                description="Its quota and limits count; a tenant other than the token's needs the scope "
                "admin. Left out: the token's tenant; with `fleet`: no quota and no limits."
            ),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _check_names_and_size(self) -> Self:
        named: dict[str, Sequence[PlannedComponent | PlannedNodes]]
        named = {"components": self.components, "fleet": self.fleet or []}
        for noun, items in named.items():
            if len({item.name for item in items}) < len(items):
                raise PydanticCustomError("same_name", "{what} must have different names", {"what": noun})
        machines = sum(nodes.count for nodes in self.fleet or [])
        gpus = sum(nodes.count * sum(gpu.count for gpu in nodes.gpus) for nodes in self.fleet or [])
        if machines > MAX_MACHINES or gpus > MAX_GPUS:
            maximum = {"machines": MAX_MACHINES, "gpus": MAX_GPUS}
            raise PydanticCustomError(
                "fleet_too_large", "fleet must have at most {machines} nodes and {gpus} GPUs", maximum
            )
        return self


@resource.route(
    "POST /plan",
    "plan",
    Scope.CLUSTER_READ,
    FleetPlan,
    "malformed-json priority-not-allowed payload-too-large unsupported-media-type validation-failed "
    "pool-mismatch too-many-requests follower-stale",
)
async def plan_components(caller: Caller, parts: Parts, body: JsonBody[PlanFleet]) -> Response:
    """Say whether components fit the fleet: where each would be placed, what is missing, and which runs they
    would displace.

    With `fleet`, the components are placed on such machines, which are empty. Without it, they are placed on
    the present fleet beside what runs there; of the tasks in the queue, only those with a forecast count. One
    plan is computed at a time.
    """
    view = viewpoint(parts, caller)
    now, tenant = view.now, _tenant(caller, parts, body)
    components = [_component(caller, parts, body, index, tenant) for index in range(len(body.components))]
    if sum(component.count * max(1, len(component.demand.bundles)) for component in components) > MAX_TASKS:
        detail = f"at most {MAX_TASKS} tasks and ranks of gangs in total"
        raise invalid(Fault(pointer="/components", detail=detail, code="too-many"))
    async with parts.plans.slot():
        if body.fleet is None:
            world, policy = parts.world.snapshot(), parts.policy
            forecasts = parts.leadership.forecasts()
        else:
            world, forecasts = _fleet(body.fleet, parts, now), ()
            # Quotas belong to the present fleet, so they hold for another one only if a tenant is named.
            policy = replace(parts.policy, tenants=()) if body.tenant is None else parts.policy
        try:
            plan = await run_in_thread(
                plan_fleet(world, components, tenant, policy, now, forecasts), LIMIT_SECONDS
            )
        except TimeoutError:
            detail = f"planning takes longer than {LIMIT_SECONDS:g} s; ask about fewer tasks at a time"
            raise invalid(Fault(pointer="/components", detail=detail, code="too-long")) from None
    return answer(shown_plan(components, plan, replace(view, world=world)))


def _tenant(caller: Identity, parts: Parts, body: PlanFleet) -> str:
    tenant = caller.tenant
    if body.tenant is None or body.tenant == tenant:
        return tenant
    if not caller.may(Scope.ADMIN):
        raise Problem(
            "forbidden",
            f'token "{caller.name}" is of tenant "{tenant}"; planning for tenant "{body.tenant}" needs '
            "the scope admin; leave tenant out, or name your own",
            errors=[Fault(pointer="/tenant", detail=f'only "{tenant}"', code="other-tenant")],
        )
    if detail := unknown_tenant(body.tenant, parts.world, parts.policy, parts.tokens):
        raise invalid(Fault(pointer="/tenant", detail=detail, code="unknown"))
    return body.tenant


def _component(caller: Identity, parts: Parts, body: PlanFleet, index: int, tenant: str) -> Component:
    asked, pointer, submissions = body.components[index], f"/components/{index}", parts.submissions
    policy, profiles = submissions.policy, submissions.defaults.profiles
    if asked.profile and asked.profile not in profiles:
        detail = no_such("profile", asked.profile, profiles)
        raise invalid(Fault(pointer=f"{pointer}/profile", detail=detail, code="unknown"))
    for refusal in unknown_rank_profiles(asked_of(asked.resources), profiles):
        raise invalid(Fault(pointer=f"{pointer}{refusal.field}", detail=refusal.message, code=refusal.code))
    of_profile = partial(policy.defaults.named, asked.model_type)
    usual = of_profile(asked.profile)
    permissions = policy.permissions
    if asked.priority is not None:
        refuse(permissions.check_priority(caller, asked.priority, tenant, at=f"{pointer}/priority"))
    configured = first(usual.priority, policy.defaults.priority)
    priority = first(asked.priority, permissions.default_priority(caller, configured, tenant))

    def settled(resources: Resources, labels: Mapping[str, str]) -> Demand:
        wanted, subject = asked_of(resources, asked.placement), asked.model_type or asked.name
        settled_or_refusal = settled_demand(
            wanted,
            usual,
            of_profile,
            policy.defaults.cpu,
            submissions.capacity,
            subject,
            tenant,
            labels,
            policy.permissions.policy,
        )
        if isinstance(settled_or_refusal, Refusal):
            raise problem_of(refused_at(f"{pointer}/resources", settled_or_refusal))
        return settled_or_refusal[0]

    demand = settled(asked.resources, asked.labels)
    if body.fleet is not None and body.tenant is None:
        demand = _without_limits(demand)
    roles = [Resources.model_validate(role.model_dump()) for role in asked.resources.roles.values()]
    apart = tuple(
        demand_of(asked_of(role, asked.placement), usual, of_profile, policy.defaults.cpu, _size_is_unknown)
        for role in roles
    )
    return Component(asked.name, asked.count, demand, priority, apart)


def _size_is_unknown(_demand: Demand) -> Sizing:
    return UNKNOWN_SIZE


def _without_limits(demand: Demand) -> Demand:
    """Return the demand without limits on how many tasks of a tenant or a label run at once. The amounts of
    pools still count."""
    pools = tuple((name, amount) for name, amount in demand.slots if name.startswith("pool:"))
    return replace(demand, slots=pools)


def _fleet(nodes: Iterable[PlannedNodes], parts: Parts, now: Instant) -> World:
    limits = parts.policy.custom_limits
    custom = tuple(sorted((limit.name, limit.amount) for limit in limits if limit.per_node))
    machines = (
        Machine(
            Node(
                NodeName(f"{kind.name}{number + 1}" if kind.count > 1 else kind.name),
                kind.cpu,
                Mib(kind.memory_mb),
                MAX_RUNS,
                incarnation="",
                boot_id="",
                labels=tuple(sorted(kind.labels.items())),
                custom=custom,
            ),
            tuple((gpu.kind, Mib(gpu.memory_mb)) for gpu in kind.gpus for _ in range(gpu.count)),
        )
        for kind in nodes
        for number in range(kind.count)
    )
    return fleet_of(machines, parts.rules.kinds, now)
