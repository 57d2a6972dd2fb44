"""What the operator has configured, and what each tenant has of it."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.policy import BANDS, Policy, Pool
from gpubroker_server.core.planning.tenants.fair_share import FairShareLevels
from gpubroker_server.core.planning.tenants.quota import cohort_holdings
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.pauses import PausedView, paused_views
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.routing import Call, Resource, answer, view_of
from gpubroker_server.gateway.http.times import AsOf
from gpubroker_server.gateway.parts import Parts

resource = Resource("cluster")


class TenantView(TypedDict):
    name: str
    cohort: Annotated[str | None, Field(description="Its members lend each other what they do not use.")]
    guaranteed_mb: Annotated[int | None, Field(description="Of GPU memory, in MiB; null: no quota.")]
    borrow_mb: Annotated[int | None, Field(description="Beyond its guarantee; null: what the cohort leaves.")]
    held_mb: Annotated[int, Field(description="Leased, until it is confirmed to be free.")]
    borrowed_mb: Annotated[int, Field(description="Of that, what is beyond its guarantee.")]
    pledged_mb: Annotated[int, Field(description="What is being freed for its tasks.")]
    usage_mb_seconds: Annotated[
        float, Field(description="Memory held, times seconds, decaying with policy.usage_half_life_seconds.")
    ]
    weight: float
    fair_share: Annotated[float, Field(description="Its part of the weights of all known tenants, 0 to 1.")]
    level: Annotated[
        float, Field(description="Usage and holding by fair share; in a band the lowest goes first.")
    ]
    max_priority: int
    pending: int
    active: Annotated[int, Field(description="Tasks admitted, running or stopping.")]
    paused: Annotated[PausedView | None, Field(description="While its queue starts nothing.")]


class CohortView(TypedDict):
    name: str
    guaranteed_mb: Annotated[int, Field(description="The guarantees of its members together.")]
    held_mb: int
    message: Annotated[str | None, Field(description="Why it holds more than that; null if it does not.")]


class TenantList(AsOf):
    items: list[TenantView]
    cohorts: Annotated[list[CohortView], Field(description="Empty without the scope cluster:read.")]


@resource.route("GET /tenants", "tenants_list", Scope.TASKS_READ, TenantList, "follower-stale")
async def list_tenants(call: Call, parts: Parts) -> Response:
    """List tenants with quota, holding, usage and fair share.

    A token without the scope cluster:read sees only its own tenant.
    """
    cohorts = _cohorts(parts) if call.identity.may(Scope.CLUSTER_READ) else []
    items = list(_views(parts, call.identity))
    view: TenantList = {**parts.freshness.as_of(), "items": items, "cohorts": cohorts}
    return answer(view)


def _cohorts(parts: Parts) -> list[CohortView]:
    cohorts = cohort_holdings(dict(parts.world.accounts.held()), parts.policy)
    return [view_of(CohortView, cohort) for cohort in cohorts]


def may_compare(viewer: Identity, tenant: str) -> bool:
    """Whether the token may see what a tenant may have: how a cluster is shared is part of the cluster."""
    return viewer.tenant == tenant or viewer.may(Scope.CLUSTER_READ)


def _views(parts: Parts, viewer: Identity) -> Iterator[TenantView]:
    """By name: tenants that are configured, that hold or wait for something, or that ever held something."""
    world, policy, now = parts.world, parts.policy, parts.clock.now()
    levels = FairShareLevels(world, policy, now)
    configured = {tenant.name for tenant in policy.tenants} - {"*"}
    pending, active = _pending(world), Counter(world.tasks[task].tenant for task in world.active)
    paused = {view["queue"]: view for view in paused_views(world)}
    paused_tenants = {pause.tenant for pause in world.queue.pauses.values()} - {""}
    known = configured | levels.tenants | set(pending) | set(active) | paused_tenants
    shown = known if viewer.may(Scope.CLUSTER_READ) else {viewer.tenant}
    weights = sum(policy.tenant(name).weight for name in sorted(known | shown))
    for name in sorted(shown):
        rule = policy.tenant(name)
        held_mb = world.accounts.held_mb(name)
        yield {
            "name": name,
            "cohort": rule.cohort or None,
            "guaranteed_mb": rule.guaranteed_mb,
            "borrow_mb": rule.borrow_mb,
            "held_mb": held_mb,
            "borrowed_mb": 0 if rule.guaranteed_mb is None else max(0, held_mb - rule.guaranteed_mb),
            "pledged_mb": levels.claimed_mb(name) - held_mb if name in levels.tenants else 0,
            "usage_mb_seconds": round(world.accounts.used(name, now), 3),
            "weight": rule.weight,
            "fair_share": round(rule.weight / weights, 6),
            "level": round(levels.level(name), 6),
            "max_priority": rule.max_priority,
            "pending": pending[name],
            "active": active[name],
            "paused": paused.get(f"tenant:{name}"),
        }


def _pending(world: World) -> Counter[str]:
    queue = world.queue
    outside = (*queue.held, *queue.awaiting, *queue.delayed, *queue.paused)
    waiting = Counter(world.tasks[task].tenant for task in outside)
    for group in queue.groups.values():
        waiting[group.tenant] += len(group)
    return waiting


class BandView(TypedDict):
    name: str
    lowest: int
    highest: int


class KindRuleView(TypedDict):
    name: str
    power: int
    context_mb: int


class PoolView(TypedDict):
    name: str
    kinds: list[str]
    nodes: dict[str, list[str]]
    fractions: bool
    cpu: float | None
    gpus: int | None
    gpu_mb: int | None
    memory_mb: int | None
    custom: dict[str, float]


class CustomView(TypedDict):
    name: str
    limit: float
    per: Annotated[str, Field(description="`cluster`, or `node`: each node has this much.")]
    priority_threshold: Annotated[int, Field(description="Tasks of lower priority get none.")]


class RunningView(TypedDict):
    of: Annotated[str, Field(description="`tenant:NAME` or `label:KEY=VALUE`; `*` is each one by itself.")]
    limit: float


class MaximumView(TypedDict):
    gpus: int | None
    gpu_mb: int | None
    cpu: float | None
    memory_mb: int | None
    timeout_seconds: float | None
    max_retries: int | None
    grace_seconds: float | None


class DefaultsView(TypedDict):
    priority: int
    cpu: float
    max_retries: int
    grace_seconds: float
    timeout_seconds: float | None


class TypeDefaultsView(TypedDict):
    priority: int | None
    gpu_mb: int | str | None
    cpu: float | None
    memory_mb: int | None
    timeout_seconds: float | None
    max_retries: int | None


class ModelTypeView(TypeDefaultsView):
    name: str


class ProfileDefaultsView(TypeDefaultsView):
    gpus: int | None
    max_concurrency: Annotated[
        int | None, Field(description="A task finds it in GPUBROKER_MAX_CONCURRENCY; no other effect.")
    ]


class ProfileView(ProfileDefaultsView):
    """What a task of this role gets for what it leaves out; null: the default of all tasks."""

    name: str


class ProfileList(TypedDict):
    items: list[ProfileView]


@resource.route("GET /profiles", "profiles_list", Scope.TASKS_READ, ProfileList)
async def list_profiles(parts: Parts) -> Response:
    """List the roles that a task may name: those that come with the service, and the operator's own."""
    profiles = parts.rules.defaults.profiles
    names = sorted(profiles)
    view: ProfileList = {
        "items": [{**view_of(ProfileDefaultsView, profiles[name]), "name": name} for name in names]
    }
    return answer(view)


