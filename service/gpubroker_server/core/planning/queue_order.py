"""The order in which one cycle examines the queue. It touches no more tasks than the cycle examines."""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from gpubroker_server.core.domain.policy import BANDS, Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.planning.budget import PROBE_KNOWN, PROBE_SIFTED, Steps
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.world.queue import (
    EquivalenceClass,
    GroupKey,
    Member,
    OrderKey,
    QueueGroup,
    TenantOrderKey,
    order_key,
)
from gpubroker_server.core.world.world import World

SIFTED_AT_A_TIME = 64
"""The number of demands sifted between two yields, which takes well under a millisecond."""

MERGED_AT_A_TIME = 16
"""The number of demands, or groups of equals, merged between two yields."""

BEFORE_ALL: TenantOrderKey = (-101, 0, 0.0, 0.0, TaskId(""))
"""A key before all others: keys begin with the top of a band, negated, and no priority is above 100."""

Equals = tuple[QueueGroup, ...]
"""The groups of one demand and one priority. Without quotas, what holds for one group holds for all."""

Entry = tuple[OrderKey, TaskId, QueueGroup | None]
"""The next task of a group, or a task with pledges, which has no group. The key is unique."""


NO_GROUPS: dict[int, dict[GroupKey, QueueGroup]] = {}


class Head(NamedTuple):
    """The first of several groups that are merged as one."""

    key: OrderKey
    is_merged: bool
    """False if the head stands for all groups of its demand in this band. No task of these groups is before
    the head."""
    task: TaskId
    group: QueueGroup | None
    behind: list[Entry]
    """A heap of the other groups."""


class AdmissionFilter(Protocol):
    """Tells which groups need not be examined."""

    def inadmissible(self, classes: Iterable[EquivalenceClass], band: int) -> Sequence[EquivalenceClass]:
        """Return the classes of which every task in the band is refused, and every equal task of a lower
        priority."""
        ...

    def is_refused_in(self, equivalence: EquivalenceClass, band: int) -> bool:
        """Return True if it is known that every task of this class in the band is refused."""
        ...

    def is_refused(self, group: QueueGroup) -> bool:
        """Return True if it is known that every task of the group is refused."""
        ...


