"""Why a task waits, as the API tells it: blockers, devices and their holders."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from service.core.advice import Advice
from service.core.blockers import Blocker
from service.core.explain import DeviceVerdict
from service.core.ledger import Holding
from service.core.policy import band_of
from service.core.units import TaskId
from service.core.world import World
from service.gateway.advice import AdviceFields, WithinView, within_view
from service.gateway.identity import Identity
from service.gateway.overview import sees
from service.gateway.views import InheritsView, Time


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
    ends: Annotated[WithinView | None, Field(description="Expected; null if nobody can tell.")]


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
        WithinView | None,
        Field(description="When it has enough, if nobody else takes that; null if nobody can tell."),
    ]
    holders: list[DeviceHolder]


class ExplanationView(AdviceFields):
    """Why a task waits, or what it is doing. `blockers` names all that stands in its way, `remedies` what
    would help, each found by planning the task anew with that change."""

    id: str
    state: str
    reason: Annotated[
        str | None, Field(description="Of the most structural blocker; null if it does not wait.")
    ]
    message: str
    evaluated_at: Time
    position: Annotated[int | None, Field(description="Place in the queue; 1 is next.")]
    queue_length: int
    inherits: Annotated[InheritsView | None, Field(description="Null if it stands by its own priority.")]
    blockers: list[BlockerView]
    devices: list[DeviceVerdictView]
    as_of: Time
    age_seconds: float
    log_position: Annotated[int, Field(description="Of the newest event that this answer knows.")]


def blocker_view(blocker: Blocker) -> BlockerView:
    return {"reason": blocker.reason.value, "tier": blocker.tier, "message": blocker.message}


def verdict_view(world: World, verdict: DeviceVerdict, viewer: Identity, advice: Advice) -> DeviceVerdictView:
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
        "free_in": within_view(advice.free_in.get(verdict.device)),
        "holders": [_holder_view(world, held, viewer, advice) for held in verdict.holders],
    }


def _holder_view(world: World, holding: Holding, viewer: Identity, advice: Advice) -> DeviceHolder:
    lease = holding.lease
    known = sees(viewer, lease.tenant)
    task = world.tasks.get(TaskId(lease.holder)) if known else None
    return {
        "id": lease.holder if known else None,
        "name": None if task is None else task.name,
        "priority": lease.priority,
        "band": band_of(lease.priority)[0],
        "gpu_mb": holding.takes_mb,
        "stopping": holding.is_leaving,
        "ends": within_view(advice.horizon.of_holding(holding)),
    }
