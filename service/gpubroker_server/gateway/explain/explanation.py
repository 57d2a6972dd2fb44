"""Why a task waits, as the API tells it: blockers, devices and their holders."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.explain.advice import Advice
from gpubroker_server.core.explain.blockers import Blocker
from gpubroker_server.core.explain.explain import DeviceVerdict, Explanation
from gpubroker_server.core.explain.quota_standing import QuotaStanding
from gpubroker_server.core.explain.verdicts import RankVerdict
from gpubroker_server.core.world.ledger import Holding
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.devices import priority_of, sees
from gpubroker_server.gateway.explain.advice import (
    NO_ADVICE,
    AdviceFields,
    PlacementView,
    advice_fields,
    expected_or_none,
    place_views,
)
from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.status.quarantine import awaited_by_lease
from gpubroker_server.gateway.status.quarantine_views import AwaitedView
from gpubroker_server.gateway.status.views import ExpectedView, InheritsView, Time


class BlockerView(TypedDict):
    reason: Annotated[str, Field(description="A stable token.")]
    tier: Annotated[int, Field(description="Lower is more structural.")]
    message: str


class DeviceHolder(TypedDict):
    """`id` and `name` are null for another tenant's holder, unless an admin asks."""

    id: str | None
    name: str | None
    priority: int
    band: str
    gpu_mb: int
    stopping: bool
    quarantine: Annotated[
        AwaitedView | None, Field(description="Nobody can confirm that it is gone: what that waits for.")
    ]
    ends: Annotated[ExpectedView | None, Field(description="Expected; null if nobody can tell.")]


class DeviceVerdictView(TypedDict):
    """One device, judged for one task."""

    key: str
    node: str
    index: int
    kind: str
    verdict: Annotated[str, Field(description="A stable token, such as fits, no_room, too_small.")]
    message: str
    need_mb: int | None
    free_mb: Annotated[int, Field(description="For this task: what is kept for it counts as free.")]
    allocatable_mb: int
    free_in: Annotated[
        ExpectedView | None,
        Field(description="When it has enough, if nobody else takes that; null if nobody can tell."),
    ]
    holders: list[DeviceHolder]


class QuotaView(TypedDict):
    """How a task stands against the quota of its tenant, in MiB."""

    tenant: str
    cohort: Annotated[str | None, Field(description="Whose members lend each other what they do not use.")]
    guaranteed_mb: int
    used_mb: Annotated[int, Field(description="What it has, and what is being freed for its tasks.")]
    borrowed_mb: Annotated[int, Field(description="What of that is beyond its guarantee.")]
    lent_mb: Annotated[int, Field(description="What its cohort would lend it now, beyond what it has.")]
    left_mb: Annotated[int, Field(description="What it may still take, borrowed or not.")]
    counts_mb: Annotated[
        int,
        Field(
            description="What the task would count: on the largest GPUs that it may use; of a gang the ranks "
            "it needs at least."
        ),
    ]


class RankVerdictView(TypedDict):
    """One rank of a gang, judged with those in their places that have room together; after the first that
    has none, each by itself."""

    rank: int
    place: Annotated[PlacementView | None, Field(description="Where there is room for it.")]
    reason: Annotated[
        str | None,
        Field(description="Why there is none; null as well for ranks that the gang can start without."),
    ]
    message: str


class ExplainedFields(AdviceFields):
    """What explanations and simulations share."""

    reason: Annotated[
        str | None, Field(description="Of the most structural blocker; null if it does not wait.")
    ]
    message: str
    position: Annotated[int | None, Field(description="The place in the queue; 1 is next.")]
    blockers: list[BlockerView]
    quota: Annotated[
        QuotaView | None, Field(description="Null for a task without GPUs, and for a tenant without a quota.")
    ]
    ranks: Annotated[list[RankVerdictView] | None, Field(description="Of a gang that waits.")]
    devices: Annotated[
        list[DeviceVerdictView],
        Field(description="For a gang, as its first rank without room finds them."),
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


class ExplanationView(ExplainedFields):
    """Why a task waits, or what it is doing. `blockers` names all that stands in its way, `remedies` what
    would help, each found by planning the task anew with that change."""

    id: str
    state: str
    evaluated_at: Time
    queue_length: int
    inherits: Annotated[InheritsView | None, Field(description="Null if it stands by its own priority.")]
    as_of: Time
    age_seconds: float
    log_position: Annotated[int, Field(description="Of the newest event that this answer knows.")]


def blocker_view(blocker: Blocker) -> BlockerView:
    return {"reason": blocker.reason.value, "tier": blocker.tier, "message": blocker.message}


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
    """Of a task that wants no devices: what keeps it, and nothing that would help it."""
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
    said = "fits" if place else "the gang can start without it"
    return {
        "rank": verdict.rank,
        "place": place_views(world, (place,))[0] if place else None,
        "reason": None if blocker is None else blocker.reason.value,
        "message": said if blocker is None else blocker.message,
    }


def _verdict_view(
    world: World, verdict: DeviceVerdict, viewer: Identity, advice: Advice, now: Instant
) -> DeviceVerdictView:
    return {
        "key": verdict.device,
        "node": verdict.node,
        "index": verdict.index,
        "kind": verdict.kind,
        "verdict": verdict.verdict.value,
        "message": verdict.message,
        "need_mb": verdict.need_mb,
        "free_mb": verdict.free_mb,
        "allocatable_mb": verdict.allocatable_mb,
        "free_in": expected_or_none(advice.free_in.get(verdict.device), now),
        "holders": [_holder_view(world, held, viewer, advice, now) for held in verdict.holders],
    }


def _holder_view(
    world: World, holding: Holding, viewer: Identity, advice: Advice, now: Instant
) -> DeviceHolder:
    lease = holding.lease
    known, priority = sees(viewer, lease.tenant), priority_of(world, lease)
    task = world.tasks.get(TaskId(lease.holder)) if known else None
    is_quarantined = lease.state is LeaseState.QUARANTINED
    return {
        "id": lease.holder if known else None,
        "name": None if task is None else task.name,
        "priority": priority,
        "band": band_of(priority)[0],
        "gpu_mb": holding.takes_mb,
        "stopping": holding.is_leaving,
        "quarantine": awaited_by_lease(world).get(lease.key) if is_quarantined else None,
        "ends": expected_or_none(advice.departures.of_holding(holding).within(now), now),
    }
