"""By what right tenants make room, and for which of their tasks that is known to be of no use."""

from collections.abc import Set
from dataclasses import replace
from math import inf

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.planning.backfill import Guards
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.guarantees import Claims, Surplus
from gpubroker_server.core.planning.memory import Denied, Memory, Right
from gpubroker_server.core.planning.quota import Quotas
from gpubroker_server.core.world.queue import Group, Kin


class Rights:
    """Of the tenants of one draft."""

    def __init__(
        self, draft: Draft, policy: Policy, memory: Memory, quotas: Quotas, claims: Claims, guards: Guards
    ) -> None:
        self._draft = draft
        self._policy = policy
        self._memory = memory
        self._quotas = quotas
        self._claims = claims
        self._guards = guards

    def has_none(self, group: Group) -> bool:
        """Whether their tenant would be above its quota and has nobody of its own to stop for them, or would
        borrow, and it was found that it may stop nobody who would help."""
        if not self._policy.has_quotas:
            return False
        denied = self._denied(group)
        if self._quotas.falls_short(group.tenant, group.demand, group.priority):
            is_known = denied is not None and self._is_as(denied, Right.DEBTOR, {})
            return is_known or not self._claims.may_yield(group.tenant, group.priority)
        if denied is None or denied.as_what != Right.BORROWER or self._memory.growth.revision != denied.grown:
            return False
        restraint = self._claims.restraint(group.tenant, group.demand, group.priority)
        return restraint is not None and self._is_as(denied, Right.BORROWER, restraint.surplus)

    def may_reclaim(self, group: Group) -> bool:
        """Whether such a task might take back from borrowers, and nobody has found that it cannot."""
        if not self._policy.has_quotas:
            return False
        surplus = self._claims.of_any(group.tenant, group.demand, group.priority)
        denied = self._denied(group)
        return bool(surplus) and (denied is None or not self._is_as(denied, Right.OWNER, surplus))

    def is_denied(
        self, task: Task, kin: Kin, as_what: Right, surplus: Surplus, closed: Set[NodeName]
    ) -> bool:
        """Whether it is known of this very task, to which these nodes are closed."""
        denied = self._memory.denied.get((task.tenant, task.priority, kin.demand))
        return denied is not None and denied.closed <= closed and self._is_as(denied, as_what, surplus)

    def deny(
        self,
        task: Task,
        kin: Kin,
        as_what: Right,
        surplus: Surplus,
        *,
        passing: bool,
        closed: frozenset[NodeName] = frozenset(),
    ) -> None:
        """Remember that it found nothing; `passing`: for a reason that any change may take away; `closed`: on
        other nodes than these."""
        likes = (task.tenant, task.priority, kin.demand)
        self._memory.denied[likes] = self._state(as_what, surplus, closed, passing=passing)

    def _denied(self, group: Group) -> Denied | None:
        """What is known of all of them."""
        denied = self._memory.denied.get(group.key[:3]) if self._memory.denied else None
        return denied if denied is None or denied.closed <= self._closed_to_all(group, denied) else None

    def _closed_to_all(self, group: Group, denied: Denied) -> Set[NodeName]:
        """No fewer nodes are closed to any other than would be to the first of them if nothing spared it."""
        if not denied.closed:
            return denied.closed
        first = self._draft.world.tasks[group.member(0)[1]]
        return self._guards.closed_to(first, replace(first, preemptions=0, submitted_at=Instant(inf)))

    def _is_as(self, denied: Denied, as_what: Right, surplus: Surplus) -> bool:
        return denied == self._state(as_what, surplus, denied.closed, passing=denied.changed > 0)

    def _state(
        self, as_what: Right, surplus: Surplus, closed: frozenset[NodeName], *, passing: bool
    ) -> Denied:
        changed = self._memory.changes.revision if passing else 0
        return Denied(as_what, self._memory.growth.revision, changed, tuple(sorted(surplus.items())), closed)
