"""The view of a plan for components."""

from collections.abc import Iterator, Sequence

from gpubroker.wire.plans import ComponentPlace, ComponentPlan, DisplacedRun
from gpubroker.wire.plans import FleetPlan as ShownPlan
from msgspec.structs import asdict, replace

from gpubroker_server.core.explain.fit import Component, Displaced, FleetPlan, Placed, Unplaced
from gpubroker_server.gateway.explain.viewpoint import Viewpoint


def shown_plan(components: Sequence[Component], plan: FleetPlan, view: Viewpoint) -> ShownPlan:
    unplaced = {missing.component.name: missing for missing in plan.unplaced}
    return ShownPlan(
        fits=plan.fits,
        message=plan.message,
        components=tuple(_component(component, unplaced.get(component.name)) for component in components),
        places=tuple(place for placed in plan.placed for place in _places(placed, view)),
        displaced=tuple(_displaced(run, view) for run in plan.displaced),
        missing=plan.missing,
        totals=plan.totals,
        totals_without_colocation=plan.totals_apart,
    )


def _component(component: Component, unplaced: Unplaced | None) -> ComponentPlan:
    name, count = component.name, component.count
    if unplaced is None:
        return ComponentPlan(name, count, count, 0, None, None)
    return ComponentPlan(
        name, count, count - unplaced.count, unplaced.count, unplaced.reason, unplaced.message
    )


def _places(placed: Placed, view: Viewpoint) -> Iterator[ComponentPlace]:
    for rank, place in enumerate(view.places(placed.places)):
        yield ComponentPlace(
            **asdict(place),
            component=placed.component,
            number=placed.number,
            rank=rank if placed.is_gang else None,
            displaces=placed.displaced,
        )


def _displaced(displaced: Displaced, view: Viewpoint) -> DisplacedRun:
    run = view.run(displaced.run)
    if displaced.ranks is not None:
        freed = sum(
            lease.mb for lease in view.world.leases_of(displaced.run) if lease.rank in displaced.ranks
        )
        run = replace(run, gpu_mb=freed, lost_gpu_seconds=0.0)
    return DisplacedRun(**asdict(run), ranks=displaced.ranks)
