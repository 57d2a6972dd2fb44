"""The first tasks that wait for room, and the first that wait for each limit or quota."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from math import inf

from gpubroker_server.core.domain.policy import BANDS, Policy, band_of
from gpubroker_server.core.domain.ranks import needs_gpus
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.queue_order import Head, QueueOrder
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.queue import EquivalenceClass, OrderKey, QueueGroup

FIRST = 2
"""The number of forecasts for each limit or quota. It is 2, so that the next task already has its forecast
when the first one starts."""

EqualSharesKey = tuple[int, int, int, float, float, TaskId]
"""A task's place in the queue if all tenants had used their shares equally: `OrderKey` without its third
entry."""

GROUPS_AT_A_TIME = 50
"""The budget of probes between two yields. A group costs less than one probe."""


def waiting(
    draft: Draft, policy: Policy, now: Instant, most: int, *, lines_too: bool = True
) -> Iterator[tuple[Task, frozenset[str]] | None]:
    """Yield the first waiting tasks in queue order, each with the limits and quotas for which it waits among
    the first. Yield None between steps of the search.

    These are the first `most` tasks that wait for room alone, and the first `FIRST` tasks for each of `most`
    limits and quotas (`quota_line`). The tasks that `_passed_over` returns come before later tasks that are
    ahead of them by their tenants' shares alone. Tasks with pledges are left out.
    """
    world, shares = draft.world, FairShares(draft.world, policy, now)
    are_lines = lines_too and (policy.has_quotas or bool(policy.custom_limits))
    lines = _FirstInLine(draft, policy, most, most if are_lines else 0)
    passed_over: list[EqualSharesKey] = []
    if lines_too:
        passed_over = yield from _passed_over(draft, policy, now, shares)
    named: set[TaskId] = set()
    order = QueueOrder(world, policy, now, None, shares)
    while not lines.are_done:
        head = yield from _next_in(order, lines)
        if head is None:
            return
        names = [head.task]
        while passed_over and _comes_before(passed_over[-1], head.key):
            names.insert(-1, passed_over.pop()[-1])
        for name in names:
            is_left_out = name in named or name in world.pledges or name not in world.queue
            if not (is_left_out or lines.is_refused(world.queue.group_of(name))):
                task = world.tasks[name]
                named.add(name)
                yield task, lines.let_in(task)


def _passed_over(
    draft: Draft, policy: Policy, now: Instant, shares: FairShares
) -> Generator[None, None, list[EqualSharesKey]]:
    """Return the places, last first, of tasks that have aged to the top of their band while later tasks of
    their own tenant run.

    The later tasks use the tenant's share, which puts the earlier task behind those of other tenants, so that
    it may never be among the first to wait. Of several tasks that count against one set of limits and quotas,
    only the first at equal shares is returned.
    """
    if shares.has_one_tenant:
        return []
    world, newest = draft.world, _newest_runs(draft)
    overtaken: list[tuple[EqualSharesKey, QueueGroup]] = []
    for number, group in enumerate([*world.queue.groups.values()], start=1):
        if number % GROUPS_AT_A_TIME == 0:
            yield
        account = group.tenant, band_of(group.standing)[2]
        if len(group) and not group.demand.answered_by and newest.get(account, -inf) > group.member(0)[0]:
            own_order = group.order_within_tenant(group.member(0), now, policy)
            if own_order[0] == own_order[1]:
                overtaken.append(((own_order[0], shares.rank(group.tenant)[0], *own_order[1:]), group))
    first: dict[tuple[str, ...], EqualSharesKey] = {}
    for key, group in sorted(overtaken, key=lambda item: item[0]):
        names = [name for name, _ in group.demand.counted]
        if policy.tenant(group.tenant).guaranteed_mb is not None and needs_gpus(group.demand):
            names.append(quota_line(group.tenant))
        first.setdefault(tuple(names), key)
    return [*first.values()][::-1]


def _comes_before(passed_over: EqualSharesKey, other: OrderKey) -> bool:
    """Return True if the other task came later, and is ahead at most by its tenant's share."""
    return passed_over < (*other[:2], *other[3:]) and passed_over[-2] < other[-2]


