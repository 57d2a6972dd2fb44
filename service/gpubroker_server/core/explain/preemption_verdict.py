"""Explain preemption for a waiting task: the runs in its way, and the protection of each run."""

from collections import Counter
from collections.abc import Sequence, Set
from enum import StrEnum
from heapq import nsmallest
from typing import assert_never

from gpubroker.wire.explanations import PreemptionCounts
from msgspec import Struct

from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Mib, TaskId, in_gib, in_time
from gpubroker_server.core.explain.blockers import task_label
from gpubroker_server.core.explain.survey import Survey
from gpubroker_server.core.planning.find_way import Evict, Start, WaitReason, Way
from gpubroker_server.core.planning.forecasts.reservations import Reservation
from gpubroker_server.core.planning.nodes.shields import (
    has_turn_protection,
    is_protected,
    is_young,
    stops_below,
)
from gpubroker_server.core.planning.tenants.guarantees import BorrowerRule, Guarantees
from gpubroker_server.core.planning.tenants.quota import Quotas

MAX_LISTED = 20
"""The most runs that are listed one by one. All runs are counted."""


class PreemptionStatus(StrEnum):
    """The state of preemption for a task: the reason for which no run is preempted, or that some are. It is
    published."""

    NOT_NEEDED = "not_needed"
    """The task has room, or is deferred."""
    UNDER_WAY = "under_way"
    POSSIBLE = "possible"
    """The next cycle asks these runs to stop."""
    ROOM_IS_COMING = "room_is_coming"
    """Memory that is being released anyway is enough."""
    RESERVED = "reserved"
    """The room that the victims would free is reserved for tasks ahead of this one."""
    OFF = "off"
    NO_GPUS = "no_gpus"
    """The task asks for no GPU, and of such tasks only critical ones preempt others."""
    LIMIT = "limit"
    """The task lacks a shared limit, which no node can give."""
    ALL_SHIELDED = "all_shielded"
    """Every run in the task's way is protected."""
    NOT_ENOUGH = "not_enough"
    """The task would not even fit without all unprotected runs."""
    NO_RUNS = "nobody"
    """Nothing runs on the nodes that the task could use."""


class Protection(StrEnum):
    """The protection of one run from one task. If several apply, it is the one that `_protection` checks
    first. The names are published. Lists of runs have the order of the members, so that the runs that are
    easiest to preempt come first."""

    NONE = "none"
    WOULD_NOT_HELP = "would_not_help"
    """The run could be preempted, and the task would still not fit."""
    YOUNG = "young"
    """The run has run for less than `policy.min_run_seconds`."""
    BUDGET = "budget"
    """The run's preemption budget is spent, and since then the run has neither saved its work nor run for
    long."""
    TURN = "turn"
    """The run was ahead of a task of its band when it started, and since then has neither saved its work nor
    run for long."""
    GUARANTEED = "guaranteed"
    """The run's tenant is within its guarantee, and the task's tenant would borrow."""
    PRIORITY = "priority"
    """The run's priority is not lower than the task's."""
    LEAVING = "leaving"


_ORDER = {protection: place for place, protection in enumerate(Protection)}


class RunProtection(Struct, frozen=True):
    run: Task
    mb: Mib
    """The GPU memory that the run leases on all devices, in MiB."""
    shield: Protection


class PreemptionVerdict(PreemptionCounts, frozen=True):
    """The verdict on preemption. `why` is a PreemptionStatus; `counts` maps each Protection to the number of
    runs that have it."""

    runs: tuple[RunProtection, ...]
    """At most MAX_LISTED runs, sorted by protection; runs of the same protection by priority, the lowest
    first."""


def explain_preemption(survey: Survey, way: Way, ahead: Sequence[Reservation] = ()) -> PreemptionVerdict:
    """Explain preemption for a task for which the planner would decide `way` now. `ahead` has the
    reservations that keep the task from preempting, if the task waits for that reason."""
    runs = _protections(survey, way)
    counts = Counter(protection for _, protection in runs)
    listed = nsmallest(
        MAX_LISTED, runs, key=lambda listing: (_ORDER[listing[1]], listing[0].priority, listing[0].id)
    )
    status = _status(survey, way, counts, ahead)
    leases_of = survey.draft.world.leases_of
    return PreemptionVerdict(
        status,
        _message(survey, status, counts, ahead),
        dict(sorted(counts.items())),
        tuple(
            RunProtection(run, Mib(sum(lease.mb for lease in leases_of(run))), shield)
            for run, shield in listed
        ),
    )


def _protections(survey: Survey, way: Way) -> list[tuple[Task, Protection]]:
    """Return (run, protection) of the runs on the nodes that the task could use. A gang is listed once for
    each of its nodes."""
    draft = survey.draft
    victims = (
        frozenset(victim.id for victim in way.eviction.victims) if isinstance(way, Evict) else frozenset()
    )
    rule = _guarantees(survey).borrower_rule_for(survey.task)
    return [
        (run, _protection(survey, run, victims, rule))
        for node in survey.nodes
        if node.is_usable and node.is_large_enough
        for run in draft.runs_on(node.node.name)
    ]


def _guarantees(survey: Survey) -> Guarantees:
    return Guarantees(survey.draft, survey.policy, Quotas(survey.draft, survey.policy))