class QueueOrder:
    """A k-way merge over the heads of the groups, band by band, from a place in the order onwards.

    Inadmissible groups are set aside until `requeue_inadmissible`. Tasks with pledges are merged one by one,
    because what is pledged to them is not free for equal tasks.
    """

    def __init__(
        self, world: World, policy: Policy, ordered_at: Instant, after: OrderKey | None, shares: FairShares
    ) -> None:
        self.shares = shares
        self._world = world
        self._policy = policy
        self._ordered_at = ordered_at
        self._after = after
        self._pledged = frozenset(task for task in world.pledges if task in world.queue)
        self._band = 0
        """The top priority of the band that is open."""
        self._bands = [top for _, _, top in reversed(BANDS) if after is None or -top >= after[0]]
        """The bands that are still to be opened, the highest last."""
        self._unsifted: list[EquivalenceClass] = []
        """The demands of the open band that have not been checked for admissibility."""
        self._arriving: list[EquivalenceClass | Equals] = []
        """The groups of the open band that were checked and are not merged yet."""
        self._inadmissible: list[Equals] = []
        self._inadmissible_up_to: dict[EquivalenceClass, int] = {}
        """Maps a demand to the priority up to which no group is admissible, in the open band and below."""
        self._heads: list[Head] = []
        self._keys: dict[TaskId, OrderKey] = {}
        """The answers of `key_of`, which are asked for often: each task is compared with all tasks that have
        a reservation."""

    def continues(
        self, world: World, ordered_at: Instant, after: OrderKey | None, shares: FairShares
    ) -> bool:
        """Return True if this is the order of the rest of that cycle. A task submitted meanwhile may be
        missing, and is planned in the next cycle: starting over at each arrival would cost a probe of every
        group."""
        self._keys.clear()  # what a task inherits may have changed
        inputs = (self._world, self._ordered_at, self._after)
        return inputs == (world, ordered_at, after) and self.shares.is_same_moment_as(shares)

    @property
    def is_done(self) -> bool:
        return not (self._unsifted or self._arriving or self._heads or self._bands)

    def next(self, admission: AdmissionFilter) -> Steps[Head | None]:
        """Return the next task to examine, or None at the end. The caller may abandon the search at any yield
        and call again."""
        while not self.is_done:
            if self._unsifted:
                yield self._sift(admission)
            elif self._arriving:
                yield self._merge(admission)
            elif self._heads:
                head = self._take(heappop(self._heads), admission)
                if head is not None:
                    self._after = head.key
                    return head
                yield PROBE_KNOWN
            else:
                self._open_band(self._bands.pop())
        return None

    def charge(self, task: Task, mb: int) -> None:
        """Count MiB given to the task that is being examined, which may lower its tenant's rank."""
        key = self.key_of(task)
        self.shares.charge(task.tenant, mb, (key[0], *key[3:]))
        self._keys.clear()

    def key_of(self, task: Task) -> OrderKey:
        """Return the task's place in the order of the queue now."""
        key = self._keys.get(task.id)
        if key is None:
            own_order = self._world.queue.order_within_tenant(task, self._ordered_at, self._policy)
            key = self._keys[task.id] = order_key(own_order, self.shares.rank(task.tenant))
        return key

    def requeue_awaiting(self) -> None:
        """Examine again the groups that were set aside one by one, since some may wait for room on a node
        that changed. Classes that were set aside as a whole wait until a node grows."""
        self._arriving += self._inadmissible
        self._inadmissible = []

    def requeue_inadmissible(self) -> None:
        """Examine again all groups that were set aside, because a node has grown."""
        self._arriving += self._inadmissible
        self._unsifted += (
            equivalence for equivalence in self._inadmissible_up_to if self._band in equivalence.bands
        )
        self._inadmissible = []
        self._inadmissible_up_to = {}

    def _take(self, head: Head, admission: AdmissionFilter) -> Head | None:
        """Return the head if its task is to be examined now."""
        if head.is_merged and not self.shares.has_one_tenant and self._was_overtaken(head):
            return None
        group = head.group
        if group is None:
            return head if head.task in self._world.queue else None
        if not head.is_merged:
            self._merge_groups(group.equivalence, admission)
            return None
        if group and admission.is_refused(group):  # an empty group has left the queue since it was merged
            behind = [other for _, _, other in head.behind if other is not None]
            self._inadmissible.append((group, *behind))
            return None
        self._push_entry(head.behind, group, group.after(head.key[-2:]))
        self._push_head(head.behind)
        return head if self._world.queue.holds(head.task, group) else None

    def _open_band(self, top: int) -> None:
        self._band = top
        # In a lower band a group may have a higher priority of its own, because it inherited none.
        known = self._inadmissible_up_to
        self._unsifted = [
            equivalence
            for equivalence in self._world.queue.classes.values()
            if top in equivalence.bands
            and (equivalence not in known or equivalence.highest[top] > known[equivalence])
            and not equivalence.demand.answered_by
        ]
        for equivalence in self._unsifted if known else ():
            known.pop(equivalence, None)
        for name in self._pledged:
            task = self._world.tasks.get(name)
            if task is not None:
                key = self.key_of(task)
                passed = self._after is not None and key <= self._after
                if (
                    key[0] == -top
                    and not passed
                    and (key[0], *key[3:]) > self.shares.passed.get(task.tenant, BEFORE_ALL)
                ):
                    self._heads.append(Head(key, True, name, None, []))
        heapify(self._heads)

    def _sift(self, admission: AdmissionFilter) -> float:
        """Set aside the demands that are refused as a whole, and return the cost in probes."""
        chunk = self._unsifted[-SIFTED_AT_A_TIME:]
        del self._unsifted[-SIFTED_AT_A_TIME:]
        # A demand may have left the queue since it was set aside.
        classes = [equivalence for equivalence in chunk if self._band in equivalence.bands]
        refused = set(admission.inadmissible(classes, self._band))
        for equivalence in classes:
            if equivalence in refused:
                self._inadmissible_up_to[equivalence] = equivalence.highest[self._band]
            elif admission.is_refused_in(equivalence, self._band):
                # Set the groups aside one by one, before a key is computed for each of them.
                self._inadmissible += [
                    tuple(same_priority.values()) for same_priority in equivalence.bands[self._band].values()
                ]
            else:
                self._arriving.append(equivalence)
        return PROBE_SIFTED * len(chunk)

    def _merge(self, admission: AdmissionFilter) -> float:
        """Put demands, or groups of equals, among the heads, and return the cost in probes."""
        chunk = self._arriving[-MERGED_AT_A_TIME:]
        del self._arriving[-MERGED_AT_A_TIME:]
        cost, now, policy = 0.0, self._ordered_at, self._policy
        ranks = {tenant: self.shares.rank(tenant) for tenant in self._world.queue.tenants}
        for arriving in chunk:
            if not isinstance(arriving, EquivalenceClass):
                cost += self._merge_priority([group for group in arriving if group], admission)
                continue
            cost += PROBE_KNOWN
            firsts = [
                (ranks[key[0]], group.first_order(now, policy), group)
                for same_priority in arriving.bands.get(self._band, NO_GROUPS).values()
                for key, group in same_priority.items()
            ]
            if firsts:
                rank, first, group = min(firsts)
                heappush(self._heads, Head(order_key(first, rank), False, first[-1], group, []))
        return cost

    def _merge_groups(self, equivalence: EquivalenceClass, admission: AdmissionFilter) -> None:
        """Merge the groups of a demand whose earliest task is next, if the demand is still admissible."""
        if self._band not in equivalence.bands:
            return
        if admission.inadmissible([equivalence], self._band):
            self._inadmissible_up_to[equivalence] = equivalence.highest[self._band]
            return
        for same_priority in list(equivalence.bands[self._band].values()):
            self._merge_priority(list(same_priority.values()), admission)

    def _merge_priority(self, same_priority: Sequence[QueueGroup], admission: AdmissionFilter) -> float:
        """Put the groups behind one head, and return the cost in probes. With quotas, which tell tenants
        apart, each group gets a head of its own."""
        for groups in (
            [(group,) for group in same_priority] if self._policy.has_quotas else [tuple(same_priority)]
        ):
            if groups and admission.is_refused(groups[0]):
                self._inadmissible.append(groups)
                continue
            entries: list[Entry] = []
            for group in groups:
                passed = self._count_passed(group)
                if passed < len(group):
                    self._push_entry(entries, group, group.member(passed))
            self._push_head(entries)
        return PROBE_KNOWN * (1 + len(same_priority))

    def _count_passed(self, group: QueueGroup) -> int:
        """Return how many of the group's tasks were examined in this cycle."""
        if self._after is None:
            return 0
        rank = self.shares.rank(group.tenant)
        passed = group.count_until(self._after, rank, self._ordered_at, self._policy)
        own_order = self.shares.passed.get(group.tenant)
        return (
            passed
            if own_order is None
            else max(passed, group.count_own(own_order, self._ordered_at, self._policy))
        )

    def _push_entry(self, entries: list[Entry], group: QueueGroup, member: Member | None) -> None:
        """Add this member of the group, or else the next one without pledges, to the entries."""
        while member is not None and member[1] in self._pledged:
            member = group.after(member)
        if member is not None:
            own_order = group.order_within_tenant(member, self._ordered_at, self._policy)
            key = order_key(own_order, self.shares.rank(group.tenant))
            heappush(entries, (key, member[1], group))

    def _push_head(self, entries: list[Entry]) -> None:
        if entries:
            key, task, group = heappop(entries)
            heappush(self._heads, Head(key, True, task, group, entries))

    def _was_overtaken(self, head: Head) -> bool:
        """Return True if the rank of the head's tenant has fallen since the head was merged. The head is then
        put back by its new rank."""
        task = self._world.tasks.get(head.task)
        tenant = head.group.tenant if head.group else "" if task is None else task.tenant
        rank = self.shares.rank(tenant)
        if head.key[1:3] == rank:
            return False
        heappush(head.behind, ((head.key[0], *rank, *head.key[3:]), head.task, head.group))
        self._push_head(head.behind)
        return True
