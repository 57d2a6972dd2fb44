"""Who may start ahead of a forecast, for the naive planner: each run, each device and each forecast anew."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import inf
from typing import Any

from gpubroker_server.core.domain.holders import RUN, External
from gpubroker_server.core.domain.lease import Lease, LeaseState
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from msgspec.structs import replace


def nodes_of(forecast: Forecast) -> set[str]:
    return {place.node for place in forecast.places}


def devices_of(forecast: Forecast) -> Counter[str]:
    """MiB by device; of a gang of all its ranks."""
    taken: Counter[str] = Counter()
    for place in forecast.places:
        taken.update(dict(place.devices))
    return taken


def rank_tasks_on(naive: Any, forecast: Forecast, node: str) -> list[Task]:
    """What will run there, rank by rank."""
    task = naive.tasks[forecast.task]
    bundles = task.demand.bundles or (task.demand,)
    ranks = [rank for rank, place in enumerate(forecast.places) if place.node == node]
    return [replace(task, demand=bundles[rank], holder=RUN) for rank in ranks]


def keepers(naive: Any) -> list[Forecast]:
    """The forecasts that keep room: those of tasks that still wait."""
    tasks = naive.tasks
    return [
        f
        for f in naive.forecasts
        if f.reserves_room and f.places and f.task in tasks and tasks[f.task].state is TaskState.PENDING
    ]


def ends_at(naive: Any, run: Task, forecast: Forecast) -> tuple[float, bool]:
    """When one in two such runs has ended, and whether that is only a guess; in these stories nothing is
    learned. As it looked when the forecast was made, or else when the run began."""
    as_of = max(forecast.as_of or naive.now, run.started_at or run.admitted_at or naive.now)
    said, lasted = run.expected_seconds, as_of - (run.started_at or as_of)
    if said is not None and said > lasted:
        left = said - lasted
    elif said is not None and run.started_at is None:
        left = said
    else:
        left = max(60.0, lasted - (said or 0.0))
    is_guess = said is None or (run.started_at is not None and said <= lasted)
    began = run.started_at or naive.now
    limits = [as_of + left]
    if run.timeout_seconds is not None:
        limits.append(max(naive.now, began + run.timeout_seconds + run.grace_seconds))
    if run.deadline_at is not None and not isinstance(run.holder, External):  # a lease is renewed
        limits.append(max(naive.now, run.deadline_at + run.grace_seconds))
    return min(limits), is_guess


def in_the_way_until(naive: Any, run: Task, forecast: Forecast) -> float:
    """Of a task that may stop the run, the run is not in the way at all. Who came after it, for nobody knows
    how long, stays."""
    other = naive.tasks[forecast.task]
    if run.state is TaskState.STOPPING:
        return max(naive.now, run.stop_deadline_at or naive.now)
    at, is_guess = ends_at(naive, run, forecast)
    if run.admitted_at > other.submitted_at and is_guess:
        at = inf
    return min(at, stoppable_from(naive, run, other))


def stoppable_from(naive: Any, run: Task, other: Task) -> float:
    """From when on the other one may have it stopped; a run that has not begun begins now."""
    if not naive.may_preempt(other) or run.priority >= naive.stops_below(other):
        return inf
    if naive.is_spared_from(run, other):
        return inf
    began = run.started_at if run.is_active and run.started_at is not None else naive.now
    policy, begun = naive.policy, replace(run, started_at=began)
    moments = [naive.now, began + policy.min_run_seconds, began + policy.shield_seconds]

    def is_protected(at: float) -> bool:
        return naive.is_shielded(begun, at) or naive.has_turn_protection(begun, other.priority, at)

    at_once = naive.ignores_shields(run, other)
    return min(at for at in moments if at >= naive.now and (at_once or not is_protected(at)))


def lease_until(naive: Any, lease: Lease, forecast: Forecast) -> float:
    if lease.state is LeaseState.RELEASING:
        return naive.now
    run = naive.run_of(lease)
    if lease.state is LeaseState.QUARANTINED or run is None:
        return inf
    return in_the_way_until(naive, run, forecast) if run.is_active else inf


def lasts(naive: Any, task: Task) -> float:
    limit = inf if task.timeout_seconds is None else task.timeout_seconds + task.grace_seconds
    return min(limit, inf if task.expected_seconds is None else task.expected_seconds)


def gives_way(naive: Any, task: Task, forecast: Forecast) -> bool:
    """Whether it could be stopped for that one by the time it is to start."""
    return stoppable_from(naive, task, naive.tasks[forecast.task]) <= forecast.start_at


def delayed(naive: Any, task: Task, node: str, all_reservations: bool) -> list[Forecast]:
    """Those whom the task may not delay, and would still be there when they are to start."""
    found = []
    for forecast in keepers(naive):
        other = naive.tasks[forecast.task]
        if node not in nodes_of(forecast) or other.id == task.id:
            continue
        if not all_reservations and not naive.comes_first(other, task):
            continue
        if naive.now + lasts(naive, task) > forecast.start_at and not gives_way(naive, task, forecast):
            found.append(forecast)
    return found


def also_there(naive: Any, task: Task, forecast: Forecast, node: str, at: float) -> list[Forecast]:
    """The forecast, and those ahead of the task that have begun on the node by then and are not over."""
    return [
        f
        for f in keepers(naive)
        if f is forecast
        or (
            node in nodes_of(f)
            and f.start_at <= at < f.end_at
            and naive.comes_first(naive.tasks[f.task], task)
        )
    ]


def is_open(naive: Any, task: Task, node: Any, all_reservations: bool, parts: Sequence[Task] = ()) -> bool:
    """Whether CPU, host memory, run slots and the node's own resources suffice for all; `parts`: of a gang
    those of its ranks that would be there."""
    for forecast in delayed(naive, task, node.name, all_reservations):
        other, at = naive.tasks[forecast.task], max(naive.now, forecast.start_at)
        there = [run for run in naive.runs_on(node) if in_the_way_until(naive, run, forecast) > at]
        there += naive.waiting_here(node, other)
        for f in also_there(naive, task, forecast, node.name, at):
            there += rank_tasks_on(naive, f, node.name)
        if len(there) + len(parts or (task,)) > node.max_runs:
            return False
        for name, has in (("cpu", node.cpu), ("memory_mb", node.memory_mb)):
            asked = sum(getattr(part.demand, name) for part in parts or (task,))
            if asked and round(asked + sum(getattr(run.demand, name) for run in there), 6) > has:
                return False
        for name, has in node.custom:
            asked = sum(dict(part.demand.custom).get(name, 0.0) for part in parts or (task,))
            if asked and asked + sum(dict(run.demand.custom).get(name, 0.0) for run in there) > has:
                return False
    return True


def allows(naive: Any, task: Task, device: Any, mb: int, all_reservations: bool) -> bool:
    for forecast in delayed(naive, task, device.node, all_reservations):
        if device.key not in devices_of(forecast):
            continue
        other, at = naive.tasks[forecast.task], max(naive.now, forecast.start_at)
        left = naive.unheld(device)
        left -= sum(pledge.mb for pledge in naive.respected(device, other))
        left += sum(
            naive.takes(lease)
            for lease in naive.leases
            if lease.device == device.key and lease_until(naive, lease, forecast) <= at
        )
        left -= sum(
            devices_of(f).get(device.key, 0) for f in also_there(naive, task, forecast, device.node, at)
        )
        if mb > left:
            return False
    return True


def beside(naive: Any, task: Task, best: Any) -> Any:
    """The place for a task so that it delays nobody, or else nobody ahead of it; None if there is none."""
    guarded = {name for forecast in keepers(naive) for name in nodes_of(forecast)}
    depth_reached = naive.refused_by_reservation >= naive.policy.backfill_depth
    if best[1] not in guarded:
        return best
    for all_reservations in (True, False):
        closed, barred = set(), set()
        for node in naive.nodes:
            if node.name in guarded and (depth_reached or not is_open(naive, task, node, all_reservations)):
                closed.add(node.name)
            for device in naive.devices(node.name) if node.name in guarded and task.demand.gpus else ():
                need = naive.needs(task.demand, device)
                if need is not None and not allows(naive, task, device, need, all_reservations):
                    barred.add(device.key)
        if best[1] not in closed and not barred.intersection(key for key, _ in best[2]):
            return best
        naive.barred = frozenset(barred)
        places = [place for place in naive.places(task) if place[1] not in closed]
        naive.barred = frozenset()
        if places:
            return min(places, key=lambda place: place[0])
    return None


def stands_behind(naive: Any, task: Task) -> bool:
    """Whether the first in a line for what it would take is ahead of it, and it may not be gone in time."""
    names = {name for name, _ in (*task.demand.custom, *task.demand.slots)}
    names |= {f"quota:{task.tenant}"} if naive.needs_gpus(task) else set()
    for f in naive.forecasts:
        other = naive.tasks.get(f.task)
        if other is None or other.state is not TaskState.PENDING or not names & f.first_in:
            continue
        if naive.comes_first(other, task) and naive.now + lasts(naive, task) > f.start_at:
            return True
    return False


def nodes_closed_to(naive: Any, task: Task) -> Sequence[str]:
    """The nodes on which the task may not have anybody stopped."""
    return [
        node
        for forecast in keepers(naive)
        for node in sorted(nodes_of(forecast))
        if naive.comes_first(naive.tasks[forecast.task], task) and not gives_way(naive, task, forecast)
    ]


def floors(naive: Any, task: Task) -> dict[str, int]:
    """Closed nodes where some may be stopped all the same -> from which priority on: those whom the tasks
    ahead, which ask for no GPU, could not have stopped themselves. Not where the task, or a rank of it, needs
    nobody to leave."""
    if naive.refused_by_reservation >= naive.policy.backfill_depth:
        return {}
    found: dict[str, int] = {}
    parts = [replace(task, demand=bundle) for bundle in task.demand.bundles] or [task]
    for node in naive.nodes:
        ahead = [
            naive.tasks[forecast.task]
            for forecast in keepers(naive)
            if node.name in nodes_of(forecast)
            and naive.comes_first(naive.tasks[forecast.task], task)
            and not gives_way(naive, task, forecast)
        ]
        if not ahead or any(map(naive.needs_gpus, ahead)) or not node.ready or node.cordoned:
            continue
        if not any(
            naive.is_open(node, part) and naive.would_fit(node, devices, part, [])
            for part in parts
            for devices in combinations(naive.devices(node.name), part.demand.gpus)
        ):
            found[node.name] = max(map(naive.stops_below, ahead))
    return found


def other_way(naive: Any, task: Task, best: Any) -> Any:
    """Whom to stop if the best place may not be had, or there is none; where a forecast stands in the way,
    on other nodes first."""
    closed, above = nodes_closed_to(naive, task), floors(naive, task)
    if naive.over_quota(task):
        return naive.room_in_quota(task, closed, above)
    if not naive.custom_is_there(task):
        return naive.room_in_limit(task, nodes_closed_to(naive, task))
    if not best and (taken_back := naive.reclaim(task, closed, above)):
        return taken_back
    if naive.refused_by_reservation >= naive.policy.backfill_depth:
        closed = [name for forecast in keepers(naive) for name in nodes_of(forecast)]
    options = [] if best else list(naive.evictions(task))
    if not all(option[2] for option in options):
        return None  # room is coming
    way = naive.eviction(task, closed)
    if way is None and all(option[2] for option in naive.evictions(task) if option[0][1] not in closed):
        way = naive.eviction_above(task, above)
    naive.refused_by_reservation += way is None and bool(
        best or any(option[0][1] in closed for option in options)
    )
    return way
