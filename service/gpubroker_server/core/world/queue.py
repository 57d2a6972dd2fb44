"""The queue and its order: pending tasks in groups of equal demands, each in order of submission."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from math import inf

from gpubroker_server.core.domain.decisions import QueuePause
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import Model, WorkerSeat
from gpubroker_server.core.domain.policy import Policy, aged_priority, band_of
from gpubroker_server.core.domain.task import StopReason, Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.world.due_times import DueTimes

GroupKey = tuple[str, int, Demand, str, int]
"""The tenant, priority, demand, work stream and effective priority of the tasks of a group, which differ in
age only. The effective priority is the tasks' own, or a higher one that they inherit."""

Member = tuple[float, TaskId]
"""The instant at which a task was queued, and the task."""

Rank = tuple[int, int]
"""A tenant's place within a band: 0 if the tenant is below its guarantee, else 1; and the steps of its fair
share that it has used."""

EARLY_SECONDS = 0.001
"""The time by which a key is computed again before its task gets another point of age, so that rounding makes
no key too old."""

EVEN: Rank = (0, 0)
"""The rank of every tenant where tenants are not ranked."""

TenantOrderKey = tuple[int, int, float, float, TaskId]

OrderKey = tuple[int, int, int, int, float, float, TaskId]
"""A task's place in the queue: smallest first, never equal to another's."""


def order_within_tenant(
    standing: int, weight: float, submitted_at: Instant, task: TaskId, now: Instant, policy: Policy
) -> TenantOrderKey:
    """Return the task's place among the tasks of its tenant, smallest first.

    The order is total, so that no plan depends on chance. The first of these that differs decides:

    1. the higher band
    2. the higher aged priority
    3. the heavier work stream (`weight`), except at the top of the band, where a lighter stream would starve
    4. the earlier time of submission
    5. the smaller id
    """
    top = band_of(standing)[2]
    points = aged_priority(standing, now - submitted_at, policy.ageing_seconds_per_point)
    return (-top, -points, 0.0 if points == top else -weight, submitted_at, task)


def order_key(own: TenantOrderKey, rank: Rank) -> OrderKey:
    """Return the order key among all tasks: the tenant's rank comes right after the band."""
    return (own[0], *rank, *own[1:])


def reserves_before(first: OrderKey, other: OrderKey) -> bool:
    """Return True if a reservation of the first task binds the other one.

    It does if the first task is ahead, or if it has aged to the top of its band and would be ahead at equal
    shares. Without the second rule, small tasks of a tenant whose share stays small would take the room that
    a large task of another tenant needs, again and again.
    """
    is_aged = first[3] == first[0]
    return first < other or (is_aged and (*first[:2], *first[3:]) < (*other[:2], *other[3:]))


class EquivalenceClass:
    """The groups of pending tasks with one demand. Equivalence classes compare by identity."""

    __slots__ = ("bands", "demand", "highest")

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.bands: dict[int, dict[int, dict[GroupKey, QueueGroup]]] = {}
        """Maps the top of a band to a map from priority to groups. No map and no group is empty."""
        self.highest: dict[int, int] = {}
        """Maps the top of a band to the highest priority of its groups."""

    def most_urgent_of(self, top: int) -> "QueueGroup":
        """Return a group of the highest priority in a band that has groups."""
        return next(iter(self.bands[top][self.highest[top]].values()))

    def put(self, group: "QueueGroup") -> None:
        top = band_of(group.standing)[2]
        self.bands.setdefault(top, {}).setdefault(group.priority, {})[group.key] = group
        self.highest[top] = max(group.priority, self.highest.get(top, -1))

    def drop(self, group: "QueueGroup") -> None:
        top = band_of(group.standing)[2]
        same_priority = self.bands[top][group.priority]
        del same_priority[group.key]
        if not same_priority:
            del self.bands[top][group.priority]
        if self.bands[top]:
            self.highest[top] = max(self.bands[top])
        else:
            del self.bands[top], self.highest[top]


