"""Tenants: what each may have, what it has, and its fair share."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.planning.tenants.fair_share import Levels
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.parts import Parts
from gpubroker_server.gateway.http.call import Call, answer
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.routing import Resource
from gpubroker_server.gateway.http.times import AsOf

resource = Resource("cluster")


class TenantView(TypedDict):
    name: str
    cohort: Annotated[str | None, Field(description="Its members lend each other what they do not use.")]
    guaranteed_mb: Annotated[int | None, Field(description="Of GPU memory, in MiB; null: no quota.")]
    borrow_mb: Annotated[
        int | None, Field(description="The most beyond its guarantee; null: what the cohort leaves.")
    ]
    held_mb: Annotated[int, Field(description="Leased, until it is confirmed to be free.")]
    borrowed_mb: Annotated[int, Field(description="Of that, what is beyond its guarantee.")]
    pledged_mb: Annotated[int, Field(description="What is being freed for its tasks.")]
    usage_mb_seconds: Annotated[
        float, Field(description="Memory held, times seconds, decaying with policy.usage_half_life_seconds.")
    ]
    weight: float
    fair_share: Annotated[float, Field(description="Its part of the weights of all known tenants, 0 to 1.")]
    level: Annotated[
        float,
        Field(description="Usage and holding against its fair share; in a band the lowest goes first."),
    ]
    max_priority: int
    pending: int
    active: Annotated[int, Field(description="Tasks admitted, running or stopping.")]


class TenantList(AsOf):
    items: list[TenantView]


@resource.route("GET /tenants", "tenants_list", Scope.TASKS_READ, TenantList, "follower-stale")
async def list_tenants(call: Call, parts: Parts) -> Response:
    """List tenants with quota, holding, usage and fair share.

    A token without the scope cluster:read sees only its own tenant.
    """
    view: TenantList = {**parts.freshness.as_of(), "items": list(_views(parts, call.identity))}
    return answer(view)


def may_compare(viewer: Identity, tenant: str) -> bool:
    """Whether the token may see what a tenant may have: how a cluster is shared is part of the cluster."""
    return viewer.tenant == tenant or viewer.may(Scope.CLUSTER_READ)


def _views(parts: Parts, viewer: Identity) -> Iterator[TenantView]:
    """By name: tenants that are configured, that hold or wait for something, or that ever held something."""
    world, policy, now = parts.world, parts.policy, parts.clock.now()
    levels = Levels(world, policy, now)
    configured = {tenant.name for tenant in policy.tenants} - {"*"}
    pending, active = _pending(world), Counter(world.tasks[task].tenant for task in world.active)
    known = configured | levels.tenants | set(pending) | set(active)
    for name in sorted(known if viewer.may(Scope.CLUSTER_READ) else {viewer.tenant}):
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
            "fair_share": round(levels.fair_share(name), 6),
            "level": round(levels.level(name), 6),
            "max_priority": rule.max_priority,
            "pending": pending[name],
            "active": active[name],
        }


def _pending(world: World) -> Counter[str]:
    queue = world.queue
    outside = (*queue.held, *queue.awaiting, *queue.delayed)
    waiting = Counter(world.tasks[task].tenant for task in outside)
    for group in queue.groups.values():
        waiting[group.tenant] += len(group)
    return waiting
