"""Run time of a task, estimated from past runs like it."""

from collections.abc import Iterable, Mapping
from math import inf

from msgspec import Struct

from gpubroker_server.core.domain.estimates import Sketch, SketchKey, What
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds

Sketches = Mapping[SketchKey, Sketch]


class Remaining(Struct, frozen=True):
    """The time that a run is expected to take yet: median and 90th percentile."""

    p50_seconds: Seconds
    p90_seconds: Seconds
    n: int
    """Past runs that took longer than this one so far. 0: stated at submission."""


def remaining_seconds(task: Task, sketches: Sketches, now: Instant, *, kind: str = "") -> Remaining | None:
    """Return what was stated at submission, else what runs like it took; None if it does not run, or has
    outlasted every estimate. `kind`: of the run's device."""
    if task.started_at is None or not task.is_active:
        return None
    elapsed = max(0.0, now - task.started_at)
    if task.expected_seconds is not None and task.expected_seconds > elapsed:
        stated = Seconds(task.expected_seconds - elapsed)
        return Remaining(stated, stated, 0)
    known = sketches.get(SketchKey(task.tenant, task.subject, kind, What.SECONDS))
    if known is None:
        return None
    longer = known.above(elapsed)
    p50, p90 = longer.quantile(0.5), longer.quantile(0.9)
    if p50 is None or p90 is None:
        return None
    return Remaining(Seconds(max(0.0, p50 - elapsed)), Seconds(max(0.0, p90 - elapsed)), longer.n)


def run_seconds(task: Task, sketches: Sketches, policy: Policy, *, kind: str = "") -> Remaining | None:
    """Return how long a run that begins now takes: as stated at submission, else by enough runs like it.
    Ignores checkpoints. None if unknown."""
    if task.expected_seconds is not None:
        return Remaining(task.expected_seconds, task.expected_seconds, 0)
    known = sketches.get(SketchKey(task.tenant, task.subject, kind, What.SECONDS))
    if known is None or known.n < max(1, policy.learned_least_runs):
        return None
    p50, p90 = known.quantile(0.5), known.quantile(0.9)
    return Remaining(Seconds(p50 or 0.0), Seconds(p90 or 0.0), known.n)


def whole_run_seconds(
    task: Task, sketches: Sketches, policy: Policy, kinds: Iterable[str]
) -> tuple[Seconds, Seconds]:
    """(p50, p90) of a run that begins now on the slowest of these kinds, up to its time limit; infinite if
    unknown."""
    limit = inf if task.timeout_seconds is None else task.timeout_seconds + task.grace_seconds
    p50 = p90 = 0.0
    for kind in kinds:
        known = run_seconds(task, sketches, policy, kind=kind)
        if known is None:
            return Seconds(limit), Seconds(limit)
        p50, p90 = max(p50, known.p50_seconds), max(p90, known.p90_seconds)
    return Seconds(min(limit, p50)), Seconds(min(limit, p90))
