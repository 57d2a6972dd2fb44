"""Which runs may be stopped for whom, and from when on: what spares a run of lower priority."""

from math import inf

from gpubroker_server.core.domain.models import min_residency_seconds
from gpubroker_server.core.domain.policy import Policy, band_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.domain.values import changed
from gpubroker_server.core.world.queue import aged


def may_be_stopped(run: Task, for_priority: int, policy: Policy, now: Instant) -> bool:
    """Strictly lower priority, and nothing spares it; from who is critical nothing does."""
    if run.priority >= for_priority or is_spared(run, for_priority, policy, now):
        return False
    return not has_its_turn(run, for_priority, policy, now)


def stoppable_at(run: Task, for_priority: int, policy: Policy, now: Instant) -> float:
    """From when on it may be stopped for such a task, as things are with it; infinite if never. Of a task
    that waits: if it began now."""
    if run.priority >= for_priority:
        return inf
    if _is_critical(for_priority):
        return now
    is_first = for_priority <= first_up_to(run, policy, now)
    if run.started_at is None or not run.is_active:
        return now + shielded_seconds(changed(run, started_at=None), policy, is_first=is_first)
    return max(now, run.started_at + shielded_seconds(run, policy, is_first=is_first))


def is_spared(run: Task, for_priority: int, policy: Policy, now: Instant) -> bool:
    """Shielded, from anybody who is not critical."""
    return not _is_critical(for_priority) and is_shielded(run, policy, now)


def is_shielded(run: Task, policy: Policy, now: Instant) -> bool:
    """It has hardly begun, or its preemption budget is spent and this attempt has neither saved its work nor
    run for long."""
    if run.started_at is None:
        return is_young(run, policy, now) or run.preemptions >= policy.preemption_budget
    return now - run.started_at < shielded_seconds(run, policy)


def is_young(run: Task, policy: Policy, now: Instant) -> bool:
    """It has hardly begun."""
    began, least = run.started_at, _least_seconds(run, policy)
    return least > 0 and (began is None or now - began < least)


def _least_seconds(run: Task, policy: Policy) -> Seconds:
    """So long after its start it has hardly begun; a model that was loaded for it has hardly been there."""
    if run.model is None:
        return policy.min_run_seconds
    return max(policy.min_run_seconds, min_residency_seconds(run.model.load_seconds))


def shielded_seconds(run: Task, policy: Policy, *, is_first: bool = False) -> Seconds:
    """For how long after its start a run that has begun is left alone, as things are with it. `is_first`: by
    those before whom it went."""
    least = _least_seconds(run, policy)
    if _has_saved(run) or not (is_first or run.preemptions >= policy.preemption_budget):
        return least
    return max(policy.shield_seconds, least)


def has_its_turn(run: Task, for_priority: int, policy: Policy, now: Instant) -> bool:
    """It went before all of such a priority in its band, and this attempt has neither saved its work nor run
    for long: else who stood behind it would stop it at once, and its start was for nothing. Who is critical
    does not mind."""
    if _is_critical(for_priority) or now >= turn_ends_at(run, policy):
        return False
    return for_priority <= first_up_to(run, policy, now)


def turn_ends_at(run: Task, policy: Policy) -> float:
    """From when on it is of no account any more when the run was admitted, as things are with it; infinite
    if it has not begun."""
    if policy.shield_seconds <= 0 or _has_saved(run):
        return -inf
    return inf if run.started_at is None else run.started_at + policy.shield_seconds


def first_up_to(run: Task, policy: Policy, now: Instant) -> int:
    """The priority by which it stood in its band when it was admitted: nobody of at most this one who comes
    later would have stood before it. Of a task that waits: if it were admitted now."""
    admitted_at = run.admitted_at
    at = admitted_at if admitted_at is not None and run.is_active else now
    return aged(run.priority, band_of(run.priority)[2], at - run.submitted_at, policy)


def _has_saved(run: Task) -> bool:
    """This attempt."""
    return run.checkpoint_at is not None and run.started_at is not None and run.checkpoint_at > run.started_at


def _is_critical(priority: int) -> bool:
    return band_of(priority)[0] == "critical"
