"""When a task that waits is likely to start, and what that rests on."""

from collections.abc import Sequence
from typing import NamedTuple

from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.backfill import Basis, Forecast
from gpubroker_server.core.world.world import World


class Start(NamedTuple):
    p50_at: Instant
    """By then one in two."""
    p90_at: Instant
    """By then nine in ten."""
    n: int
    """Of how many runs this speaks; 0 if of none."""
    basis: Basis


def start_of(world: World, task: Task, forecasts: Sequence[Forecast], now: Instant) -> Start | None:
    """By what was pledged to it, or by its forecast; None if it has neither: then nobody can tell."""
    pledges = world.pledges.get(task.id)
    if pledges:
        at = max(now, *(pledge.deadline_at for pledge in pledges.values()))
        return Start(at, at, 0, Basis.STATED)
    for forecast in forecasts:
        if forecast.task == task.id and task.id in world.queue:
            p50_at, p90_at = max(now, forecast.start_at), max(now, forecast.p90_at)
            return Start(p50_at, p90_at, forecast.n, forecast.basis)
    return None


def there_at(world: World, model: Task, forecasts: Sequence[Forecast], now: Instant) -> Start | None:
    """When a model that waits, or is being loaded, is likely to be in memory; None if nobody can tell."""
    assert model.model is not None
    load_seconds = model.model.load_seconds
    if model.state is TaskState.ADMITTED:
        at = Instant(max(now, (model.admitted_at or now) + load_seconds))
        return Start(at, at, 0, Basis.STATED)
    room = start_of(world, model, forecasts, now)
    if room is None:
        return None
    p50_at, p90_at = Instant(room.p50_at + load_seconds), Instant(room.p90_at + load_seconds)
    return room._replace(p50_at=p50_at, p90_at=p90_at)