def _protection(survey: Survey, run: Task, victims: Set[TaskId], rule: BorrowerRule | None) -> Protection:
    task = survey.task
    if run.state is TaskState.STOPPING:
        return Protection.LEAVING
    if run.id in victims:
        return Protection.NONE
    if run.priority >= task.priority:
        return Protection.PRIORITY
    if is_protected(run, task.priority, survey.policy, survey.now):
        return Protection.YOUNG if is_young(run, survey.policy, survey.now) else Protection.BUDGET
    if has_turn_protection(run, task.priority, survey.policy, survey.now):
        return Protection.TURN
    if rule is not None and not rule.allows([run], {}):
        return Protection.GUARANTEED
    return Protection.WOULD_NOT_HELP


def _status(
    survey: Survey, way: Way, counts: Counter[Protection], ahead: Sequence[Reservation]
) -> PreemptionStatus:
    task, draft = survey.task, survey.draft
    if draft.pledges_of(task.id):
        return PreemptionStatus.UNDER_WAY
    if isinstance(way, Start):
        return PreemptionStatus.NOT_NEEDED
    if isinstance(way, Evict):
        return PreemptionStatus.POSSIBLE
    if way.reason is WaitReason.COMING and way.coming_on:
        return PreemptionStatus.ROOM_IS_COMING
    if not survey.policy.preemption:
        return PreemptionStatus.OFF
    if stops_below(task) < task.priority:
        return PreemptionStatus.NO_GPUS
    if draft.short_of(task, survey.policy.custom_limits):
        return PreemptionStatus.LIMIT
    if ahead:
        return PreemptionStatus.RESERVED
    if counts[Protection.WOULD_NOT_HELP]:
        return PreemptionStatus.NOT_ENOUGH
    return PreemptionStatus.ALL_SHIELDED if counts else PreemptionStatus.NO_RUNS


def _message(
    survey: Survey, status: PreemptionStatus, counts: Counter[Protection], ahead: Sequence[Reservation]
) -> str:
    match status:
        case PreemptionStatus.NOT_NEEDED:
            return "no run has to be preempted for it"
        case PreemptionStatus.UNDER_WAY:
            return "runs are being preempted for it"
        case PreemptionStatus.POSSIBLE:
            return f"{_runs(counts[Protection.NONE])} would be preempted for it"
        case PreemptionStatus.ROOM_IS_COMING:
            return "no run is preempted, because the memory that is being released is enough"
        case PreemptionStatus.NO_GPUS:
            return "for a task that asks for no GPU and isn't critical only idle work is preempted"
        case PreemptionStatus.OFF:
            return "no run is preempted, because preemption is switched off"
        case PreemptionStatus.LIMIT:
            return "no run is preempted, because the task lacks a shared limit and not a GPU"
        case PreemptionStatus.RESERVED:
            return f"no run is preempted, because {_reserved(survey, ahead)}"
        case PreemptionStatus.NO_RUNS:
            return "nothing runs on the nodes that it could use"
        case PreemptionStatus.NOT_ENOUGH:
            unprotected = _runs(counts[Protection.WOULD_NOT_HELP])
            protected_text = _protected(counts, "; protected are ")
            return (
                f"no run is preempted, because without {unprotected} it would still not fit{protected_text}"
                f"{_unreclaimed(survey)}"
            )
        case PreemptionStatus.ALL_SHIELDED:
            protected_text = _protected(counts, ": ")
            return (
                f"no run may be preempted for priority {survey.task.priority}{protected_text}"
                f"{_unreclaimed(survey)}"
            )
        case _:
            assert_never(status)


def _unreclaimed(survey: Survey) -> str:
    """Say why the task reclaims nothing although others have borrowed; empty if it has nothing to reclaim."""
    borrowed_mb = sum(_guarantees(survey).reclaimable(survey.task).values())
    if not borrowed_mb:
        return ""
    return (
        f"; others of its cohort have borrowed {in_gib(borrowed_mb)}, but none of their runs that may be "
        "reclaimed (of its band or a lower one, not protected, no larger than what its tenant has borrowed) "
        "would make enough room"
    )


def _reserved(survey: Survey, ahead: Sequence[Reservation]) -> str:
    first = min(ahead, key=lambda reservation: (reservation.forecast.start_at, reservation.task.id))
    name = task_label(first.task.id, first.task.tenant, survey.task)
    others = len({reservation.task.id for reservation in ahead}) - 1
    more = f" and {others} more" if others else ""
    start = in_time(max(0.0, first.forecast.start_at - survey.now))
    return (
        f"what it would free on {first.node} is reserved for {name}{more}, ahead of it in the queue and "
        f"expected to start in {start}"
    )


_PROTECTED = {
    Protection.PRIORITY: "of the same or higher priority",
    Protection.YOUNG: "that started recently",
    Protection.BUDGET: "preempted as often as is allowed",
    Protection.TURN: "that started recently from ahead in the queue",
    Protection.GUARANTEED: "within their tenants' guarantee",
    Protection.LEAVING: "already stopping",
}


def _protected(counts: Counter[Protection], before: str) -> str:
    parts = [
        f"{_runs(counts[protection])} {text}" for protection, text in _PROTECTED.items() if counts[protection]
    ]
    return f"{before}{', '.join(parts)}" if parts else ""


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
