"""Why a task waits: blockers, quota, ranks, devices and their holders."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.explain.advice import Advice
from gpubroker_server.core.explain.blockers import Blocker, QuotaStanding
from gpubroker_server.core.explain.diagnosis import RankVerdict
from gpubroker_server.core.explain.explain import DeviceVerdict, Explanation
from gpubroker_server.core.world.ledger import Holding
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.explain.advice import (
    NO_ADVICE,
    AdviceFields,
    PlacementView,
    advice_fields,
    expected_or_none,
    place_views,
)
from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.http.times import Time
from gpubroker_server.gateway.status.quarantine import AwaitedView, awaited_by_lease
from gpubroker_server.gateway.status.task_view import priority_now
from gpubroker_server.gateway.status.views import ExpectedView, InheritsView


class BlockerView(TypedDict):
    reason: Annotated[str, Field(description="A stable token.")]
    tier: Annotated[int, Field(description="Lower is more structural.")]
    message: str


class DeviceHolder(TypedDict):
    """`id` and `name` are null for another tenant's holder, unless the token is an admin's."""

    id: str | None
    name: str | None
    priority: int
    band: str
    gpu_mb: int
    stopping: bool
    quarantine: Annotated[AwaitedView | None, Field(description="What ends its quarantine; else null.")]
    ends: Annotated[ExpectedView | None, Field(description="Expected; null if unknown.")]


class DeviceVerdictView(TypedDict):
    """One device, judged for one task."""

    key: str
    node: str
    index: int
    kind: str
    verdict: Annotated[str, Field(description="A stable token, such as fits, no_room, too_small.")]
    message: str
    need_mb: int | None
    free_mb: Annotated[int, Field(description="For this task: memory kept for it counts as free.")]
    allocatable_mb: int
    free_in: Annotated[
        ExpectedView | None,
        Field(description="When it has enough, unless another task takes it first; null if unknown."),
    ]
    holders: list[DeviceHolder]


class QuotaView(TypedDict):
    """The quota of the task's tenant, in MiB."""

    tenant: str
    cohort: Annotated[str | None, Field(description="Its members lend each other what they do not use.")]
    guaranteed_mb: int
    used_mb: Annotated[int, Field(description="What it holds, and what is being freed for its tasks.")]
    borrowed_mb: Annotated[int, Field(description="Of that, what is beyond its guarantee.")]
    lent_mb: Annotated[int, Field(description="What its cohort would lend it now, beyond what it holds.")]
    left_mb: Annotated[int, Field(description="What it may still take, borrowed or not.")]
    counts_mb: Annotated[
        int,
        Field(
            description="What the task would count: on the largest GPUs that it may use; of a gang, the "
            "ranks that it needs at least."
        ),
    ]


class RankVerdictView(TypedDict):
    """One rank of a gang. Ranks are judged together as long as they have room together; after the first that
    has none, each one by itself."""

    rank: int
    place: Annotated[PlacementView | None, Field(description="Where there is room for it.")]
    reason: Annotated[str | None, Field(description="Null as well for a rank that can be missing.")]
    message: str


class ExplainedFields(AdviceFields):
    """What explanations and simulations have in common."""

    reason: Annotated[str | None, Field(description="Of the most structural blocker, if it waits.")]
    message: str
    position: Annotated[int | None, Field(description="Place in the queue; 1 is next.")]
    blockers: list[BlockerView]
    quota: Annotated[QuotaView | None, Field(description="Null without GPUs, or without a quota.")]
    ranks: Annotated[list[RankVerdictView] | None, Field(description="Of a gang that waits.")]
    devices: Annotated[
        list[DeviceVerdictView], Field(description="Of a gang: for its first rank without room.")
    ]


UNEXPLAINED: ExplainedFields = {
    **NO_ADVICE,
    "reason": None,
    "message": "",
    "position": None,
    "blockers": [],
    "quota": None,
    "ranks": None,
    "devices": [],
}


