"""Whether a set of components fits a fleet: where each goes, what is missing, and whom it would displace."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import leavers_of
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.explain.blockers import Blocker
from gpubroker_server.core.explain.gang_admission import check_task
from gpubroker_server.core.explain.reserved_room import kept_for_forecasts
from gpubroker_server.core.explain.verdicts import look
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.planning.backfill import Forecast
from gpubroker_server.core.planning.deciding import admit, evict
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.find_way import Evict, Start
from gpubroker_server.core.planning.gang_placement import Gang
from gpubroker_server.core.planning.preemption import Eviction
from gpubroker_server.core.planning.survey import Survey, survey
from gpubroker_server.core.planning.totals import Missing, Totals, left_over, missing_of, totals_of
from gpubroker_server.core.world.world import World

WHOLE_MB = 2**24
"""What a whole device counts for among those that are hard to place: as much as the largest."""


@dataclass(frozen=True, slots=True)
class Component:
    """So many tasks, or gangs, of one demand, all to run at once."""

    name: str
    count: int
    demand: Demand
    priority: int
    apart: tuple[Demand, ...] = ()
    """What its roles ask for, if they take turns in one process; without colocation each runs by itself."""


@dataclass(frozen=True, slots=True)
class Placed:
    component: str
    number: int
    """Which of the component's tasks, from 0."""
    places: Gang
    """One; of a gang one for each rank."""
    is_gang: bool
    displaced: int
    """So many runs would have to leave first, or give up ranks."""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """What of a component has no place."""

    component: Component
    count: int
    reason: Reason
    message: str
    """Why the first of them found none."""


@dataclass(frozen=True, slots=True)
class Displaced:
    run: Task
    ranks: tuple[int, ...] | None
    """Of a gang that goes on without them, those that leave; None: all of it."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    placed: tuple[Placed, ...]
    unplaced: tuple[Unplaced, ...]
    displaced: tuple[Displaced, ...]
    missing: Missing
    """What the fleet would have to have more, at least."""
    totals: Totals
    totals_apart: Totals
    """Without colocation."""

    @property
    def fits(self) -> bool:
        return not self.unplaced


Steps = Generator[None, None, FleetPlan]


def planning(
    world: World,
    components: Sequence[Component],
    tenant: str,
    policy: Policy,
    now: Instant,
    forecasts: Sequence[Forecast] = (),
) -> Steps:
    """Place all components beside what runs, the hardest to place first. Changes nothing.

    What a submit would refuse finds no place. What finds no room displaces runs of lower priority as a task
    would; of those nobody else need leave for the same component. Runs under notice count as gone. Of what
    waits in the queue only the `forecasts` count, which keep room. Pauses after each task; the World must
    not change meanwhile.
    """
    draft = Draft(world)
    _receive_all(draft)
    what_if = WhatIf(draft, policy, now, forecasts)
    placed: list[Placed] = []
    unplaced: list[Unplaced] = []
    displaced: dict[TaskId, Displaced] = {}
    for component in sorted(components, key=_hardness):
        is_refused = check_task(_task(component, 0, tenant, now), world, policy) is not None
        for number in range(component.count):
            task = _task(component, number, tenant, now)
            places, leavers = (None, ()) if is_refused else _put(draft, what_if, task, now)
            for leaver in leavers:
                displaced[leaver.run.id] = _joined(leaver, displaced.get(leaver.run.id))
            if places is None:
                why = _why(survey(draft, task, policy, now, forecasts))
                unplaced.append(Unplaced(component, component.count - number, why.reason, why.message))
                break
            is_gang = bool(task.demand.bundles)
            placed.append(Placed(component.name, number, places, is_gang, len(leavers)))
            yield
    lacking = [(one.component.demand, one.count) for one in unplaced]
    return FleetPlan(
        tuple(placed),
        tuple(unplaced),
        tuple(displaced[name] for name in sorted(displaced)),
        missing_of(lacking, left_over(draft), world),
        totals_of([(it.demand, it.count) for it in components]),
        totals_of([(role, it.count) for it in components for role in it.apart or (it.demand,)]),
    )


def _receive_all(draft: Draft) -> None:
    """Whoever is leaving has left; what they free for others is kept for those."""
    world = draft.world
    for name in sorted(world.active):
        run = world.tasks[name]
        if run.state is TaskState.STOPPING:
            draft.dismiss(run)
        elif leavers := leavers_of(run):
            draft.dismiss(run, [member.rank for member in leavers])
    for node in world.nodes:
        draft.receive(node)


def _put(
    draft: Draft, what_if: WhatIf, task: Task, now: Instant
) -> tuple[Gang | None, tuple[Displaced, ...]]:
    """As the planner would, once whoever it asks to leave has left."""
    way = what_if.way(task)
    places, leavers = way.places if isinstance(way, Start) else None, tuple[Displaced, ...]()
    if isinstance(way, Evict):
        leavers = _make_room(draft, task, way.eviction, now)
        places = what_if.places(task)
    if places is None:
        return None, ()
    admit(draft, task, places, now)
    return places, leavers


def _make_room(draft: Draft, task: Task, eviction: Eviction, now: Instant) -> tuple[Displaced, ...]:
    evict(draft, task, eviction, now)  # what they free is pledged to it
    leavers = tuple(Displaced(run, eviction.surplus.get(run.id)) for run in eviction.victims)
    for leaver in leavers:
        draft.dismiss(draft.task(leaver.run.id), leaver.ranks)
    return leavers


def _why(seen: Survey) -> Blocker:
    """The most structural thing that keeps a task away for which there is no place."""
    blockers = look(seen).blockers or tuple(kept_for_forecasts(seen))
    gave_up = Blocker(Reason.FRAGMENTED, "no place was found before the search gave up")
    return blockers[0] if blockers else gave_up


def _joined(leaver: Displaced, before: Displaced | None) -> Displaced:
    """The same gang may give up more ranks for the next task, or all that it has left."""
    if before is None:
        return leaver
    ranks = None if leaver.ranks is None else tuple(sorted({*(before.ranks or ()), *leaver.ranks}))
    return Displaced(before.run, ranks)


def _task(component: Component, number: int, tenant: str, now: Instant) -> Task:
    name = f"{component.name} {number + 1}"
    return Task(TaskId(f"plan:{name}"), tenant, name, component.priority, component.demand, now)


def _hardness(component: Component) -> tuple[int, float, float, str]:
    """Higher priority first, so that nobody displaces what was just placed; then what needs most at once."""
    parts = component.demand.bundles or (component.demand,)
    gpu_mb = sum(part.gpus * _mb_of(part) for part in parts)
    return -component.priority, -gpu_mb, -sum(part.cpu for part in parts), component.name


def _mb_of(demand: Demand) -> float:
    if demand.takes_whole_devices:
        return WHOLE_MB
    return demand.gpu_mb or (demand.gpu_fraction or 0) * WHOLE_MB
