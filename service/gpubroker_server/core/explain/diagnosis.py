"""What a pending task finds, and what keeps it from being placed: of a gang, rank by rank."""

from dataclasses import dataclass

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.ranks import part_of
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Placement
from gpubroker_server.core.explain.admission import IN_WORDS, check_task
from gpubroker_server.core.explain.blockers import (
    Blocker,
    limit_blockers,
    room_blockers,
    waiting_for_preemption,
)
from gpubroker_server.core.explain.survey import Survey, survey
from gpubroker_server.core.planning.decisions import admit
from gpubroker_server.core.planning.gangs.gang_nodes import GangNode, gang_nodes_of
from gpubroker_server.core.planning.gangs.gang_search import Gang, place_gang, place_ranks
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.places import scores_of

MOST_SORTS = 8
"""So many different ranks without room are looked at."""

_Judged = tuple[Placement | None, Blocker | None]
"""Where there is room, or why there is none."""

UNSEEN: _Judged = None, Blocker(Reason.PENDING_EVALUATION, "not looked at: others before it have no room")

STRICT = frozenset({"strict_pack", "strict_spread"})
"""By these a place is one only beside those of the others."""


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """One rank of a gang, judged with those in their places that have room together; after the first that has
    none, each by itself."""

    rank: int
    place: Placement | None
    """Where there is room for it."""
    blocker: Blocker | None
    """Why there is none; None as well for one that may join later."""


@dataclass(frozen=True, slots=True)
class Look:
    """The answers to one question, which `explain_waiting` and `advise` tell."""

    whole: Survey
    """Of the task; it says nothing of the devices that the ranks of a gang could use."""
    part: Survey
    """The same, but of a gang that of the first rank without room when those before it have theirs."""
    blockers: tuple[Blocker, ...]
    """All that stands between the task and a placement."""
    ranks: tuple[RankVerdict, ...] = ()
    """Of a gang, in order."""


def look(whole: Survey) -> Look:
    if not whole.task.demand.bundles:
        return Look(whole, whole, tuple(room_blockers(whole)))
    refusal = check_task(whole.task, whole.draft.world, whole.policy)
    if refusal is not None:
        misses = refusal.code == "no-matching-device"
        reason = Reason.NO_MATCHING_DEVICE if misses else Reason.EXCEEDS_CAPACITY
        return Look(whole, _part(whole, 0, whole.draft), (Blocker(reason, refusal.message),))
    return _Gang(whole).look()


def _part(whole: Survey, rank: int, draft: Draft) -> Survey:
    return survey(draft, part_of(whole.task, rank), whole.policy, whole.now)


class _Gang:
    """The ranks it needs at least, and where as many of them as possible have room together."""

    def __init__(self, whole: Survey) -> None:
        self._whole = whole
        self._task = whole.task
        self._least = whole.task.demand.least_ranks
        worth = scores_of(whole.draft.world, whole.policy)
        self._gang_nodes = gang_nodes_of(whole.draft, whole.task, whole.policy, whole.now, worth)

    def look(self) -> Look:
        limits = limit_blockers(self._whole)
        places = place_gang(self._task, self._gang_nodes)
        if places is not None:
            part = _part(self._whole, 0, self._whole.draft)
            return Look(self._whole, part, tuple(limits), self._told(places))
        places = _most_places(self._whole, self._gang_nodes)
        draft = self._whole.draft.copy()  # in which ranks are tried
        if places and not draft.pledges_of(self._task.id):
            admit(draft, self._task, places, self._whole.now)
        fit = len(places)
        part = _part(self._whole, fit, draft)
        why = self._why(part)
        if draft.pledges_of(self._task.id):
            first = waiting_for_preemption(part)
        else:
            has = f"there is room for {fit or 'none'} of the {self._least} ranks that must start together"
            first = Blocker(why.reason, f"{has}; rank {fit}: {why.message}")
        return Look(self._whole, part, (*limits, first), self._told(places, draft, why))

    def _why(self, part: Survey) -> Blocker:
        """Why a rank finds no place beside those that have one."""
        found = room_blockers(part, of_rank=True)
        how = IN_WORDS[self._task.demand.strategy]
        return found[0] if found else Blocker(Reason.FRAGMENTED, f"no place beside the others {how}")

    def _told(
        self, places: Gang, draft: Draft | None = None, first: Blocker | None = None
    ) -> tuple[RankVerdict, ...]:
        """`draft`: in which those have their places; `first`: why the next rank has none."""
        bundles, known = self._task.demand.bundles, dict[Demand, _Judged]()
        if first is not None:
            known[bundles[len(places)]] = None, first
        told = [RankVerdict(rank, place, None) for rank, place in enumerate(places)]
        for rank in range(len(places), len(bundles)):
            if draft is None or rank >= self._least:
                told.append(RankVerdict(rank, None, None))
                continue
            demand = bundles[rank]
            if demand not in known and len(known) < MOST_SORTS:
                known[demand] = self._judged(rank, draft)
            told.append(RankVerdict(rank, *known.get(demand, UNSEEN)))
        return tuple(told)

    def _judged(self, rank: int, draft: Draft) -> _Judged:
        part = _part(self._whole, rank, draft)
        place = None
        if self._task.demand.strategy not in STRICT:
            gang_nodes = gang_nodes_of(draft, self._task, self._whole.policy, self._whole.now)
            places = (
                Placement(g.node.name, chosen) for g in gang_nodes for chosen in g.device_choices(part.task)
            )
            place = next(places, None)
        return (None, self._why(part)) if place is None else (place, None)


def _most_places(whole: Survey, gang_nodes: list[GangNode]) -> Gang:
    """Places for as many of the first ranks as have them together; fewer than it needs at least."""
    found: Gang = ()
    too_many = whole.task.demand.least_ranks
    while too_many - len(found) > 1:
        some = (len(found) + too_many) // 2
        more = place_ranks(whole.task, some, gang_nodes)
        found, too_many = (found, some) if more is None else (more, too_many)
    return found