class QueueGroup:
    """The pending tasks of one key in order of submission. Removal at the head is the common case, and is
    cheap."""

    __slots__ = ("_first", "_members", "_ordered", "_weight", "equivalence", "key")

    def __init__(
        self, key: GroupKey, equivalence: EquivalenceClass | None = None, weight: float | None = None
    ) -> None:
        """`weight` is the weight of the group's work stream, if it differs from the weight in the policy."""
        self.key = key
        self._weight = weight
        self.equivalence = EquivalenceClass(key[2]) if equivalence is None else equivalence
        self._members: list[Member] = []
        self._first = 0
        self._ordered: tuple[Member, Instant, float, Policy, TenantOrderKey] | None = None
        """The newest answer of `order_within_tenant`, with the instants from which and before which it
        holds. Each cycle asks for the key of one member, which a point of age changes once a minute."""

    @property
    def tenant(self) -> str:
        return self.key[0]

    @property
    def priority(self) -> int:
        return self.key[1]

    @property
    def demand(self) -> Demand:
        return self.key[2]

    @property
    def standing(self) -> int:
        return self.key[4]

    def __len__(self) -> int:
        return len(self._members) - self._first

    def member(self, index: int) -> Member:
        return self._members[self._first + index]

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members[self._first :])

    def first_order(self, now: Instant, policy: Policy) -> TenantOrderKey:
        """Return the order of the group's first member within its tenant. The group is not empty."""
        return self.order_within_tenant(self._members[self._first], now, policy)

    def order_within_tenant(self, member: Member, now: Instant, policy: Policy) -> TenantOrderKey:
        newest = self._ordered
        if newest and newest[0] == member and newest[1] <= now < newest[2] and newest[3] is policy:
            return newest[4]
        key = self._key_of(member, now, policy)
        self._ordered = member, now, self._ages_at(key, policy), policy, key
        return key

    def _ages_at(self, key: TenantOrderKey, policy: Policy) -> float:
        """Return when the task with this key gets another point of age, early rather than late; infinite if
        never."""
        if key[0] == key[1]:
            return inf
        points = 1 - key[1] - self.standing
        return key[3] + points * policy.ageing_seconds_per_point - EARLY_SECONDS

    def _key_of(self, member: Member, now: Instant, policy: Policy) -> TenantOrderKey:
        submitted_at, task = member
        weight = policy.weight_of(self.key[3]) if self._weight is None else self._weight
        return order_within_tenant(self.key[4], weight, Instant(submitted_at), task, now, policy)

    def weigh(self, weight: float | None) -> None:
        self._weight = weight
        self._ordered = None

    def count_until(self, key: OrderKey, rank: Rank, now: Instant, policy: Policy) -> int:
        """Return how many members are at or before this place of the queue, given their tenant's rank."""
        own_rank = (-band_of(self.standing)[2], *rank)
        if key[:3] != own_rank:
            return 0 if key[:3] < own_rank else len(self)
        return self.count_own((key[0], *key[3:]), now, policy)

    def count_own(self, key: TenantOrderKey, now: Instant, policy: Policy) -> int:
        """Return how many members are at or before this place among their tenant's tasks.

        Members of a group are in submission order, so a binary search finds the place. The first and the last
        member are compared before, because in most groups all members are before the place, or none.
        """
        members, first = self._members, self._first
        if not len(self) or key < self.order_within_tenant(members[first], now, policy):
            return 0
        if self._key_of(members[-1], now, policy) <= key:
            return len(self)
        return (
            bisect_right(members, key, lo=first, key=lambda member: self._key_of(member, now, policy)) - first
        )

    def after(self, member: Member) -> Member | None:
        """Return the next member after `member`, which may itself have left the group."""
        index = bisect_right(self._members, member, lo=self._first)
        return self._members[index] if index < len(self._members) else None

    def add(self, member: Member) -> None:
        if not self._members or member > self._members[-1]:
            self._members.append(member)
        else:
            insort(self._members, member, lo=self._first)

    def remove(self, member: Member) -> None:
        index = bisect_left(self._members, member, lo=self._first)
        if index == self._first:
            self._first += 1
            # Removed heads are dropped once they are half of the list, so that on average a removal costs the
            # same however long the queue is.
            if self._first > 64 and self._first * 2 > len(self._members):
                del self._members[: self._first]
                self._first = 0
        else:
            del self._members[index]


