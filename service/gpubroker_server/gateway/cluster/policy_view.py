"""The operator's choices as they are told to those who live with them."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.policy import BANDS, CustomLimit, Policy, Pool, TenantPolicy
from gpubroker_server.gateway.cluster.tenants import may_compare
from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.parts import Defaults, GatewayParts


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
    per: Annotated[str, Field(description="`cluster`, or `node`: each node has so much.")]
    priority_threshold: Annotated[int, Field(description="Tasks of lower priority get none.")]


class RunningView(TypedDict):
    of: Annotated[str, Field(description="`tenant:NAME` or `label:KEY=VALUE`; `*` is each for itself.")]
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


class ModelTypeView(TypedDict):
    name: str
    priority: int | None
    gpu_mb: int | str | None
    cpu: float | None
    memory_mb: int | None
    timeout_seconds: float | None
    max_retries: int | None


class PreemptionView(TypedDict):
    enabled: bool
    budget: int
    shield_seconds: float
    min_run_seconds: float


class TenantRuleView(TypedDict):
    name: str
    cohort: str | None
    guaranteed_mb: int | None
    borrow_mb: int | None
    weight: float
    max_priority: int


class PolicyView(TypedDict):
    """What the operator has chosen, as far as it concerns this token's tenant; with the scope cluster:read
    all of it."""

    bands: list[BandView]
    ageing_seconds_per_point: float
    placement: str
    preemption: PreemptionView
    overuse: Annotated[str, Field(description="`report` or `stop`: what becomes of runs above their lease.")]
    overuse_tolerance: float
    learned_margin: float
    kinds: list[KindRuleView]
    pools: list[PoolView]
    custom_limits: list[CustomView]
    max_running: list[RunningView]
    maximum: Annotated[MaximumView, Field(description="The most one task may ask for; null: what there is.")]
    defaults: DefaultsView
    model_types: list[ModelTypeView]
    tenants: list[TenantRuleView]
    streams: Annotated[dict[str, float], Field(description="Weights of work streams.")]
    body_bytes: int
    batch_body_bytes: Annotated[int, Field(description="The same of `POST /tasks/batch`.")]


def policy_view(parts: GatewayParts, viewer: Identity) -> PolicyView:
    policy = parts.policy
    return {
        "bands": [{"name": name, "lowest": low, "highest": high} for name, low, high in BANDS],
        "ageing_seconds_per_point": policy.ageing_seconds_per_point,
        "placement": policy.placement,
        "preemption": {
            "enabled": policy.preemption,
            "budget": policy.preemption_budget,
            "shield_seconds": policy.shield_seconds,
            "min_run_seconds": policy.min_run_seconds,
        },
        "overuse": policy.overuse,
        "overuse_tolerance": policy.overuse_tolerance,
        "learned_margin": policy.learned_margin,
        "kinds": [
            {"name": kind.name, "power": kind.power, "context_mb": kind.context_mb} for kind in parts.kinds
        ],
        "pools": [_pool_view(pool) for pool in policy.pools],
        "custom_limits": [_custom_view(limit) for limit in policy.custom_limits if ":" not in limit.name],
        "max_running": _running_views(policy, viewer),
        "maximum": _maximum_view(policy),
        "defaults": _defaults_view(parts.defaults),
        "model_types": _model_type_views(parts.defaults),
        "tenants": [_tenant_view(rule) for rule in policy.tenants if _concerns(viewer, rule.name)],
        "streams": dict(policy.streams),
        "body_bytes": parts.limits.body_bytes,
        "batch_body_bytes": parts.limits.batch_body_bytes,
    }


def _concerns(viewer: Identity, tenant: str) -> bool:
    return tenant == "*" or may_compare(viewer, tenant)


def _pool_view(pool: Pool) -> PoolView:
    return {
        "name": pool.name,
        "kinds": list(pool.kinds),
        "nodes": {label: list(values) for label, values in pool.nodes},
        "fractions": pool.fractions,
        "cpu": pool.cpu,
        "gpus": pool.gpus,
        "gpu_mb": pool.gpu_mb,
        "memory_mb": pool.memory_mb,
        "custom": dict(pool.custom),
    }


def _custom_view(limit: CustomLimit) -> CustomView:
    return {
        "name": limit.name,
        "limit": limit.amount,
        "per": "node" if limit.per_node else "cluster",
        "priority_threshold": limit.priority_threshold,
    }


def _running_views(policy: Policy, viewer: Identity) -> list[RunningView]:
    told: list[RunningView] = []
    for limit in policy.custom_limits:
        subject, _, name = limit.name.partition(":")
        if subject == "label" or (subject == "tenant" and _concerns(viewer, name)):
            told.append({"of": limit.name, "limit": limit.amount})
    return told


def _maximum_view(policy: Policy) -> MaximumView:
    most = policy.maximum
    return {
        "gpus": most.gpus,
        "gpu_mb": most.gpu_mb,
        "cpu": most.cpu,
        "memory_mb": most.memory_mb,
        "timeout_seconds": most.timeout_seconds,
        "max_retries": most.max_retries,
        "grace_seconds": most.grace_seconds,
    }


def _defaults_view(defaults: Defaults) -> DefaultsView:
    return {
        "priority": defaults.priority,
        "cpu": defaults.cpu,
        "max_retries": defaults.max_retries,
        "grace_seconds": defaults.grace_seconds,
        "timeout_seconds": defaults.timeout_seconds,
    }


def _model_type_views(defaults: Defaults) -> list[ModelTypeView]:
    return [
        {
            "name": name,
            "priority": usual.priority,
            "gpu_mb": usual.gpu_mb,
            "cpu": usual.cpu,
            "memory_mb": usual.memory_mb,
            "timeout_seconds": usual.timeout_seconds,
            "max_retries": usual.max_retries,
        }
        for name, usual in sorted(defaults.model_types.items())
    ]


def _tenant_view(rule: TenantPolicy) -> TenantRuleView:
    return {
        "name": rule.name,
        "cohort": rule.cohort or None,
        "guaranteed_mb": rule.guaranteed_mb,
        "borrow_mb": rule.borrow_mb,
        "weight": rule.weight,
        "max_priority": rule.max_priority,
    }
