"""A plan for components, as the API answers it."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.units import Instant, in_gib
from gpubroker_server.core.explain.fit import Component, Displaced, FleetPlan, Placed, Shortage
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.explain.advice import PlacementView, RunHolder, place_views, run_view
from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.http.routing import view_of


class ComponentView(TypedDict):
    name: str
    count: int
    placed: int
    missing: Annotated[int, Field(description="How many of them have no place.")]
    reason: Annotated[str | None, Field(description="Why the first of those has none; a stable token.")]
    message: str | None


class ComponentPlace(PlacementView):
    component: str
    number: Annotated[int, Field(description="Which of the component's tasks, from 0.")]
    rank: Annotated[int | None, Field(description="Which rank of a gang.")]
    displaces: Annotated[int, Field(description="Runs that would have to leave, or give up ranks, first.")]


class DisplacedRun(RunHolder):
    ranks: Annotated[list[int] | None, Field(description="Of a gang that goes on; null: all of it leaves.")]


class MissingGpus(TypedDict):
    kinds: Annotated[list[str], Field(description="Any of these; empty: any kind.")]
    whole_gpus: int
    gpu_mb: Annotated[int, Field(description="For demands of less than whole GPUs.")]


class MissingView(TypedDict):
    """The least that would have to be added: what has no place, less what is left. All zero, although it does
    not fit: enough is left, but in pieces, or a limit or a quota is in the way."""

    gpus: list[MissingGpus]
    cpu: float
    memory_mb: int


class TotalsView(TypedDict):
    gpus: Annotated[int, Field(description="Whole or in part, one for each part.")]
    whole_gpus: int
    gpu_mb: Annotated[
        int, Field(description="Of those that are not whole; fractions of the largest usable GPU.")
    ]
    cpu: float
    memory_mb: int


class FleetPlanView(TypedDict):
    """Whether it fits, what is missing, and what it would displace."""

    fits: bool
    message: str
    components: list[ComponentView]
    places: list[ComponentPlace]
    displaced: list[DisplacedRun]
    missing: MissingView
    totals: TotalsView
    totals_without_colocation: Annotated[
        TotalsView, Field(description="If roles did not share a process, but each ran by itself.")
    ]


def plan_view(
    world: World, components: Sequence[Component], plan: FleetPlan, viewer: Identity, now: Instant
) -> FleetPlanView:
    return {
        "fits": plan.fits,
        "message": _message(plan),
        "components": _component_views(components, plan),
        "places": [place for placed in plan.placed for place in _placed_views(world, placed)],
        "displaced": [_displaced_view(world, one, viewer, now) for one in plan.displaced],
        "missing": {
            "gpus": [view_of(MissingGpus, one) for one in plan.missing.gpus],
            "cpu": plan.missing.cpu,
            "memory_mb": plan.missing.memory_mb,
        },
        "totals": view_of(TotalsView, plan.totals),
        "totals_without_colocation": view_of(TotalsView, plan.totals_apart),
    }


def _component_views(components: Sequence[Component], plan: FleetPlan) -> list[ComponentView]:
    without = {one.component.name: one for one in plan.unplaced}
    views: list[ComponentView] = []
    for component in components:
        lacks = without.get(component.name)
        missing = 0 if lacks is None else lacks.count
        views.append(
            {
                "name": component.name,
                "count": component.count,
                "placed": component.count - missing,
                "missing": missing,
                "reason": None if lacks is None else lacks.reason.value,
                "message": None if lacks is None else lacks.message,
            }
        )
    return views


def _placed_views(world: World, placed: Placed) -> Iterator[ComponentPlace]:
    for rank, place in enumerate(place_views(world, placed.places)):
        yield {
            **place,
            "component": placed.component,
            "number": placed.number,
            "rank": rank if placed.is_gang else None,
            "displaces": placed.displaced,
        }


def _displaced_view(world: World, one: Displaced, viewer: Identity, now: Instant) -> DisplacedRun:
    view = run_view(world, one.run, viewer, now)
    if one.ranks is None:
        return {**view, "ranks": None}
    freed = sum(lease.mb for lease in world.leases_of(one.run) if lease.rank in one.ranks)
    return {**view, "gpu_mb": freed, "lost_gpu_seconds": 0.0, "ranks": list(one.ranks)}


def _message(plan: FleetPlan) -> str:
    if not plan.fits:
        without = ", ".join(f"{one.count} of {one.component.name}" for one in plan.unplaced)
        why = _missing_in_words(plan.missing) or plan.unplaced[0].message
        return f"it does not fit: there is no place for {without}; {why}"
    whole = sum(one.ranks is None for one in plan.displaced)
    gangs = [one.ranks for one in plan.displaced if one.ranks is not None]
    ranks = sum(map(len, gangs))
    conditions = []
    if whole:
        conditions.append("1 run leaves" if whole == 1 else f"{whole} runs leave")
    if gangs:
        giving = "1 gang gives" if len(gangs) == 1 else f"{len(gangs)} gangs give"
        conditions.append(f"{giving} up {ranks} rank{'s' * (ranks > 1)}")
    return f"it fits if {' and '.join(conditions)}" if conditions else "it fits"


def _missing_in_words(missing: Shortage) -> str:
    """Empty if enough is left in total."""
    parts = []
    for one in missing.gpus:
        kind = f" {' or '.join(one.kinds)}" if one.kinds else ""
        if one.whole_gpus:
            parts.append(f"{one.whole_gpus} whole{kind} GPU{'s' * (one.whole_gpus > 1)}")
        if one.gpu_mb:
            parts.append(f"{in_gib(one.gpu_mb)} of{kind} GPU memory")
    if missing.cpu:
        parts.append(f"{missing.cpu:g} CPU{'s' * (missing.cpu != 1)}")
    if missing.memory_mb:
        parts.append(f"{in_gib(missing.memory_mb)} of host memory")
    return f"missing: at least {', '.join(parts)}" if parts else ""
