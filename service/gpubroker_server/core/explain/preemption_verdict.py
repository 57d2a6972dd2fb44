"""Why nobody is stopped for a task that waits: who could be, and what shields each."""

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from itertools import islice
from typing import assert_never

from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Mib, TaskId
from gpubroker_server.core.explain.survey import Survey
from gpubroker_server.core.planning.find_way import Evict, Start, WaitReason, Way
from gpubroker_server.core.planning.nodes.shields import has_turn_protection, is_protected, is_young
from gpubroker_server.core.planning.tenants.guarantees import BorrowerRule, Guarantees
from gpubroker_server.core.planning.tenants.quota import Quotas

MOST_TOLD = 20
"""So many runs are told one by one; all are counted."""


class Why(StrEnum):
    """Published. Why nobody is stopped, or that somebody is."""

    NOT_NEEDED = "not_needed"
    """It has room, or stands aside for other reasons."""
    UNDER_WAY = "under_way"
    """Runs are being stopped for it."""
    POSSIBLE = "possible"
    """The next cycle asks these to leave."""
    ROOM_IS_COMING = "room_is_coming"
    """What is being given back anyway will do."""
    OFF = "off"
    """The operator has switched preemption off."""
    NO_GPUS = "no_gpus"
    """Only demands for GPUs preempt."""
    LIMIT = "limit"
    """What it lacks is not on a node: a limit that many share is used up."""
    ALL_SHIELDED = "all_shielded"
    """There are runs, and none may be stopped for it."""
    NOT_ENOUGH = "not_enough"
    """If all who may be stopped had left it would still not fit."""
    NOBODY = "nobody"
    """Nothing runs where it could."""


