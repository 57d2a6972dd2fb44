"""What would help a waiting task, and which runs that would stop."""

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.explain.advice import Advice
from gpubroker_server.core.explain.preemption_verdict import PreemptionVerdict
from gpubroker_server.core.explain.remedy_planner import Remedy
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining
from gpubroker_server.core.planning.gangs.gang_search import Gang
from gpubroker_server.core.planning.nodes.victims import lost_gpu_seconds
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.status.task_view import expected_view, forecasts_views
from gpubroker_server.gateway.status.views import ExpectedView, ForecastsView


class RunHolder(TypedDict):
    """A run that would be stopped, or that would not be. `id` and `name` are null for another tenant's."""

    id: str | None
    name: str | None
    priority: int
    band: str
    gpu_mb: int
    node: str | None
    lost_gpu_seconds: Annotated[float, Field(description="Work that is lost if it is stopped.")]


class SparedRunView(RunHolder):
    shield: Annotated[
        str,
        Field(
            description="Stable: none, would_not_help, young, budget, turn, guaranteed, priority or leaving."
        ),
    ]


class SparedView(TypedDict):
    """Why no run is stopped for it, or which runs would be."""

    why: Annotated[str, Field(description="A stable token, such as all_shielded or not_enough.")]
    message: str
    counts: Annotated[dict[str, int], Field(description="Runs on nodes that it may use, by their shield.")]
    runs: Annotated[list[SparedRunView], Field(description="The most relevant of them, at most 20.")]


class PlacedOn(TypedDict):
    key: str
    index: int
    gpu_mb: int


class PlacementView(TypedDict):
    node: str
    devices: list[PlacedOn]


class RemedyView(TypedDict):
    """One thing that would help, found by planning the task again with it."""

    change: Annotated[
        dict[str, Any],
        Field(
            description="What to ask for instead, under `bundles` in each rank (of `gpu_mb`: that asks for "
            "more); empty: waiting is enough."
        ),
    ]
    effect: Annotated[str, Field(description="starts, preempts or starts_later.")]
    message: str
    places: Annotated[list[PlacementView], Field(description="One per rank; none if runs must leave first.")]
    victims: list[RunHolder]
    after: Annotated[RunHolder | None, Field(description="It starts when this run has ended.")]
    within: Annotated[ExpectedView | None, Field(description="When that end is expected.")]


class StartFields(TypedDict):
    start: Annotated[ExpectedView | None, Field(description="When it has room. Null if unknown.")]
    start_record: Annotated[
        ForecastsView | None,
        Field(description="How accurate forecasts on the same basis have been; null if there were none."),
    ]


class AdviceFields(StartFields):
    """`start`: unless another waiting task takes that room first."""

    preemption: SparedView | None
    remedies: list[RemedyView]


NO_ADVICE: AdviceFields = {"start": None, "start_record": None, "preemption": None, "remedies": []}


def start_fields(world: World, start: ExpectedStart | None, now: Instant) -> StartFields:
    expected = expected_or_none(start, now)
    records = forecasts_views(world) if expected is not None else []
    record = next((one for one in records if expected and one["basis"] == expected["basis"]), None)
    return {"start": expected, "start_record": record}


def advice_fields(world: World, advice: Advice, viewer: Identity, now: Instant) -> AdviceFields:
    return {
        **start_fields(world, advice.start, now),
        "preemption": _spared_view(world, advice.preemption, viewer, now),
        "remedies": [_remedy_view(world, remedy, viewer, now) for remedy in advice.remedies],
    }


def expected_or_none(expected: Remaining | ExpectedStart | None, now: Instant) -> ExpectedView | None:
    return None if expected is None else expected_view(expected, now)


def place_views(world: World, places: Gang | None) -> list[PlacementView]:
    return [
        {
            "node": one.node,
            "devices": [
                {"key": key, "index": world.ledgers[key].device.index, "gpu_mb": mb}
                for key, mb in one.devices
            ],
        }
        for one in places or ()
    ]


def run_view(world: World, run: Task, viewer: Identity, now: Instant) -> RunHolder:
    named = viewer.may_see(run.tenant)
    return {
        "id": run.id if named else None,
        "name": run.name if named else None,
        "priority": run.priority,
        "band": band_of(run.priority)[0],
        "gpu_mb": sum(lease.mb for lease in world.leases_of(run)),
        "node": run.node,
        "lost_gpu_seconds": round(lost_gpu_seconds(run, now), 3),
    }


def _spared_view(world: World, spared: PreemptionVerdict, viewer: Identity, now: Instant) -> SparedView:
    return {
        "why": spared.why.value,
        "message": spared.message,
        "counts": {shield.value: count for shield, count in spared.counts.items()},
        "runs": [
            {**run_view(world, one.run, viewer, now), "shield": one.shield.value} for one in spared.runs
        ],
    }


def _remedy_view(world: World, remedy: Remedy, viewer: Identity, now: Instant) -> RemedyView:
    return {
        "change": dict(remedy.change),
        "effect": "starts_later" if remedy.after else "starts" if remedy.places else "preempts",
        "message": remedy.message,
        "places": place_views(world, remedy.places),
        "victims": [run_view(world, run, viewer, now) for run in remedy.victims],
        "after": None if remedy.after is None else run_view(world, remedy.after, viewer, now),
        "within": expected_or_none(remedy.within, now),
    }