class EvaluatedFields(ExplainedFields):
    evaluated_at: Time
    queue_length: int
    as_of: Time
    age_seconds: float
    log_position: Annotated[int, Field(description="Position of the newest event behind this answer.")]


class ExplanationView(EvaluatedFields):
    """Why a task waits, or what it is doing. `blockers` has everything that it waits for, `remedies` what
    would help, each found by planning the task again with that change."""

    id: str
    name: str
    state: str
    inherits: Annotated[InheritsView | None, Field(description="Null if it has its own priority.")]


def blocker_view(blocker: Blocker) -> BlockerView:
    return {"reason": blocker.reason.value, "tier": blocker.reason.tier, "message": blocker.message}


def explained_fields(
    world: World, found: Explanation, advice: Advice, viewer: Identity, now: Instant
) -> ExplainedFields:
    return {
        **unadvised_fields(found),
        **advice_fields(world, advice, viewer, now),
        "quota": None if found.quota is None else _quota_view(found.quota),
        "ranks": [_rank_view(world, verdict) for verdict in found.ranks] or None,
        "devices": [_verdict_view(world, verdict, viewer, advice, now) for verdict in found.devices],
    }


def unadvised_fields(found: Explanation) -> ExplainedFields:
    """Without advice: for a task that asks for no devices."""
    return {
        **UNEXPLAINED,
        "reason": None if found.reason is None else found.reason.value,
        "message": found.message,
        "position": found.position,
        "blockers": [blocker_view(blocker) for blocker in found.blockers],
    }


def _quota_view(quota: QuotaStanding) -> QuotaView:
    found = quota.allowance
    return {
        "tenant": quota.tenant,
        "cohort": quota.cohort or None,
        "guaranteed_mb": found.guaranteed_mb,
        "used_mb": found.claimed_mb,
        "borrowed_mb": found.borrowed_mb,
        "lent_mb": found.lent_mb,
        "left_mb": max(0, found.left_mb),
        "counts_mb": quota.counts_mb,
    }


def _rank_view(world: World, verdict: RankVerdict) -> RankVerdictView:
    place, blocker = verdict.place, verdict.blocker
    return {
        "rank": verdict.rank,
        "place": place_views(world, (place,))[0] if place else None,
        "reason": None if blocker is None else blocker.reason.value,
        "message": blocker.message if blocker else "fits" if place else "the gang can start without it",
    }


def _verdict_view(
    world: World, verdict: DeviceVerdict, viewer: Identity, advice: Advice, now: Instant
) -> DeviceVerdictView:
    ledger, judged, need_mb, free_mb = verdict.finding
    device = ledger.device
    return {
        "key": device.key,
        "node": device.node,
        "index": device.index,
        "kind": device.kind,
        "verdict": judged.value,
        "message": verdict.message,
        "need_mb": need_mb,
        "free_mb": free_mb,
        "allocatable_mb": device.allocatable_mb,
        "free_in": expected_or_none(advice.free_in.get(device.key), now),
        "holders": [_holder_view(world, held, viewer, advice, now) for held in verdict.holders],
    }


def _holder_view(
    world: World, holding: Holding, viewer: Identity, advice: Advice, now: Instant
) -> DeviceHolder:
    lease = holding.lease
    named, priority = viewer.may_see(lease.tenant), priority_now(world, lease)
    task = world.tasks.get(TaskId(lease.holder)) if named else None
    is_quarantined = lease.state is LeaseState.QUARANTINED
    return {
        "id": lease.holder if named else None,
        "name": None if task is None else task.name,
        "priority": priority,
        "band": band_of(priority)[0],
        "gpu_mb": holding.occupied_mb,
        "stopping": holding.is_leaving,
        "quarantine": awaited_by_lease(world).get(lease.key) if is_quarantined else None,
        "ends": expected_or_none(advice.expected_ends.of_holding(holding).within(now), now),
    }
