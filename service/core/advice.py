"""What is to be expected for a task that waits, and what would help: the costly half of an explanation."""

from dataclasses import dataclass

from service.core.backfill import Basis
from service.core.expectations import Remaining
from service.core.explain import stands_aside
from service.core.horizon import AT_ONCE, Horizon, later
from service.core.remedies import Remedy, remedies
from service.core.spared import Spared, spared
from service.core.start import start_of
from service.core.survey import Survey
from service.core.trial import Planner, Trial
from service.core.units import DeviceKey, Seconds


@dataclass(frozen=True, slots=True)
class Advice:
    trial: Trial
    """What the planner would decide for the task if it looked at it now; for one that stands aside, if it
    did not."""
    start: Remaining | None
    """As pledged to it or forecast for it, unless that is a guess; else when it has room if nobody else takes
    that before; None if nobody can tell."""
    spared: Spared
    remedies: tuple[Remedy, ...]
    """Empty where none is needed or none was found."""
    free_in: dict[DeviceKey, Remaining]
    """When each device that it may use has enough for it, where that can be told."""
    horizon: Horizon


def advise(seen: Survey, highest_priority: int = 100) -> Advice:
    """`seen`: of a pending task, or of one that nobody has submitted. Changes nothing."""
    task, draft = seen.task, seen.draft
    planner = Planner(draft, seen.policy, seen.now, seen.forecasts)
    trial = planner.attempt(task)
    horizon = Horizon(draft.world, seen.now)
    free_in = _free_in(seen, horizon)
    may_start = trial.places is not None and not stands_aside(task)
    return Advice(
        trial,
        AT_ONCE if may_start else _start(seen, trial, horizon, free_in),
        spared(seen, trial),
        () if may_start else remedies(seen, horizon, planner, highest_priority),
        free_in,
        horizon,
    )


def _free_in(seen: Survey, horizon: Horizon) -> dict[DeviceKey, Remaining]:
    found = {}
    if seen.task.demand.gpus:
        for node in seen.nodes:
            for device in node.open_devices:
                missing_mb = (device.need_mb or 0) - device.free_mb
                end = horizon.of_device(device.book, missing_mb, seen.task.id)
                if end is not None:
                    found[device.book.device.key] = end
    return found


def _start(
    seen: Survey, trial: Trial, horizon: Horizon, free_in: dict[DeviceKey, Remaining]
) -> Remaining | None:
    task, now = seen.task, seen.now
    if task.held or task.awaits:
        return None
    told = start_of(seen.draft.world, task, seen.forecasts, now)
    if trial.places is not None:
        start: Remaining | None = AT_ONCE
    elif told is not None and told.basis is not Basis.GUESS:
        start = Remaining(Seconds(told.p50_at - now), Seconds(told.p90_at - now), told.n)
    elif trial.eviction is not None:
        start = _at_most(trial.eviction.deadline_at - now)
    else:
        start = horizon.start_of(seen, free_in)
    if start is None or task.not_before is None:
        return start
    return later((start, _at_most(task.not_before - now)))


def _at_most(seconds: float) -> Remaining:
    left = Seconds(max(0.0, seconds))
    return Remaining(left, left, 0)
