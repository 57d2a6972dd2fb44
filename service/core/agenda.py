"""The tasks of one cycle in the order of the queue, without touching more of them than are examined."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from service.core.demand import Demand
from service.core.ordering import Group, OrderKey, order_key
from service.core.policy import Policy
from service.core.task import Task
from service.core.units import Instant, TaskId
from service.core.world import World


class Head(NamedTuple):
    """The next task of a group, or (without a group) one that stands for itself. `key` is unique."""

    key: OrderKey
    task: TaskId
    group: Group | None
    at: int


class Agenda:
    """A k-way merge over the heads of the groups, from a place in the order onwards.

    A demand that was refused is left out for the rest of the cycle, at the same and at lower priorities:
    looking again would find no more room. Tasks that have pledges stand for themselves, because what is
    kept for them is kept from their likes.
    """

    def __init__(
        self,
        world: World,
        policy: Policy,
        ordered_at: Instant,
        after: OrderKey | None,
        refused: Mapping[Demand, int],
    ) -> None:
        self.refused = dict(refused)
        """Demand -> highest priority at which it was refused."""
        self._policy = policy
        self._ordered_at = ordered_at
        self._pledged = frozenset(task for task in world.pledges if task in world.queue)
        self._heads: list[Head] = []
        for group in world.queue.groups.values():
            self._push(group, 0 if after is None else group.count_until(after, ordered_at, policy))
        for name in self._pledged:
            task = world.tasks[name]
            key = order_key(task.priority, task.submitted_at, name, ordered_at, policy)
            if after is None or key > after:
                self._heads.append(Head(key, name, None, 0))
        heapify(self._heads)

    def next(self) -> Head | None:
        """The next task to examine; None at the end."""
        while self._heads:
            head = heappop(self._heads)
            if head.group is None:
                return head
            if not self.has_refused(head.group.demand, head.group.priority):
                self._push(head.group, head.at + 1)
                return head
        return None

    def refuse(self, task: Task) -> None:
        """There is no room for it now, nor for its likes."""
        known = self.refused.get(task.demand, -1)
        self.refused[task.demand] = max(known, task.priority)

    def has_refused(self, demand: Demand, priority: int) -> bool:
        return priority <= self.refused.get(demand, -1)

    def _push(self, group: Group, at: int) -> None:
        """Let in the member at this place, or the next one that does not stand for itself."""
        while at < len(group):
            submitted_at, task = group.member(at)
            if task not in self._pledged:
                key = order_key(group.priority, Instant(submitted_at), task, self._ordered_at, self._policy)
                heappush(self._heads, Head(key, task, group, at))
                return
            at += 1
