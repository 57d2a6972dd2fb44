"""What a tenant below its guarantee may take back from those of its cohort that borrow."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from service.core.demand import Demand
from service.core.draft import Draft
from service.core.gang_eviction import Coming, choose_among, gang_may_preempt
from service.core.offers import Offer, Offers
from service.core.policy import Policy, band_of
from service.core.preemption import Eviction, best_of, eviction_of
from service.core.quota import NOBODY, Quotas
from service.core.task import Task
from service.core.units import Instant, NodeName, TaskId
from service.core.victims import Candidate, Stoppable, is_spared, named

Surplus = Mapping[str, int]
"""Borrower -> MiB beyond its guarantee that are not leaving yet."""


class Claims:
    """Of the tenants of one draft."""

    def __init__(self, draft: Draft, policy: Policy, quotas: Quotas) -> None:
        self._draft = draft
        self._policy = policy
        self._quotas = quotas
        self._revision = -1
        self._surplus: dict[str, dict[str, int]] = {}

    def surplus(self, tenant: str) -> Surplus:
        """Of those from whom this tenant could take back, were it below its guarantee."""
        cohort = self._policy.tenant(tenant).cohort
        if not cohort:
            return {}
        if self._revision != self._draft.changes.revision:
            self._revision = self._draft.changes.revision
            self._surplus = self._measure()
        found = self._surplus.get(cohort, {})
        return {name: mb for name, mb in found.items() if name != tenant}

    def of(self, task: Task) -> Surplus:
        """From whom this task may take back, and how much; empty if its tenant has what it is guaranteed, or
        would have more with this task, or if nobody borrows."""
        return self.of_any(task.tenant, task.demand, task.priority, task.id)

    def of_any(self, tenant: str, demand: Demand, priority: int, task: TaskId = NOBODY) -> Surplus:
        """The same for a task that is not named, or has no pledges."""
        if not (self._policy.has_quotas and (demand.gpus or demand.bundles)):
            return {}
        allowance = self._quotas.of(tenant, priority, task)
        if allowance is None:
            return {}
        if allowance.claimed_mb + self._quotas.need_mb(demand) > allowance.guaranteed_mb:
            return {}
        return self.surplus(tenant)

    def _measure(self) -> dict[str, dict[str, int]]:
        accounts = self._draft.world.accounts
        held = {tenant: accounts.held_mb(tenant) for tenant in accounts}
        for tenant, mb in self._draft.given():
            held[tenant] = held.get(tenant, 0) + mb
        for tenant, mb in self._draft.leaving():
            held[tenant] = held.get(tenant, 0) - mb
        found: dict[str, dict[str, int]] = {}
        for tenant, mb in held.items():
            whose = self._policy.tenant(tenant)
            if whose.guaranteed_mb is not None and mb > whose.guaranteed_mb:
                found.setdefault(whose.cohort, {})[tenant] = mb - whose.guaranteed_mb
        return found


def reclaim(
    offers: Offers, task: Task, surplus: Surplus, now: Instant, nodes: Iterable[NodeName]
) -> Eviction | None:
    """The cheapest way to room for a task by stopping borrowers on these nodes; None if there is none.

    Borrowers of the same band or a lower one may be stopped, whatever their priority, but for what spares
    any run; and none so that it is left with less than it is guaranteed. What they free is kept from the
    whole band, or they would take it again before the task can start.
    """
    best = None
    for offer in _borrowers_on(offers, task, surplus, nodes):
        if offer.found:
            best = best_of(offer, task, best, lambda gone: _leaves_guarantees(gone, surplus, offers.draft))
    if best is None:
        return None
    return replace(eviction_of(best, offers.draft, now), kept_up_to=band_of(task.priority)[2])


def reclaim_for_gang(
    offers: Offers, task: Task, surplus: Surplus, now: Instant, nodes: Iterable[NodeName]
) -> Eviction | Coming | None:
    """The same for a gang, on all these nodes at once, of the cheapest borrowers that may leave together."""

    def may_leave(found: list[Candidate]) -> list[Candidate]:
        taken: list[Candidate] = []
        for candidate in found:
            if _leaves_guarantees([*taken, candidate], surplus, offers.draft):
                taken.append(candidate)
        return taken

    if not gang_may_preempt(offers, task):
        return None
    there = list(_borrowers_on(offers, task, surplus, nodes))
    way = choose_among(there, may_leave, offers.draft, task, now)
    return replace(way, kept_up_to=band_of(task.priority)[2]) if isinstance(way, Eviction) else way


def _borrowers_on(offers: Offers, task: Task, surplus: Surplus, nodes: Iterable[NodeName]) -> Iterator[Offer]:
    """What the nodes offer if just those of their runs may be stopped that are asked to give back."""
    for node in sorted(nodes):
        runs = offers.stoppable(node)
        asked = [run for run in runs if run.task.tenant in surplus and _may_be_asked(run, task, offers)]
        yield offers.among(node, task.priority, asked)


def _may_be_asked(run: Stoppable, task: Task, offers: Offers) -> bool:
    """Nothing spares a rank that its gang can do without: no work is lost."""
    same_or_lower = band_of(run.task.priority)[2] <= band_of(task.priority)[2]
    is_alone = run.rank is not None
    spared = not is_alone and is_spared(run.task, task.priority, offers.policy, offers.began_at)
    return same_or_lower and not spared


def _leaves_guarantees(gone: Sequence[Candidate], surplus: Surplus, draft: Draft) -> bool:
    taken: dict[str, int] = {}
    tasks, ranks = named(gone)
    for task in tasks:
        leaving = ranks.get(task.id)
        leases = draft.world.leases_of(task)
        leased = sum(lease.mb for lease in leases if leaving is None or lease.rank in leaving)
        taken[task.tenant] = taken.get(task.tenant, 0) + leased
    return all(mb <= surplus[tenant] for tenant, mb in taken.items())
