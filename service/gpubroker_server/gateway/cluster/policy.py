"""Routes that read the operator's configuration and the state of tenants."""

from collections.abc import Iterator, Mapping

from fastapi import Response
from gpubroker.wire.answered import Listed
from gpubroker.wire.policy import (
    Band,
    CustomLimit,
    PreemptionRules,
    Profile,
    RunningLimit,
    TaskDefaults,
    Tenant,
    Tenants,
)
from gpubroker.wire.policy import Policy as ShownPolicy
from msgspec import convert
from msgspec.structs import replace

from gpubroker_server.core.domain.policy import BANDS, Policy
from gpubroker_server.core.planning.tenants.fair_share import FairShareLevels
from gpubroker_server.core.planning.tenants.quota import cohort_holdings
from gpubroker_server.core.world.task_counts import tasks_by_tenant
from gpubroker_server.gateway.cluster.pauses import paused_queues
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.routing import Caller, Resource, answer

resource = Resource("cluster")


@resource.route("GET /tenants", "tenants_list", Scope.TASKS_READ, Tenants, "follower-stale")
async def list_tenants(caller: Caller, parts: Parts) -> Response:
    """List tenants with quota, holding, usage and fair share.

    A token without the scope cluster:read sees only its own tenant.
    """
    moment, held = parts.freshness.moment(), dict(parts.world.accounts.held())
    cohorts = cohort_holdings(held, parts.policy) if caller.may(Scope.CLUSTER_READ) else ()
    return answer(Tenants(**moment, items=tuple(_tenants(parts, caller)), cohorts=tuple(cohorts)))


def may_compare(viewer: Identity, tenant: str) -> bool:
    """Return True if the token may see the quota and weight of a tenant. A token that may read the cluster
    may see those of all tenants, because they say how the cluster is shared."""
    return viewer.tenant == tenant or viewer.may(Scope.CLUSTER_READ)


def _tenants(parts: Parts, viewer: Identity) -> Iterator[Tenant]:
    """Yield, by name, the tenants that the token may see. They are configured or paused, have tasks, or have
    held memory."""
    world, policy, now = parts.world, parts.policy, parts.clock.now()
    levels = FairShareLevels(world, policy, now)
    configured = {tenant.name for tenant in policy.tenants} - {"*"}
    pending, active = tasks_by_tenant(world)
    paused = {pause.queue: pause for pause in paused_queues(world)}
    paused_tenants = {pause.tenant for pause in world.queue.pauses.values()} - {""}
    tenants = configured | levels.tenants | set(pending) | set(active) | paused_tenants
    shown = tenants if viewer.may(Scope.CLUSTER_READ) else {viewer.tenant}
    weights = sum(policy.tenant(name).weight for name in sorted(tenants | shown))
    for name in sorted(shown):
        rule = policy.tenant(name)
        held_mb = world.accounts.held_mb(name)
        yield Tenant(
            name=name,
            cohort=rule.cohort,
            guaranteed_mb=rule.guaranteed_mb,
            borrow_mb=rule.borrow_mb,
            held_mb=held_mb,
            borrowed_mb=0 if rule.guaranteed_mb is None else max(0, held_mb - rule.guaranteed_mb),
            pledged_mb=levels.claimed_mb(name) - held_mb if name in levels.tenants else 0,
            usage_mb_seconds=round(world.accounts.used(name, now), 3),
            weight=rule.weight,
            fair_share=round(rule.weight / weights, 6),
            level=round(levels.level(name), 6),
            max_priority=rule.max_priority,
            pending=pending[name],
            active=active[name],
            paused=paused.get(f"tenant:{name}"),
        )


@resource.route("GET /profiles", "profiles_list", Scope.TASKS_READ, Listed[Profile])
async def list_profiles(parts: Parts) -> Response:
    """List the roles that a task may name: the roles that come with the service, and the operator's own
    roles."""
    return answer(Listed(_by_name(parts.rules.defaults.profiles)))


def _by_name(defaults: Mapping[str, Profile]) -> tuple[Profile, ...]:
    return tuple(replace(profile, name=name) for name, profile in sorted(defaults.items()))


@resource.route("GET /policy", "policy_get", Scope.TASKS_READ, ShownPolicy)
async def get_policy(caller: Caller, parts: Parts) -> Response:
    """Read what the operator has configured: bands, kinds, pools, limits, the maximum per task, and defaults.

    A token without the scope cluster:read sees only the rules of its own tenant.
    """
    policy, defaults = parts.policy, parts.rules.defaults
    return answer(
        ShownPolicy(
            bands=tuple(Band(*band) for band in BANDS),
            ageing_seconds_per_point=policy.ageing_seconds_per_point,
            placement=policy.placement,
            preemption=PreemptionRules(
                enabled=policy.preemption,
                budget=policy.preemption_budget,
                shield_seconds=policy.shield_seconds,
                min_run_seconds=policy.min_run_seconds,
                min_residency_seconds=policy.min_residency_seconds,
                yields_to_tasks_seconds=policy.yields_to_tasks_seconds,
            ),
            overuse=policy.overuse,
            overuse_tolerance=policy.overuse_tolerance,
            learned_margin=policy.learned_margin,
            kinds=parts.rules.kinds,
            pools=policy.pools,
            custom_limits=tuple(
                CustomLimit(
                    limit.name,
                    limit.amount,
                    "node" if limit.per_node else "cluster",
                    limit.priority_threshold,
                )
                for limit in policy.custom_limits
                if ":" not in limit.name
            ),
            max_running=tuple(_running_limits(policy, caller)),
            maximum=policy.maximum,
            defaults=convert(defaults, TaskDefaults, from_attributes=True),
            model_types=_by_name(defaults.model_types),
            tenants=tuple(rule for rule in policy.tenants if _concerns(caller, rule.name)),
            streams=dict(policy.streams),
            body_bytes=parts.limits.body_bytes,
            batch_body_bytes=parts.limits.batch_body_bytes,
            upload_bytes=parts.limits.upload_bytes,
            upload_files=parts.limits.upload_files,
        )
    )


def _concerns(viewer: Identity, tenant: str) -> bool:
    return tenant == "*" or may_compare(viewer, tenant)


def _running_limits(policy: Policy, viewer: Identity) -> Iterator[RunningLimit]:
    for limit in policy.custom_limits:
        subject, _, name = limit.name.partition(":")
        if subject == "label" or (subject == "tenant" and _concerns(viewer, name)):
            yield RunningLimit(limit.name, limit.amount)
