"""Preemption where quotas and guarantees have a say."""

from collections.abc import Iterable, Iterator
from functools import partial

from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.planning.nodes.offers import Offer, Offers
from gpubroker_server.core.planning.nodes.shields import is_protected
from gpubroker_server.core.planning.nodes.victims import PossibleVictim, Together, all_of
from gpubroker_server.core.planning.preemption.eviction import (
    Eviction,
    RoomBeingFreed,
    best_of,
    eviction_of,
    may_preempt,
)
from gpubroker_server.core.planning.preemption.gang_eviction import choose_among
from gpubroker_server.core.planning.tenants.guarantees import BorrowerRule, Surplus, leased_mb, within_surplus


def reclaim(
    offers: Offers, task: Task, surplus: Surplus, now: Instant, nodes: Iterable[NodeName]
) -> Eviction | None:
    """The cheapest way to take room back from borrowers on these nodes; None if there is none.

    Borrowers of the same band or a lower one may be preempted, whatever their priority, unless protected; no
    tenant is left with less than its guarantee.
    """
    there = (offer for offer in _borrowers_on(offers, task, surplus, nodes) if offer.found)
    return _cheapest_of(
        there, offers, task, now, partial(within_surplus, surplus=surplus, draft=offers.draft)
    )


def evict_within_borrower_rule(
    offers: Offers, task: Task, rule: BorrowerRule, now: Instant, nodes: Iterable[NodeName]
) -> Eviction | None:
    """The same for a task that would borrow, by preempting runs of lower priority. No node has room being
    released."""
    there = (offers.of(node, task.priority) for node in sorted(nodes))
    return _cheapest_of(there, offers, task, now, rule.together)


def _cheapest_of(
    there: Iterable[Offer], offers: Offers, task: Task, now: Instant, together: Together
) -> Eviction | None:
    best = None
    for offer in there:
        best = best_of(offer, task, best, all_of(together))
    return None if best is None else eviction_of(best, offers.draft, now)


def reclaim_for_gang(
    offers: Offers, task: Task, surplus: Surplus, now: Instant, nodes: Iterable[NodeName]
) -> Eviction | RoomBeingFreed | None:
    """`reclaim` for a gang, on all these nodes together."""
    if not may_preempt(offers, task):
        return None
    there = list(_borrowers_on(offers, task, surplus, nodes))
    together = partial(within_surplus, surplus=surplus, draft=offers.draft)
    return choose_among(there, offers.draft, task, now, together=together)


def make_room_in_quota(
    offers: Offers, task: Task, missing_mb: int, now: Instant, nodes: Iterable[NodeName]
) -> Eviction | None:
    """The cheapest way for a task or gang over its tenant's quota: runs of that tenant, of strictly lower
    priority, are stopped until the quota has room too. None if there is none, or if runs that are leaving
    will do."""
    if not missing_mb or not may_preempt(offers, task):
        return None
    there = []
    for node in sorted(nodes):
        mine = (run for run in offers.rooms.leavers(node, task.priority) if run.task.tenant == task.tenant)
        there.append(offers.among(node, task.priority, mine))
    found = choose_among(
        there, offers.draft, task, now, gives_enough=lambda gone: leased_mb(gone, offers.draft) >= missing_mb
    )
    assert not isinstance(found, RoomBeingFreed), "a run that no task may stop frees nothing"
    return found


def _borrowers_on(offers: Offers, task: Task, surplus: Surplus, nodes: Iterable[NodeName]) -> Iterator[Offer]:
    """What these nodes offer if only borrowers that must give back may be preempted."""
    for node in sorted(nodes):
        runs = offers.possible_victims(node)
        asked = [run for run in runs if run.task.tenant in surplus and _may_be_asked(run, task, offers)]
        yield offers.among(node, task.priority, asked)


def _may_be_asked(run: PossibleVictim, task: Task, offers: Offers) -> bool:
    """A rank that its gang can do without is never protected: no work is lost. The turn of a run does not
    count: what was borrowed is given back."""
    same_or_lower = band_of(run.task.priority)[2] <= band_of(task.priority)[2]
    is_alone = run.rank is not None
    spared = not is_alone and is_protected(run.task, task.priority, offers.policy, offers.began_at)
    return same_or_lower and not spared
