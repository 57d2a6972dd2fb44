"""Which tasks wait for room, and which are the first to wait for a limit or a quota."""

from collections import Counter
from collections.abc import Iterable, Iterator

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.budget import ProbeBudget
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.queue_order import QueueOrder
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.queue import EquivalenceClass, QueueGroup

FIRST = 2
"""Forecasts for each limit or quota: when the first task starts, the next one already has its forecast."""

GROUPS_AT_A_TIME = 50
"""Budget of probes between two yields; a group costs less than one."""


def waiting(
    draft: Draft, policy: Policy, now: Instant, most: int, *, lines_too: bool = True
) -> Iterator[tuple[Task, frozenset[str]] | None]:
    """In queue order: the first `most` tasks that wait for room alone, and the first `FIRST` for each of
    `most` limits and quotas (`quota_line`), with their names. Tasks with pledges are left out. Yields None
    whenever the budget is spent."""
    world = draft.world
    are_lines = lines_too and (policy.has_quotas or bool(policy.custom_limits))
    lines = _FirstInLine(draft, policy, most, most if are_lines else 0)
    order = QueueOrder(world, policy, now, None, FairShares(world, policy, now))
    while not (lines.are_done or order.is_done):
        lines.budget.allow(GROUPS_AT_A_TIME)
        head = order.next(lines)
        if head is not None and head.task not in world.pledges:
            task = world.tasks[head.task]
            yield task, lines.let_in(task)
        elif lines.budget.calls_for_a_pause:
            yield None


def first_of_queue(draft: Draft, policy: Policy, now: Instant, most: int) -> Iterator[Task]:
    """Tasks that wait for room alone."""
    found = filter(None, waiting(draft, policy, now, most, lines_too=False))
    return (task for task, _ in found)


class _FirstInLine:
    """Refuses the groups without a task among the first."""

    def __init__(self, draft: Draft, policy: Policy, most: int, most_lines: int) -> None:
        self.budget = ProbeBudget(may_pause=True)
        self._draft = draft
        self._policy = policy
        self._quotas = Quotas(draft, policy)
        self._left = most
        """Tasks still to be found that wait for room alone."""
        self._lines_left = most_lines
        """Limits and quotas still to be found."""
        self._waiting: Counter[str] = Counter()
        """Limit or quota -> tasks found so far."""

    @property
    def are_done(self) -> bool:
        is_next_known = all(count >= FIRST for count in self._waiting.values())
        return not (self._left or self._lines_left) and is_next_known

    def let_in(self, task: Task) -> frozenset[str]:
        """The limits and quotas for which it is among the first; none if it waits for room alone."""
        awaited = set(self._draft.short_of(task, self._policy.custom_limits))
        if self._quotas.is_short(task):
            awaited.add(quota_line(task.tenant))
        if not awaited:
            self._left -= 1
        elif not awaited <= self._waiting.keys():
            self._lines_left = max(0, self._lines_left - 1)
        first_in = frozenset(name for name in awaited if self._waiting[name] < FIRST)
        self._waiting.update(awaited)
        return first_in

    def inadmissible(self, kins: Iterable[EquivalenceClass], band: int) -> Iterable[EquivalenceClass]:  # noqa: ARG002
        return ()  # each group may be the first to wait for a limit

    def is_refused(self, group: QueueGroup) -> bool:
        if self._is_short(group):  # it waits for its quota even with room
            return not self._may_wait({quota_line(group.tenant)})
        awaited: set[str] = set()
        if group.demand.counted:
            probe = self._draft.world.tasks[group.member(0)[1]]
            awaited.update(self._draft.short_of(probe, self._policy.custom_limits))
        return not (self._may_wait(awaited) if awaited else self._left)

    def _is_short(self, group: QueueGroup) -> bool:
        return self._quotas.is_short_for(group.tenant, group.demand, group.priority)

    def _may_wait(self, awaited: set[str]) -> bool:
        """Whether a task that awaits these may be among the first."""
        if self._lines_left > 0 and not awaited <= self._waiting.keys():
            return True
        return any(0 < self._waiting[name] < FIRST for name in awaited)


def quota_line(tenant: str) -> str:
    """The name under which tasks wait for the tenant's quota."""
    return f"quota:{tenant}"
