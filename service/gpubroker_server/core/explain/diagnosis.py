"""Diagnose the blockers that keep a pending task from being placed; for a gang, rank by rank."""

from msgspec import Struct

from gpubroker_server.core.admission.feasibility import new_nodes_could_take, waits_for_a_node
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.ranks import rank_task
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Placement
from gpubroker_server.core.explain.blockers import (
    Blocker,
    limit_blockers,
    room_blockers,
    waiting_for_preemption,
)
from gpubroker_server.core.explain.possible import STRATEGY_TEXT, check_task
from gpubroker_server.core.explain.survey import Survey, survey_nodes
from gpubroker_server.core.planning.decisions import admit
from gpubroker_server.core.planning.gangs.gang_nodes import GangNode, gang_nodes_of
from gpubroker_server.core.planning.gangs.gang_search import Gang, place_gang, place_ranks
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.places import scores_of

MAX_DISTINCT = 8
"""The most distinct demands of ranks without room that are evaluated."""

_RankResult = tuple[Placement | None, Blocker | None]
"""(place with room for a rank, or None; the blocker that leaves no place, or None)"""

NOT_EVALUATED: _RankResult = (
    None,
    Blocker(Reason.PENDING_EVALUATION, "not evaluated: ranks before it have no room"),
)

STRICT = frozenset({"strict_pack", "strict_spread"})
"""Strategies with which the place of a rank depends on the places of the other ranks."""


class RankVerdict(Struct, frozen=True):
    """One rank of a gang. The first ranks are placed together as long as they have room together; after them
    each rank is evaluated by itself."""

    rank: int
    place: Placement | None
    """The place with room for the rank."""
    blocker: Blocker | None
    """The blocker that leaves no place. None also for a rank that may join later."""


class Diagnosis(Struct, frozen=True):
    """The facts on which the answers of `explain_pending` and `advise` are based."""

    survey: Survey
    """The survey for the whole task. For a gang it has no verdicts on devices."""
    device_survey: Survey
    """The survey with the verdicts on devices: that for the task or, for a gang, for its first rank without
    room beside the ranks before it."""
    blockers: tuple[Blocker, ...]
    """Everything that keeps the task from a placement."""
    ranks: tuple[RankVerdict, ...] = ()
    """The verdicts on the ranks of a gang, in order."""


def diagnose(survey: Survey) -> Diagnosis:
    if not survey.task.demand.bundles:
        return Diagnosis(survey, survey, tuple(room_blockers(survey)))
    refusal = check_task(survey.task, survey.draft.world, survey.policy)
    if refusal is not None:
        misses = refusal.code == "no-matching-device"
        reason, message = Reason.NO_MATCHING_DEVICE if misses else Reason.EXCEEDS_CAPACITY, refusal.message
        if new_nodes_could_take(survey.task.demand, survey.policy):
            message = waits_for_a_node(message, survey.policy)
        return Diagnosis(survey, _rank_survey(survey, 0, survey.draft), (Blocker(reason, message),))
    return _Gang(survey).diagnose()


def _rank_survey(survey: Survey, rank: int, draft: Draft) -> Survey:
    return survey_nodes(draft, rank_task(survey.task, rank), survey.policy, survey.now)


class _Gang:
    """Evaluates the ranks that must start together."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._task = survey.task
        self._least = survey.task.demand.least_ranks
        worth = scores_of(survey.draft.world, survey.policy)
        self._gang_nodes = gang_nodes_of(survey.draft, survey.task, survey.policy, survey.now, worth)

    def diagnose(self) -> Diagnosis:
        limits = limit_blockers(self._survey)
        places = place_gang(self._task, self._gang_nodes)
        if places is not None:
            part = _rank_survey(self._survey, 0, self._survey.draft)
            return Diagnosis(self._survey, part, tuple(limits), self._verdicts(places))
        places = _most_places(self._survey, self._gang_nodes)
        draft = self._survey.draft.copy()
        if places and not draft.pledges_of(self._task.id):
            admit(draft, self._task, places, self._survey.now)
        fit = len(places)
        part = _rank_survey(self._survey, fit, draft)
        blocker = self._why(part)
        if draft.pledges_of(self._task.id):
            first = waiting_for_preemption(part)
        else:
            summary = f"there is room for {fit or 'none'} of the {self._least} ranks that must start together"
            first = Blocker(blocker.reason, f"{summary}; rank {fit}: {blocker.message}")
        return Diagnosis(self._survey, part, (*limits, first), self._verdicts(places, draft, blocker))

    def _why(self, part: Survey) -> Blocker:
        """Return the reason why a rank has no place beside the ranks that have one."""
        blockers = room_blockers(part, of_rank=True)
        strategy = STRATEGY_TEXT[self._task.demand.strategy]
        return (
            blockers[0] if blockers else Blocker(Reason.FRAGMENTED, f"no place beside the others {strategy}")
        )

    def _verdicts(
        self, places: Gang, draft: Draft | None = None, first: Blocker | None = None
    ) -> tuple[RankVerdict, ...]:
        """Return the verdicts on all ranks. `draft` is a draft in which `places` are taken; `first` is the
        reason why the next rank has no place."""
        bundles, results = self._task.demand.bundles, dict[Demand, _RankResult]()
        if first is not None:
            results[bundles[len(places)]] = None, first
        verdicts = [RankVerdict(rank, place, None) for rank, place in enumerate(places)]
        for rank in range(len(places), len(bundles)):
            if draft is None or rank >= self._least:
                verdicts.append(RankVerdict(rank, None, None))
                continue
            demand = bundles[rank]
            if demand not in results and len(results) < MAX_DISTINCT:
                results[demand] = self._evaluate(rank, draft)
            verdicts.append(RankVerdict(rank, *results.get(demand, NOT_EVALUATED)))
        return tuple(verdicts)

    def _evaluate(self, rank: int, draft: Draft) -> _RankResult:
        part = _rank_survey(self._survey, rank, draft)
        place = None
        if self._task.demand.strategy not in STRICT:
            gang_nodes = gang_nodes_of(draft, self._task, self._survey.policy, self._survey.now)
            places = (
                Placement(g.node.name, chosen) for g in gang_nodes for chosen in g.device_choices(part.task)
            )
            place = next(places, None)
        return (None, self._why(part)) if place is None else (place, None)


def _most_places(survey: Survey, gang_nodes: list[GangNode]) -> Gang:
    """Return places for as many of the first ranks as fit together."""
    places: Gang = ()
    too_many = survey.task.demand.least_ranks
    while too_many - len(places) > 1:
        middle = (len(places) + too_many) // 2
        more = place_ranks(survey.task, middle, gang_nodes)
        places, too_many = (places, middle) if more is None else (more, too_many)
    return places