class PreemptionView(TypedDict):
    enabled: bool
    budget: int
    shield_seconds: float
    min_run_seconds: float
    min_residency_seconds: float


class TenantRuleView(TypedDict):
    name: str
    cohort: str | None
    guaranteed_mb: int | None
    borrow_mb: int | None
    weight: float
    max_priority: int


class PolicyView(TypedDict):
    """What the operator has configured, as far as it concerns this token's tenant; with the scope
    cluster:read all of it."""

    bands: list[BandView]
    ageing_seconds_per_point: float
    placement: str
    preemption: PreemptionView
    overuse: Annotated[str, Field(description="`report` or `stop`: what is done to a run above its lease.")]
    overuse_tolerance: float
    learned_margin: float
    kinds: list[KindRuleView]
    pools: list[PoolView]
    custom_limits: list[CustomView]
    max_running: list[RunningView]
    maximum: Annotated[MaximumView, Field(description="The most that one task may ask for; null: no limit.")]
    defaults: DefaultsView
    model_types: list[ModelTypeView]
    tenants: list[TenantRuleView]
    streams: Annotated[dict[str, float], Field(description="Weights of work streams.")]
    body_bytes: int
    batch_body_bytes: Annotated[int, Field(description="The same for `POST /tasks/batch`.")]


