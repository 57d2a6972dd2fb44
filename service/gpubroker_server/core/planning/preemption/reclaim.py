"""Preemption by the rules of quotas, guarantees and cluster-wide limits."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf

from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.ranks import counted_by, demand_of
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.planning.nodes.offers import Offer, Offers
from gpubroker_server.core.planning.nodes.shields import NOTHING, is_critical, is_protected, preempts
from gpubroker_server.core.planning.nodes.victims import Candidate, PossibleVictim, Together, all_of
from gpubroker_server.core.planning.preemption.eviction import (
    Eviction,
    RoomBeingFreed,
    best_of,
    eviction_of,
    may_preempt,
    offer_above,
)
from gpubroker_server.core.planning.preemption.gang_eviction import choose_among
from gpubroker_server.core.planning.tenants.guarantees import BorrowerRule, Surplus, leased_mb, within_surplus


def reclaim(
    offers: Offers,
    task: Task,
    surplus: Surplus,
    now: Instant,
    nodes: Iterable[NodeName],
    floors: Mapping[NodeName, int],
) -> Eviction | None:
    """Return the cheapest way to take room back from borrowers on these nodes; None if there is none.
    Borrowers of the task's band or a lower one may be preempted, whatever their priority, unless protected.
    No tenant is left with less than its guarantee. `floors` are those of `Reservations.victim_floors`."""
    node_offers = (offer for offer in _borrowers_on(offers, task, surplus, nodes, floors) if offer.found)
    return _cheapest_of(
        node_offers, offers, task, now, partial(within_surplus, surplus=surplus, draft=offers.draft)
    )


def evict_within_borrower_rule(
    offers: Offers, task: Task, rule: BorrowerRule, now: Instant, nodes: Iterable[NodeName]
) -> Eviction | None:
    """Return the cheapest way to make room for a task that would borrow, by preempting runs of lower priority
    on these nodes; None if there is none. The caller has checked that no node has room being released."""
    node_offers = (offers.of(node, task) for node in sorted(nodes))
    return _cheapest_of(node_offers, offers, task, now, rule.together)


def evict_above_floors(
    offers: Offers, task: Task, floors: Mapping[NodeName, int], now: Instant, together: Together
) -> Eviction | None:
    """Return the cheapest way to make room by preempting runs from the node's floor up to below the task's
    priority; None if there is none. The caller has checked that no node has room being released."""
    node_offers = (offer_above(offers, task, node, floor) for node, floor in sorted(floors.items()))
    return _cheapest_of(node_offers, offers, task, now, together)


def _cheapest_of(
    node_offers: Iterable[Offer], offers: Offers, task: Task, now: Instant, together: Together
) -> Eviction | None:
    best = None
    for offer in node_offers:
        best = best_of(offer, task, best, all_of(together))
    return None if best is None else eviction_of(best, offers.draft, now)


def reclaim_for_gang(
    offers: Offers,
    task: Task,
    surplus: Surplus,
    now: Instant,
    nodes: Iterable[NodeName],
    floors: Mapping[NodeName, int],
) -> Eviction | RoomBeingFreed | None:
    """Return the cheapest way to take room back for a gang on all these nodes together, by the rules of
    `reclaim`."""
    if not may_preempt(offers, task):
        return None
    node_offers = list(_borrowers_on(offers, task, surplus, nodes, floors))
    together = partial(within_surplus, surplus=surplus, draft=offers.draft)
    return choose_among(node_offers, offers.draft, task, now, together=together)


def make_room_in_quota(
    offers: Offers,
    task: Task,
    missing_mb: int,
    now: Instant,
    nodes: Iterable[NodeName],
    floors: Mapping[NodeName, int],
) -> Eviction | None:
    """Return the cheapest way to make room for a task or gang over its tenant's quota, and in that quota, by
    preempting runs of the tenant with strictly lower priority. None if there is none, or if the runs that are
    leaving free enough. `floors` are those of `Reservations.victim_floors`."""
    if not missing_mb or not may_preempt(offers, task):
        return None
    node_offers = []
    for node in sorted(nodes):
        floor = floors.get(node, NOTHING)
        candidates = (
            run
            for run in offers.rooms.leavers(node, task.priority)
            if run.task.tenant == task.tenant and run.task.priority >= floor
        )
        node_offers.append(offers.among(node, task.priority, candidates))
    eviction = choose_among(
        node_offers,
        offers.draft,
        task,
        now,
        gives_enough=lambda removed: leased_mb(removed, offers.draft) >= missing_mb,
    )
    assert not isinstance(eviction, RoomBeingFreed), "with no victim the quota is still short"
    return eviction


def make_room_in_limit(
    offers: Offers, task: Task, now: Instant, nodes: Iterable[NodeName]
) -> Eviction | RoomBeingFreed | None:
    """Return the cheapest way to make room for a critical task that lacks a custom resource of the cluster,
    or room in its pool, by preempting runs of strictly lower priority on these nodes that use it. None if
    that frees too little."""
    missing = _missing_of(offers, task)
    if missing is None:
        return None
    node_offers = [offers.of(node, task) for node in sorted(nodes)]

    def gives_enough(removed: Sequence[Candidate]) -> bool:
        return all(amount <= _used_of(name, removed) for name, amount in missing.items())

    if not gives_enough([candidate for offer in node_offers for candidate in offer.found]):
        return None
    return choose_among(node_offers, offers.draft, task, now, gives_enough=gives_enough)


def may_make_room_in_limit(offers: Offers, task: Task) -> bool:
    """Return True if runs of lower priority, protected or not, use enough of what the task lacks."""
    missing = _missing_of(offers, task)
    if missing is None:
        return False
    for run in offers.draft.active():
        if run.priority < task.priority:
            for name, amount in _given_back(run):
                if name in missing:
                    # Amounts are binary fractions: unrounded, three times 0.1 would be more than 0.3.
                    missing[name] = round(missing[name] - amount, 6)
    return all(amount <= 0 for amount in missing.values())


def _missing_of(offers: Offers, task: Task) -> dict[str, float] | None:
    """Return, for each resource that the task lacks, the amount that is missing once the runs that are
    leaving have left; None if no run may be stopped for the task."""
    draft, limits = offers.draft, offers.policy.custom_limits
    if not (preempts(task, offers.policy) and is_critical(task.priority)):
        return None
    short = draft.short_of(task, limits)
    asked, left = dict(task.demand.amounts), draft.left_of(task, limits)
    if any(name not in asked or left[name] == -inf for name in short):
        return None
    leaving = [run for run in draft.active() if run.state is TaskState.STOPPING]
    coming = [_sums(_given_back(run)) for run in leaving]
    return {
        name: round(asked[name] - left[name] - sum(amounts.get(name, 0.0) for amounts in coming), 6)
        for name in short
    }


def _used_of(name: str, removed: Iterable[Candidate]) -> float:
    """Return how much of the resource these victims give back. A gang that goes on gives back what its
    leaving ranks hold."""
    victims = list(removed)
    whole = {
        victim.task.id: _sums(_given_back(victim.task)).get(name, 0.0)
        for victim in victims
        if victim.rank is None
    }
    ranks = (
        dict(demand_of(victim.task, victim.rank).counted).get(name, 0.0)
        for victim in victims
        if victim.rank is not None and victim.task.id not in whole
    )
    return round(sum(whole.values()) + sum(ranks), 6)


def _given_back(run: Task) -> Iterator[tuple[str, float]]:
    """Yield the amounts that a run gives back to others: custom resources, and what it has of its pool. Its
    places under limits of running tasks do not count."""
    return ((name, amount) for name, amount in counted_by(run) if ":" not in name or name.startswith("pool:"))


def _sums(amounts: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, amount in amounts:
        sums[name] = sums.get(name, 0.0) + amount
    return sums


def _borrowers_on(
    offers: Offers,
    task: Task,
    surplus: Surplus,
    nodes: Iterable[NodeName],
    floors: Mapping[NodeName, int],
) -> Iterator[Offer]:
    """Yield what these nodes offer if only borrowers that must give back may be preempted."""
    for node in sorted(nodes):
        runs, floor = offers.rooms.possible_victims(node), floors.get(node, NOTHING)
        asked = [
            run
            for run in runs
            if run.task.tenant in surplus and run.task.priority >= floor and _may_be_asked(run, task, offers)
        ]
        yield offers.among(node, task.priority, asked)


def _may_be_asked(run: PossibleVictim, task: Task, offers: Offers) -> bool:
    """Return True if the borrower's run may be preempted for the task. A rank that its gang can do without is
    never protected, since no work is lost. Turn protection does not count, since borrowed memory is given
    back."""
    same_or_lower = band_of(run.task.priority)[2] <= band_of(task.priority)[2]
    is_alone = run.rank is not None
    spared = not is_alone and is_protected(run.task, task.priority, offers.policy, offers.began_at)
    return same_or_lower and not spared