def _newest_runs(draft: Draft) -> dict[tuple[str, int], float]:
    """Return, by tenant and band, the instant before which a task must have been queued for a run to have
    overtaken it. That is when the newest run of the band was queued, or the newest run of a lower band was
    admitted."""
    newest: dict[tuple[str, int], float] = {}
    for run in draft.active():
        own_top = band_of(run.priority)[2]
        for _, _, top in BANDS:
            at = run.queued_at if top == own_top else run.admitted_at
            if top >= own_top and at is not None:
                newest[run.tenant, top] = max(at, newest.get((run.tenant, top), at))
    return newest


def _next_in(order: QueueOrder, lines: "_FirstInLine") -> Generator[None, None, Head | None]:
    """Return the next task of the queue, and yield whenever GROUPS_AT_A_TIME probes were spent on it."""
    steps, spent = order.next(lines), 0.0
    while True:
        try:
            spent += next(steps)
        except StopIteration as end:
            head: Head | None = end.value
            return head
        if spent >= GROUPS_AT_A_TIME:
            yield
            spent = 0.0


def first_of_queue(draft: Draft, policy: Policy, now: Instant, most: int) -> Iterator[Task]:
    """Return an iterator over the first `most` tasks that wait for room alone."""
    waiting_tasks = filter(None, waiting(draft, policy, now, most, lines_too=False))
    return (task for task, _ in waiting_tasks)


class _FirstInLine:
    """An admission filter that refuses the groups without a task among the first to wait."""

    def __init__(self, draft: Draft, policy: Policy, most: int, most_lines: int) -> None:
        self._draft = draft
        self._policy = policy
        self._quotas = Quotas(draft, policy)
        self._left = most
        """The number of tasks still to be found that wait for room alone."""
        self._lines_left = most_lines
        """The number of limits and quotas still to be found."""
        self._waiting: Counter[str] = Counter()
        """Maps a limit or quota to the number of waiting tasks found so far."""

    @property
    def are_done(self) -> bool:
        is_next_known = all(count >= FIRST for count in self._waiting.values())
        return not (self._left or self._lines_left) and is_next_known

    def let_in(self, task: Task) -> frozenset[str]:
        """Count the task, and return the limits and quotas for which it is among the first to wait; empty if
        it waits for room alone."""
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

    def inadmissible(self, classes: Iterable[EquivalenceClass], band: int) -> Sequence[EquivalenceClass]:  # noqa: ARG002
        return ()  # each group may be the first to wait for a limit

    def is_refused_in(self, equivalence: EquivalenceClass, band: int) -> bool:  # noqa: ARG002
        return False  # a group that is refused now may be let in once another task waits for its limit

    def is_refused(self, group: QueueGroup) -> bool:
        if self._is_short(group):  # the group waits for its quota, even if there is room
            return not self._may_wait({quota_line(group.tenant)})
        awaited: set[str] = set()
        if group.demand.counted:
            probe = self._draft.world.tasks[group.member(0)[1]]
            awaited.update(self._draft.short_of(probe, self._policy.custom_limits))
        return not (self._may_wait(awaited) if awaited else self._left)

    def _is_short(self, group: QueueGroup) -> bool:
        return self._quotas.is_short_for(group.tenant, group.demand, group.priority)

    def _may_wait(self, awaited: set[str]) -> bool:
        """Return True if a task that waits for these limits and quotas may be among the first."""
        if self._lines_left > 0 and not awaited <= self._waiting.keys():
            return True
        return any(0 < self._waiting[name] < FIRST for name in awaited)


def quota_line(tenant: str) -> str:
    """Return the name under which tasks wait for the tenant's quota."""
    return f"quota:{tenant}"