@resource.route("GET /policy", "policy_get", Scope.TASKS_READ, PolicyView)
async def get_policy(call: Call, parts: Parts) -> Response:
    """Read what the operator has configured: bands, kinds, pools, limits, the most per task, and defaults.

    A token without the scope cluster:read sees only the rules of its own tenant.
    """
    policy, viewer, types = parts.policy, call.identity, parts.rules.defaults.model_types
    view: PolicyView = {
        "bands": [{"name": name, "lowest": low, "highest": high} for name, low, high in BANDS],
        "ageing_seconds_per_point": policy.ageing_seconds_per_point,
        "placement": policy.placement,
        "preemption": {
            "enabled": policy.preemption,
            "budget": policy.preemption_budget,
            "shield_seconds": policy.shield_seconds,
            "min_run_seconds": policy.min_run_seconds,
            "min_residency_seconds": policy.min_residency_seconds,
        },
        "overuse": policy.overuse,
        "overuse_tolerance": policy.overuse_tolerance,
        "learned_margin": policy.learned_margin,
        "kinds": [view_of(KindRuleView, kind) for kind in parts.rules.kinds],
        "pools": [_pool_view(pool) for pool in policy.pools],
        "custom_limits": _custom_views(policy),
        "max_running": _running_views(policy, viewer),
        "maximum": view_of(MaximumView, policy.maximum),
        "defaults": view_of(DefaultsView, parts.rules.defaults),
        "model_types": [{**view_of(TypeDefaultsView, types[name]), "name": name} for name in sorted(types)],
        "tenants": [
            {**view_of(TenantRuleView, rule), "cohort": rule.cohort or None}
            for rule in policy.tenants
            if _concerns(viewer, rule.name)
        ],
        "streams": dict(policy.streams),
        "body_bytes": parts.limits.body_bytes,
        "batch_body_bytes": parts.limits.batch_body_bytes,
    }
    return answer(view)


def _concerns(viewer: Identity, tenant: str) -> bool:
    return tenant == "*" or may_compare(viewer, tenant)


def _pool_view(pool: Pool) -> PoolView:
    return {
        **view_of(PoolView, pool),
        "kinds": list(pool.kinds),
        "nodes": {label: list(values) for label, values in pool.nodes},
        "custom": dict(pool.custom),
    }


def _custom_views(policy: Policy) -> list[CustomView]:
    return [
        {
            "name": limit.name,
            "limit": limit.amount,
            "per": "node" if limit.per_node else "cluster",
            "priority_threshold": limit.priority_threshold,
        }
        for limit in policy.custom_limits
        if ":" not in limit.name
    ]


def _running_views(policy: Policy, viewer: Identity) -> list[RunningView]:
    views: list[RunningView] = []
    for limit in policy.custom_limits:
        subject, _, name = limit.name.partition(":")
        if subject == "label" or (subject == "tenant" and _concerns(viewer, name)):
            views.append({"of": limit.name, "limit": limit.amount})
    return views
