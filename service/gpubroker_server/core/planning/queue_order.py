"""The tasks of one cycle in the order of the queue, without touching more of them than are examined."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from gpubroker_server.core.domain.policy import BANDS, Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.planning.budget import PROBE_KNOWN, PROBE_SIFTED, ProbeBudget
from gpubroker_server.core.planning.tenants.fair_share import Shares
from gpubroker_server.core.world.dependencies import NO_PRIORITY
from gpubroker_server.core.world.queue import Group, Kin, Member, OrderKey, OwnKey, order_key, own_key
from gpubroker_server.core.world.world import World

NOBODY: OwnKey = (-101, 0, 0.0, 0.0, TaskId(""))
"""A place before all tasks."""

Likes = tuple[Group, ...]
"""Groups of one demand and one priority: what holds for one of them holds for all."""


Place = tuple[OrderKey, TaskId, Group | None]
"""The next task of a group, or (without a group) one that stands for itself. The key is unique."""


class Head(NamedTuple):
    """A place whose turn it is before those of its line."""

    key: OrderKey
    is_let_in: bool
    """Else its group is not, nor are the others of that demand in this band, of which none comes earlier."""
    task: TaskId
    group: Group | None
    line: list[Place]
    """A heap of those that stand behind this one: of other groups for which the same holds."""


class Refusing(Protocol):
    """Leaves out groups whose tasks need not be examined."""

    budget: ProbeBudget

    def hopeless(self, kins: Iterable[Kin], band: int) -> Iterable[Kin]:
        """Those demands of which every task in a band is refused, and every equal one of a lower priority."""
        ...

    def is_refused(self, group: Group) -> bool:
        """Each of its tasks is refused."""
        ...


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
        self._pledged = frozenset(task for task in world.pledges if task in world.queue)
        self._band = 0
        """The top of the one whose tasks are in, or coming in."""
        self._bands = [top for _, _, top in reversed(BANDS) if after is None or -top >= after[0]]
        """Of those to come, the highest last."""
        self._coming_in: list[Kin | Likes] = []
        """Of this band; before them nobody's turn has come."""
        self._is_sifted = True
        """Whether hopeless demands are left out of those."""
        self._asleep: list[Likes] = []
        self._asleep_together: dict[Kin, int] = {}
        """Those of which no group up to that priority has anything to expect, in this band and below."""
        self._heads: list[Head] = []

    def goes_on(self, world: World, ordered_at: Instant, after: OrderKey | None, shares: Shares) -> bool:
        """Whether this is the agenda of the rest of that cycle. Who has come meanwhile may not be in it, and
        has its turn in the next cycle: to begin anew with each arrival would cost all groups a look."""
        mine = (self._world, self._ordered_at, self._after)
        return mine == (world, ordered_at, after) and self.shares.is_as(shares)

    @property
    def is_done(self) -> bool:
        return not (self._coming_in or self._heads or self._bands)

    def next(self, refusing: Refusing) -> Head | None:
        """The next task to examine; None at the end, and when it is time for a pause."""
        while not self.is_done:
            if not self._is_sifted:
                self._sift(refusing)
            elif self._coming_in:
                self._let_in(self._coming_in.pop(), refusing)
                if refusing.budget.calls_for_a_pause:
                    return None
            elif self._heads:
                head = self._take(heappop(self._heads), refusing)
                if head is not None:
                    self._after = head.key
                    return head
                if refusing.budget.calls_for_a_pause:
                    return None
            else:
                self._open_band(self._bands.pop())
        return None

    def charge(self, task: Task, mb: int) -> None:
        """The task that is examined was given so much: its tenant's other tasks may have to stand back."""
        self.shares.charge(task.tenant, mb, self._own_key(task))

    def key_of(self, task: Task) -> OrderKey:
        """Its place in the order of the queue by now."""
        return order_key(self._own_key(task), self.shares.rank(task.tenant))

    def wake(self) -> None:
        """Let in again those who were left out, from here on, for whom there may be something now."""
        self._coming_in += self._asleep
        self._coming_in += (kin for kin in self._asleep_together if self._band in kin.bands)
        self._asleep = []
        self._asleep_together = {}
        self._is_sifted = False

    def _take(self, head: Head, refusing: Refusing) -> Head | None:
        """None if it is nobody's turn after all."""
        refusing.budget.spent += PROBE_KNOWN
        if head.is_let_in and not self.shares.is_even and self._was_overtaken(head):
            return None
        group = head.group
        if group is None:
            return head if head.task in self._world.queue else None
        if not head.is_let_in:
            self._enter_kin(group.kin, refusing)
            return None
        if group and refusing.is_refused(group):  # an empty one has left the queue since it was lined up
            behind = [other for _, _, other in head.line if other is not None]
            self._asleep.append((group, *behind))
            return None
        self._line_up(head.line, group, group.after(head.key[-2:]))
        self._advance(head.line)
        return head if self._world.queue.holds(head.task, group) else None

    def _open_band(self, top: int) -> None:
        self._band = top
        self._is_sifted = False
        self._coming_in = [
            kin
            for kin in self._world.queue.kin.values()
            if top in kin.bands and not kin.demand.answered_by and self._may_wake(kin, top)
        ]
        for name in self._pledged:
            task = self._world.tasks.get(name)
            if task is not None:
                own = self._own_key(task)
                key = order_key(own, self.shares.rank(task.tenant))
                passed = self._after is not None and key <= self._after
                if own[0] == -top and not passed and own > self.shares.passed.get(task.tenant, NOBODY):
                    self._heads.append(Head(key, True, name, None, []))
        heapify(self._heads)

    def _may_wake(self, kin: Kin, top: int) -> bool:
        """In another band, where one of them may have a higher priority, though it stands lower."""
        asleep = self._asleep_together.get(kin, NO_PRIORITY)
        if kin.highest[top] <= asleep:
            return False
        self._asleep_together.pop(kin, None)
        return True

    def _sift(self, refusing: Refusing) -> None:
        self._is_sifted = True
        refusing.budget.spent += PROBE_SIFTED * len(self._coming_in)
        kins = [
            comers for comers in self._coming_in if isinstance(comers, Kin) and self._band in comers.bands
        ]
        hopeless = {kin: kin.highest[self._band] for kin in refusing.hopeless(kins, self._band)}
        self._asleep_together |= hopeless
        self._coming_in = [comers for comers in self._coming_in if comers not in hopeless]

    def _let_in(self, comers: Kin | Likes, refusing: Refusing) -> None:
        refusing.budget.spent += PROBE_KNOWN
        if not isinstance(comers, Kin):
            self._enter([group for group in comers if group], refusing)
        elif self._band in comers.bands:
            now, policy, rank = self._ordered_at, self._policy, self.shares.rank
            groups = self._groups_of(comers)
            first = min((rank(group.tenant), group.first_key(now, policy), group) for group in groups)
            heappush(self._heads, Head(order_key(first[1], first[0]), False, first[1][-1], first[2], []))

    def _groups_of(self, kin: Kin) -> Iterator[Group]:
        """Those of this band."""
        return (group for likes in kin.bands[self._band].values() for group in likes.values())

    def _enter_kin(self, kin: Kin, refusing: Refusing) -> None:
        """The turn of its groups has come, unless it is hopeless by now."""
        if self._band not in kin.bands:
            return
        if list(refusing.hopeless([kin], self._band)):
            self._asleep_together[kin] = kin.highest[self._band]
            return
        for likes in list(kin.bands[self._band].values()):
            self._enter(list(likes.values()), refusing)

    def _enter(self, likes: Sequence[Group], refusing: Refusing) -> None:
        """Line up these groups: by tenant where quotas tell them apart, else one behind the other."""
        refusing.budget.spent += PROBE_KNOWN * len(likes)
        for groups in [(group,) for group in likes] if self._policy.has_quotas else [tuple(likes)]:
            if groups and refusing.is_refused(groups[0]):
                self._asleep.append(groups)
                continue
            line: list[Place] = []
            for group in groups:
                passed = self._count_passed(group)
                if passed < len(group):
                    self._line_up(line, group, group.member(passed))
            self._advance(line)

    def _count_passed(self, group: Group) -> int:
        """How many of its members have had their turn."""
        if self._after is None:
            return 0
        rank = self.shares.rank(group.tenant)
        passed = group.count_until(self._after, rank, self._ordered_at, self._policy)
        own = self.shares.passed.get(group.tenant)
        return passed if own is None else max(passed, group.count_own(own, self._ordered_at, self._policy))

    def _line_up(self, line: list[Place], group: Group, member: Member | None) -> None:
        """Let in this member, or the next one that does not stand for itself."""
        while member is not None and member[1] in self._pledged:
            member = group.after(member)
        if member is not None:
            own = group.own_key(member, self._ordered_at, self._policy)
            key = order_key(own, self.shares.rank(group.tenant))
            heappush(line, (key, member[1], group))

    def _advance(self, line: list[Place]) -> None:
        """The first of a line takes its place among all."""
        if line:
            key, task, group = heappop(line)
            heappush(self._heads, Head(key, True, task, group, line))

    def _was_overtaken(self, head: Head) -> bool:
        """Whether its tenant was given something since it came in; then it stands back."""
        task = self._world.tasks.get(head.task)
        tenant = head.group.tenant if head.group else "" if task is None else task.tenant
        rank = self.shares.rank(tenant)
        if head.key[1:3] == rank:
            return False
        heappush(head.line, ((head.key[0], *rank, *head.key[3:]), head.task, head.group))
        self._advance(head.line)
        return True

    def _own_key(self, task: Task) -> OwnKey:
        standing = self._world.queue.standing_of(task)
        return own_key(standing, task.stream, task.submitted_at, task.id, self._ordered_at, self._policy)
