"""The tenants as the API tells them: what they may have, what they have, and where they stand."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.fair_share import Levels
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.status.views import AsOf


class TenantView(TypedDict):
    name: str
    cohort: Annotated[str | None, Field(description="Whose members lend each other what they do not use.")]
    guaranteed_mb: Annotated[int | None, Field(description="Of GPU memory, in MiB; null: no quota.")]
    borrow_mb: Annotated[int | None, Field(description="Beyond it at most; null: what the cohort leaves.")]
    held_mb: Annotated[int, Field(description="Leased, until it is confirmed to be free.")]
    borrowed_mb: Annotated[int, Field(description="What of that is beyond its guarantee.")]
    pledged_mb: Annotated[int, Field(description="What is being freed for its tasks.")]
    usage_mb_seconds: Annotated[
        float, Field(description="What it held, times how long, fading with policy.usage_half_life_seconds.")
    ]
    weight: float
    fair_share: Annotated[float, Field(description="Its part of the weights of all tenants known, 0 to 1.")]
    level: Annotated[
        float, Field(description="Usage and holding against its fair share; the lowest goes first in a band.")
    ]
    max_priority: int
    pending: int
    active: Annotated[int, Field(description="Tasks admitted, running or stopping.")]


class TenantList(AsOf):
    items: list[TenantView]


def may_compare(viewer: Identity, tenant: str) -> bool:
    """Whether somebody may know what a tenant may have: how a cluster is shared is part of the cluster."""
    return viewer.tenant == tenant or viewer.may(Scope.CLUSTER_READ)


def tenant_views(world: World, policy: Policy, now: Instant, viewer: Identity) -> Iterator[TenantView]:
    """In name order: those that are configured, that hold or wait for anything, or ever held anything;
    or the viewer's own alone, as `may_compare` says."""
    levels = Levels(world, policy, now)
    listed = {tenant.name for tenant in policy.tenants} - {"*"}
    pending, active = _pending(world), Counter(world.tasks[task].tenant for task in world.active)
    known = listed | levels.tenants | set(pending) | set(active)
    for name in sorted(known if viewer.may(Scope.CLUSTER_READ) else {viewer.tenant}):
        mine = policy.tenant(name)
        held_mb = world.accounts.held_mb(name)
        yield {
            "name": name,
            "cohort": mine.cohort or None,
            "guaranteed_mb": mine.guaranteed_mb,
            "borrow_mb": mine.borrow_mb,
            "held_mb": held_mb,
            "borrowed_mb": 0 if mine.guaranteed_mb is None else max(0, held_mb - mine.guaranteed_mb),
            "pledged_mb": levels.claimed_mb(name) - held_mb if name in levels.tenants else 0,
            "usage_mb_seconds": round(world.accounts.used(name, now), 3),
            "weight": mine.weight,
            "fair_share": round(levels.fair_share(name), 6),
            "level": round(levels.level(name), 6),
            "max_priority": mine.max_priority,
            "pending": pending[name],
            "active": active[name],
        }


def _pending(world: World) -> Counter[str]:
    queue = world.queue
    aside = (*queue.held, *queue.awaiting, *queue.delayed)
    waiting = Counter(world.tasks[task].tenant for task in aside)
    for group in queue.groups.values():
        waiting[group.tenant] += len(group)
    return waiting
