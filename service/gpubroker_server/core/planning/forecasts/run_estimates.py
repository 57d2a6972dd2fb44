"""Estimates of the run time of a task from past runs like it."""

from collections.abc import Iterable, Mapping
from math import inf

from msgspec import Struct

from gpubroker_server.core.domain.estimates import Sketch, SketchKey, What
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds

Sketches = Mapping[SketchKey, Sketch]


class Remaining(Struct, frozen=True):
    """The time that is expected to remain until a run ends: median and 90th percentile."""

    p50_seconds: Seconds
    p90_seconds: Seconds
    n: int
    """The number of past runs behind the estimate; 0 if it was stated at submission."""


def remaining_seconds(task: Task, sketches: Sketches, now: Instant, *, kind: str = "") -> Remaining | None:
    """Return the time that remains to a run, as stated at submission or else by past runs that took longer
    than this run so far. None if the task does not run, or has outlasted every estimate. `kind` is the kind
    of the run's device."""
    if task.started_at is None or not task.is_active:
        return None
    elapsed = max(0.0, now - task.started_at)
    if task.expected_seconds is not None and task.expected_seconds > elapsed:
        stated = Seconds(task.expected_seconds - elapsed)
        return Remaining(stated, stated, 0)
    sketch = sketches.get(SketchKey(task.tenant, task.subject, kind, What.SECONDS))
    if sketch is None:
        return None
    longer = sketch.above(elapsed)
    p50, p90 = longer.quantile(0.5), longer.quantile(0.9)
    if p50 is None or p90 is None:
        return None
    return Remaining(Seconds(max(0.0, p50 - elapsed)), Seconds(max(0.0, p90 - elapsed)), longer.n)


def run_seconds(task: Task, sketches: Sketches, policy: Policy, *, kind: str = "") -> Remaining | None:
    """Return how long a run that begins now takes, as stated at submission or else by enough past runs like
    it; None if unknown. Checkpoints are ignored."""
    if task.expected_seconds is not None:
        return Remaining(task.expected_seconds, task.expected_seconds, 0)
    sketch = sketches.get(SketchKey(task.tenant, task.subject, kind, What.SECONDS))
    if sketch is None or sketch.n < max(1, policy.learned_least_runs):
        return None
    p50, p90 = sketch.quantile(0.5), sketch.quantile(0.9)
    return Remaining(Seconds(p50 or 0.0), Seconds(p90 or 0.0), sketch.n)


def whole_run_seconds(
    task: Task, sketches: Sketches, policy: Policy, kinds: Iterable[str]
) -> tuple[Seconds, Seconds]:
    """Return the median and the 90th percentile of the time of a run that begins now on the slowest of these
    kinds, at most its time limit. If the time is unknown, both are the time limit; infinite without one."""
    limit = inf if task.timeout_seconds is None else task.timeout_seconds + task.grace_seconds
    p50 = p90 = 0.0
    for kind in kinds:
        estimate = run_seconds(task, sketches, policy, kind=kind)
        if estimate is None:
            return Seconds(limit), Seconds(limit)
        p50, p90 = max(p50, estimate.p50_seconds), max(p90, estimate.p90_seconds)
    return Seconds(min(limit, p50)), Seconds(min(limit, p90))
