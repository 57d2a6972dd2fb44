"""Protection of runs from preemption: which runs are protected, and for how long."""

from math import inf

from msgspec.structs import replace

from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.models import min_residency_seconds
from gpubroker_server.core.domain.policy import Policy, aged_priority, band_of
from gpubroker_server.core.domain.ranks import needs_gpus
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.background import IDLE_TOP

NOTHING = -1
"""A priority below that of every run."""


def preempts(task: Task, policy: Policy) -> bool:
    """Return True if runs may be stopped for the task."""
    return policy.preemption and stops_below(task) > NOTHING


def stops_below(task: Task) -> int:
    """Return the priority below which runs may be stopped for the task: its own, if it asks for GPUs or is
    critical. For other tasks only idle work makes room."""
    if task.demand.gpus:  # the common case comes first, because this is asked for each node
        return task.priority
    return victims_below(task.priority, with_gpus=needs_gpus(task.demand))


def victims_below(priority: int, *, with_gpus: bool) -> int:
    """Return what `stops_below` returns for a task of this priority with or without GPUs."""
    if with_gpus or is_critical(priority):
        return priority
    return IDLE_TOP + 1 if priority > IDLE_TOP else NOTHING


def may_be_stopped(run: Task, for_priority: int, policy: Policy, now: Instant) -> bool:
    """Return True if the run has a strictly lower priority and is not protected. Nothing is protected from
    critical tasks."""
    if run.priority >= for_priority or is_protected(run, for_priority, policy, now):
        return False
    return not has_turn_protection(run, for_priority, policy, now)


def stoppable_at(run: Task, for_priority: int, policy: Policy, now: Instant) -> float:
    """Return when a task of this priority may preempt the run, if nothing else changes; infinite if never. A
    waiting task is taken as a run that starts now."""
    if run.priority >= for_priority:
        return inf
    if _ignores_shields(run, for_priority):
        return now
    is_first = for_priority <= ahead_of_priority(run, policy, now)
    if run.started_at is None or not run.is_active:
        return now + shield_seconds_of(replace(run, started_at=None), policy, is_first=is_first)
    return max(now, run.started_at + shield_seconds_of(run, policy, is_first=is_first))


def is_protected(run: Task, for_priority: int, policy: Policy, now: Instant) -> bool:
    """Return True if the run is protected by its shield from a task of this priority."""
    return not _ignores_shields(run, for_priority) and is_shielded(run, policy, now)


def _ignores_shields(run: Task, for_priority: int) -> bool:
    """Return True if tasks of this priority ignore the shields of the run. Critical tasks ignore all shields,
    and all other work ignores those of idle work, however often that was preempted before."""
    if is_critical(for_priority):
        return True
    match run.holder:
        case Model():
            return False
        case _:
            return run.priority <= IDLE_TOP < for_priority


def is_shielded(run: Task, policy: Policy, now: Instant) -> bool:
    """Return True if the run has just started, or if its preemption budget is spent and this attempt has
    neither saved a checkpoint nor run for the shield time."""
    if run.started_at is None:
        match run.holder:
            case Model():
                return True
            case _:
                return run.preemptions >= policy.preemption_budget or is_young(run, policy, now)
    return now - run.started_at < shield_seconds_of(run, policy)


def is_young(run: Task, policy: Policy, now: Instant) -> bool:
    """Return True if the run has run for less than the minimum."""
    began, least = run.started_at, _least_seconds(run, policy)
    return least > 0 and (began is None or now - began < least)


def _least_seconds(run: Task, policy: Policy) -> Seconds:
    """Return the minimum run time; for a model its minimum residency, if that is longer."""
    match run.holder:
        case Model(load_seconds=load_seconds):
            least = min_residency_seconds(load_seconds, policy.min_residency_seconds)
            return max(policy.min_run_seconds, least)
        case _:
            return policy.min_run_seconds


def shield_seconds_of(run: Task, policy: Policy, *, is_first: bool = False) -> Seconds:
    """Return how long after its start a run is protected, if nothing else changes. With `is_first`, return
    the protection from tasks that the run was ahead of when it was admitted."""
    least = _least_seconds(run, policy)
    match run.holder:
        case Model():
            return least
        case _ if _has_saved(run) or not (is_first or run.preemptions >= policy.preemption_budget):
            return least
        case _:
            return max(policy.shield_seconds, least)


def has_turn_protection(run: Task, for_priority: int, policy: Policy, now: Instant) -> bool:
    """Return True if the run was ahead of all tasks of this priority in its band when it was admitted, and
    this attempt has neither saved a checkpoint nor run for the shield time. Without this protection the next
    task would stop the run at once."""
    if is_critical(for_priority) or now >= turn_protection_ends_at(run, policy):
        return False
    return for_priority <= ahead_of_priority(run, policy, now)


def turn_protection_ends_at(run: Task, policy: Policy) -> float:
    """Return when the protection of a run by its turn ends; infinite if the run has not started."""
    match run.holder:
        case Model():
            return -inf
        case _ if policy.shield_seconds <= 0 or _has_saved(run):
            return -inf
        case _:
            return inf if run.started_at is None else run.started_at + policy.shield_seconds


def ahead_of_priority(run: Task, policy: Policy, now: Instant) -> int:
    """Return the priority up to which the run is ahead of every later task of its band, by its age when it
    was admitted. A waiting task is taken as if it were admitted now."""
    admitted_at = run.admitted_at
    counted_until = admitted_at if admitted_at is not None and run.is_active else now
    return aged_priority(run.priority, counted_until - run.queued_at, policy.ageing_seconds_per_point)


def _has_saved(run: Task) -> bool:
    """Return True if the present attempt has saved a checkpoint."""
    return run.checkpoint_at is not None and run.started_at is not None and run.checkpoint_at > run.started_at


def is_critical(priority: int) -> bool:
    return band_of(priority)[0] == "critical"