class PendingQueue:
    """All pending tasks that may be planned, in groups. Held, delayed, dependent and paused tasks are kept
    apart from the groups."""

    def __init__(self, inherited: Mapping[TaskId, int]) -> None:
        """`inherited` maps a task or an array to the highest priority of its dependents."""
        self._inherited = inherited
        self.groups: dict[GroupKey, QueueGroup] = {}
        self.classes: dict[Demand, EquivalenceClass] = {}
        self.tenants: Counter[str] = Counter()
        self.delayed = DueTimes()
        self.held: set[TaskId] = set()
        self.awaiting: set[TaskId] = set()
        self.pauses: dict[str, QueuePause] = {}
        """Maps a queue to its pause. Only `set_pause` changes it."""
        self.paused: set[TaskId] = set()
        """The tasks that only a pause keeps out of the groups."""
        self.stream_weights: dict[str, float] = {}
        """Maps a work stream to the weight that fleet control gives it; the policy has the weights of other
        streams. Only `weigh` changes it."""
        self._where: dict[TaskId, GroupKey] = {}

    def __len__(self) -> int:
        outside = (self.delayed, self.held, self.awaiting, self.paused)
        return len(self._where) + sum(map(len, outside))

    def __contains__(self, task: TaskId) -> bool:
        return task in self._where

    def add(self, task: Task) -> None:
        if task.held:
            self.held.add(task.id)
        elif task.awaits:
            self.awaiting.add(task.id)
        elif task.not_before is not None:
            self.delayed[task.id] = task.not_before
        else:
            self._let_in(task)

    def pause_of(self, task: Task) -> QueuePause | None:
        """Return the pause that keeps the task from starting; None without one. No pause holds up a run that
        is moved, or a model, which is loaded for requests that stand in no queue."""
        if not self.pauses or isinstance(task.holder, Model) or task.stop_reason is StopReason.MOVE:
            return None
        return self.pauses.get(f"tenant:{task.tenant}") or self.pauses.get(f"stream:{task.stream}")

    def set_pause(self, queue: str, pause: QueuePause | None, tasks: Mapping[TaskId, Task]) -> None:
        """Pause a queue, or with None resume it. Tasks that are now paused leave the groups, and tasks that
        are no longer paused enter them."""
        if pause is None:
            self.pauses.pop(queue, None)
        else:
            self.pauses[queue] = pause
        for name in [*self._where, *self.paused]:
            task = tasks[name]
            if (self.pause_of(task) is not None) is not (name in self.paused):
                self.remove(task)
                self._let_in(task)

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Order the tasks of work streams by these weights. This costs nothing if no weight has changed."""
        if weights == self.stream_weights:
            return
        self.stream_weights = dict(weights)
        for group in self.groups.values():
            if group.key[3]:
                group.weigh(weights.get(group.key[3]))

    def order_within_tenant(self, task: Task, now: Instant, policy: Policy) -> TenantOrderKey:
        weight = self.stream_weights.get(task.stream)
        weight = policy.weight_of(task.stream) if weight is None else weight
        standing = self.effective_priority_of(task)
        return order_within_tenant(standing, weight, task.queued_at, task.id, now, policy)

    def count_until(self, key: OrderKey, rank: Callable[[str], Rank], now: Instant, policy: Policy) -> int:
        """Return how many tasks are at or before this place, given the ranks of tenants."""
        ranks, count = {tenant: rank(tenant) for tenant in self.tenants}, 0
        first, own_order = key[:3], (key[0], *key[3:])
        for (tenant, _, _, _, standing), group in self.groups.items():
            place = (-band_of(standing)[2], *ranks[tenant])
            if place < first:
                count += len(group)
            elif place == first:
                count += group.count_own(own_order, now, policy)
        return count

    def of_tenant(self, tenant: str | None, now: Instant, policy: Policy) -> Iterator[TaskId]:
        """Return an iterator over the tenant's tasks in their order; with None over those of all tenants,
        with each tenant's tasks in their order. The cost is one step per group and one per task that is
        taken."""

        def keys(group: QueueGroup) -> Iterator[TenantOrderKey]:
            return (group.order_within_tenant(member, now, policy) for member in group)

        groups = (group for group in self.groups.values() if tenant in (None, group.tenant))
        return (key[-1] for key in merge(*map(keys, groups)))

    def holds(self, task: TaskId, group: QueueGroup) -> bool:
        return self._where.get(task) == group.key

    def effective_priority_of(self, task: Task) -> int:
        """Return the task's priority in the queue: its own, or an inherited one."""
        name = task.id
        match task.holder:
            case WorkerSeat(array):
                name = array
            case _:
                pass
        return max(task.priority, self._inherited[name]) if name in self._inherited else task.priority

    def group_of(self, task: TaskId) -> QueueGroup:
        """Return the group of a task that may be planned now. Raises KeyError for any other task."""
        return self.groups[self._where[task]]

    def remove(self, task: Task) -> None:
        self.held.discard(task.id)
        self.awaiting.discard(task.id)
        self.paused.discard(task.id)
        self.delayed.pop(task.id, None)
        key = self._where.pop(task.id, None)
        if key is not None:
            group = self.groups[key]
            group.remove((task.queued_at, task.id))
            if not group:
                self._drop(group)

    def enter(self, task: Task) -> None:
        del self.delayed[task.id]
        self._let_in(task)

    def reposition(self, changed: set[TaskId], tasks: Mapping[TaskId, Task]) -> None:
        """Move tasks with a changed inherited priority, and clear the set."""
        if not changed:
            return  # as for almost every task: most have no dependents
        for name in sorted(changed):
            key = self._where.get(name)
            if key is not None and key[4] != self.effective_priority_of(tasks[name]):
                self.remove(tasks[name])
                self._let_in(tasks[name])
        changed.clear()

    def _let_in(self, task: Task) -> None:
        if self.pause_of(task) is not None:
            self.paused.add(task.id)
            return
        equivalence = self.classes.get(task.demand)
        if equivalence is None:
            equivalence = self.classes[task.demand] = EquivalenceClass(task.demand)
        standing = self.effective_priority_of(task)
        key = (
            task.tenant,
            task.priority,
            equivalence.demand,
            task.stream,
            standing,
        )  # the demand is the same object for all equal tasks
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = QueueGroup(key, equivalence, self.stream_weights.get(task.stream))
            equivalence.put(group)
            self.tenants[task.tenant] += 1
        group.add((task.queued_at, task.id))
        self._where[task.id] = group.key  # one object for all tasks of the group

    def _drop(self, group: QueueGroup) -> None:
        del self.groups[group.key]
        group.equivalence.drop(group)
        self.tenants -= Counter((group.tenant,))
        if not group.equivalence.bands:
            del self.classes[group.demand]
