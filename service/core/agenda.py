"""The tasks of one cycle in the order of the queue, without touching more of them than are examined."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from service.core.fairness import Shares
from service.core.ordering import Group, GroupKey, Member, OrderKey, OwnKey, order_key, own_key
from service.core.policy import BANDS, Policy
from service.core.task import Task
from service.core.units import Instant, TaskId
from service.core.world import World


class Doubts(Protocol):
    """What is known of a group before anybody looks for it."""

    def is_refused(self, group: Group) -> bool:
        """There is nothing for its tasks."""
        ...

    def has_nothing(self, group: Group) -> bool:
        """There is nothing for its tasks, nor for their likes of lower priority."""
        ...


NOBODY: OwnKey = (-101, 0, 0.0, 0.0, TaskId(""))
"""A place before all tasks."""

Siblings = Mapping[GroupKey, Group]
"""The groups of one demand in one band."""


class Head(NamedTuple):
    """The next task of a group, or (without a group) one that stands for itself. `key` is unique."""

    key: OrderKey
    task: TaskId
    group: Group | None


class Agenda:
    """A k-way merge over the heads of the groups, band by band, from a place in the order onwards.

    Groups for which there is known to be nothing are left out, until `wake`. Tasks that have pledges stand
    for themselves, because what is kept for them is kept from their likes.
    """

    def __init__(
        self, world: World, policy: Policy, ordered_at: Instant, after: OrderKey | None, shares: Shares
    ) -> None:
        self.shares = shares
        self._world = world
        self._policy = policy
        self._ordered_at = ordered_at
        self._after = after
        self._arrivals = world.queue.arrivals
        self._pledged = frozenset(task for task in world.pledges if task in world.queue)
        self._asleep: list[Group] = []
        self._asleep_together: list[Siblings] = []
        self._heads: list[Head] = []
        self._bands = [top for _, _, top in reversed(BANDS) if after is None or -top >= after[0]]
        """The tops of the bands whose tasks are not in yet, the highest last."""

    def goes_on(self, world: World, ordered_at: Instant, after: OrderKey | None, shares: Shares) -> bool:
        """Whether this is the agenda of the rest of that cycle. Who has come meanwhile is not in it."""
        mine = (self._world, self._arrivals, self._ordered_at, self._after)
        return mine == (world, world.queue.arrivals, ordered_at, after) and self.shares.is_as(shares)

    def next(self, doubts: Doubts) -> Head | None:
        """The next task to examine; None at the end."""
        while True:
            while self._heads:
                head = heappop(self._heads)
                group = head.group
                if not self.shares.is_even and self._was_overtaken(head):
                    continue
                if group is None:
                    if head.task in self._world.queue:
                        self._after = head.key
                        return head
                elif doubts.is_refused(group):
                    self._asleep.append(group)
                else:
                    self._push(group, group.after(head.key[-2:]))
                    if self._world.queue.holds(head.task, group):
                        self._after = head.key
                        return head
            if not self._bands:
                return None
            self._enter_band(self._bands.pop(), doubts)

    def charge(self, task: Task, mb: int) -> None:
        """The task that is examined was given so much: its tenant's other tasks may have to stand back."""
        if not self.shares.is_even:
            self.shares.charge(task.tenant, mb, self._own_key(task))

    def _was_overtaken(self, head: Head) -> bool:
        """Whether its tenant was given something since it came in; then it stands back."""
        task = self._world.tasks.get(head.task)
        tenant = head.group.tenant if head.group else "" if task is None else task.tenant
        rank = self.shares.rank(tenant)
        if head.key[1:3] == rank:
            return False
        heappush(self._heads, head._replace(key=(head.key[0], *rank, *head.key[3:])))
        return True

    def wake(self, doubts: Doubts) -> None:
        """Let in again those who were left out, from here on, for whom there may be something now."""
        asleep, self._asleep = self._asleep, []
        together, self._asleep_together = self._asleep_together, []
        for siblings in together:
            self._enter_together(siblings, doubts)
        for group in asleep:
            self._enter(group, doubts)

    def _enter_band(self, top: int, doubts: Doubts) -> None:
        for kin in self._world.queue.kin.values():
            if top in kin.bands:
                self._enter_together(kin.bands[top], doubts)
        for name in self._pledged:
            task = self._world.tasks.get(name)
            if task is not None:
                own = self._own_key(task)
                key = order_key(own, self.shares.rank(task.tenant))
                passed = self._after is not None and key <= self._after
                if own[0] == -top and not passed and own > self.shares.passed.get(task.tenant, NOBODY):
                    self._heads.append(Head(key, name, None))
        heapify(self._heads)

    def _enter_together(self, siblings: Siblings, doubts: Doubts) -> None:
        """Where there is no room for the most urgent of them, there is none for the others."""
        if not siblings:
            return
        if doubts.has_nothing(max(siblings.values(), key=_priority)):
            self._asleep_together.append(siblings)
            return
        for group in siblings.values():
            self._enter(group, doubts)

    def _enter(self, group: Group, doubts: Doubts) -> None:
        if not group:
            return
        if doubts.is_refused(group):
            self._asleep.append(group)
            return
        passed = 0
        if self._after is not None:
            rank = self.shares.rank(group.tenant)
            passed = group.count_until(self._after, rank, self._ordered_at, self._policy)
            own = self.shares.passed.get(group.tenant)
            if own is not None:
                passed = max(passed, group.count_own(own, self._ordered_at, self._policy))
        if passed < len(group):
            self._push(group, group.member(passed))

    def _push(self, group: Group, member: Member | None) -> None:
        """Let in this member, or the next one that does not stand for itself."""
        while member is not None and member[1] in self._pledged:
            member = group.after(member)
        if member is not None:
            own = group.own_key(member, self._ordered_at, self._policy)
            heappush(self._heads, Head(order_key(own, self.shares.rank(group.tenant)), member[1], group))

    def _own_key(self, task: Task) -> OwnKey:
        return own_key(task.priority, task.stream, task.submitted_at, task.id, self._ordered_at, self._policy)


def _priority(group: Group) -> int:
    return group.priority