class Shield(StrEnum):
    """Published. What keeps one run from being stopped for one task; the first that applies."""

    LEAVING = "leaving"
    PRIORITY = "priority"
    """It is not lower."""
    YOUNG = "young"
    """It has run for less than the operator lets every run have (`policy.min_run_seconds`)."""
    BUDGET = "budget"
    """It has been preempted as often as is allowed, and has neither saved its work nor run long since."""
    TURN = "turn"
    """It went before such a task in its band, and has neither saved its work nor run long since."""
    GUARANTEED = "guaranteed"
    """Its tenant has no more than it is guaranteed, and that of the task would borrow."""
    WOULD_NOT_HELP = "would_not_help"
    """It could be stopped, and the task would still not fit."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SparedRun:
    run: Task
    mb: Mib
    """Of GPU memory, in all."""
    shield: Shield


@dataclass(frozen=True, slots=True)
class Spared:
    why: Why
    message: str
    counts: dict[Shield, int]
    """Of the runs on the nodes that the task could use, by what shields them."""
    runs: tuple[SparedRun, ...]
    """The most telling of them: those that may be stopped first, then by priority, the lowest first."""


def spared(seen: Survey, way: Way) -> Spared:
    """`way`: what the planner would decide for the task now."""
    judged = _judged(seen, way)
    counts = Counter({shield: len(runs) for shield, runs in judged.items()})
    telling = list(islice(_in_order(judged), MOST_TOLD))
    why = _why(seen, way, counts)
    told = (SparedRun(run, _leased_mb(seen, run), shield) for run, shield in telling)
    return Spared(why, _message(seen, why, counts), dict(sorted(counts.items())), tuple(told))


def _in_order(judged: dict[Shield, list[Task]]) -> Iterator[tuple[Task, Shield]]:
    """The most telling of each shield."""
    for shield in sorted(judged, key=_TELLING.__getitem__):
        for run in nsmallest(MOST_TOLD, judged[shield], key=lambda run: (run.priority, run.id)):
            yield run, shield


def _leased_mb(seen: Survey, run: Task) -> Mib:
    return Mib(sum(lease.mb for lease in seen.draft.world.leases_of(run)))


_TELLING = {
    Shield.NONE: 0,
    Shield.WOULD_NOT_HELP: 1,
    Shield.YOUNG: 2,
    Shield.BUDGET: 3,
    Shield.TURN: 4,
    Shield.GUARANTEED: 5,
    Shield.PRIORITY: 6,
    Shield.LEAVING: 7,
}


def _judged(seen: Survey, way: Way) -> dict[Shield, list[Task]]:
    """The runs on the nodes that it could use, by what shields them."""
    draft = seen.draft
    nodes = [node.node.name for node in seen.nodes if node.is_usable and node.is_large_enough]
    victims = way.eviction.victims if isinstance(way, Evict) else ()
    chosen = frozenset(victim.id for victim in victims)
    rule = Guarantees(draft, seen.policy, Quotas(draft, seen.policy)).borrower_rule_for(seen.task)
    judged: dict[Shield, list[Task]] = {}
    for node in nodes:
        for run in draft.runs_on(node):
            judged.setdefault(_shield(seen, run, chosen, rule), []).append(run)
    return judged


def _shield(seen: Survey, run: Task, chosen: Set[TaskId], rule: BorrowerRule | None) -> Shield:
    task = seen.task
    if run.state is TaskState.STOPPING:
        return Shield.LEAVING
    if run.id in chosen:
        return Shield.NONE
    if run.priority >= task.priority:
        return Shield.PRIORITY
    if is_protected(run, task.priority, seen.policy, seen.now):
        return Shield.YOUNG if is_young(run, seen.policy, seen.now) else Shield.BUDGET
    if has_turn_protection(run, task.priority, seen.policy, seen.now):
        return Shield.TURN
    if rule is not None and not rule.allows([run], {}):
        return Shield.GUARANTEED
    return Shield.WOULD_NOT_HELP


def _why(seen: Survey, way: Way, counts: Counter[Shield]) -> Why:
    task, draft = seen.task, seen.draft
    if draft.pledges_of(task.id):
        return Why.UNDER_WAY
    if isinstance(way, Start):
        return Why.NOT_NEEDED
    if isinstance(way, Evict):
        return Why.POSSIBLE
    if way.reason is WaitReason.COMING and way.coming_on:
        return Why.ROOM_IS_COMING
    if not any(part.gpus for part in task.demand.bundles or (task.demand,)):
        return Why.NO_GPUS
    if not seen.policy.preemption:
        return Why.OFF
    if draft.short_of(task, seen.policy.custom_limits):
        return Why.LIMIT
    if counts[Shield.WOULD_NOT_HELP]:
        return Why.NOT_ENOUGH
    return Why.ALL_SHIELDED if counts else Why.NOBODY


def _message(seen: Survey, why: Why, counts: Counter[Shield]) -> str:
    task = seen.task
    match why:
        case Why.NOT_NEEDED:
            return "nobody need be stopped for it"
        case Why.UNDER_WAY:
            return "runs are being stopped for it"
        case Why.POSSIBLE:
            return f"{_runs(counts[Shield.NONE])} would be stopped for it"
        case Why.ROOM_IS_COMING:
            return "nobody is stopped, because what is being given back anyway will do"
        case Why.NO_GPUS:
            return "nobody is stopped for tasks that ask for no GPU"
        case Why.OFF:
            return "nobody is stopped, because preemption is switched off"
        case Why.LIMIT:
            return "nobody is stopped, because what it lacks is a limit that many share and not a GPU"
        case Why.NOBODY:
            return "nothing runs where it could"
        case Why.NOT_ENOUGH:
            left = _runs(counts[Shield.WOULD_NOT_HELP])
            besides = _rest(counts, "; besides, ")
            return f"nobody is stopped, because with {left} less it would still not fit{besides}"
        case Why.ALL_SHIELDED:
            return f"nobody may be stopped for priority {task.priority}{_rest(counts, ': ')}"
        case _:
            assert_never(why)


def _rest(counts: Counter[Shield], before: str) -> str:
    kept = {
        Shield.PRIORITY: "of the same or higher priority",
        Shield.YOUNG: "only just begun",
        Shield.BUDGET: "preempted as often as is allowed",
        Shield.TURN: "only just begun, whose turn came first",
        Shield.GUARANTEED: "within what their tenants are guaranteed",
        Shield.LEAVING: "leaving anyway",
    }
    parts = [f"{_runs(counts[shield])} {why}" for shield, why in kept.items() if counts[shield]]
    return f"{before}{', '.join(parts)}" if parts else ""


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
