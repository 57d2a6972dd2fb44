"""What a node has for a task, soon and at most, told at a glance and without saying at whose cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.core.device import Device
from service.core.draft import Draft, Headroom
from service.core.need import Ceiling, ceiling, need_mb
from service.core.policy import BANDS, Policy
from service.core.task import Task
from service.core.units import Instant, NodeName
from service.core.victims import Stoppable, after, may_be_stopped, stoppable

CRITICAL = BANDS[0][1]
"""From this priority on no shield counts."""


@dataclass(frozen=True, slots=True)
class Room:
    """What could be had of each device of a node, and of the node beside them."""

    devices: tuple[tuple[Device, int], ...]
    """(device, MiB), in key order."""
    ceiling: Ceiling
    beside: Headroom

    def fits(self, task: Task) -> bool:
        demand = task.demand
        if not (self.ceiling.may_fit(demand) and self.beside.fits(task)):
            return False
        needs = ((need_mb(demand, device), mb) for device, mb in self.devices)
        return sum(need is not None and need <= mb for need, mb in needs) >= demand.gpus


@dataclass(frozen=True, slots=True)
class Outlook:
    """For tasks without pledges of their own."""

    soon: Room
    """Once everybody who is leaving has left."""
    most: Room
    """Once everybody who may be stopped for them has left as well."""
    leavers: tuple[Stoppable, ...]
    """Who that is, in no particular order."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """Of one node."""

    revision: int
    """Of its newest mark when they were learned."""
    stoppable: Sequence[Stoppable]
    steps: Sequence[int]
    """Priorities: for all who are above the same of them, the outlook is the same."""
    outlooks: dict[int, Outlook]
    """By how many steps one is above."""


Known = dict[NodeName, _Facts]


class Outlooks:
    """Of the usable nodes of one draft. What is known of a node holds until it is marked as changed."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant, began_at: Instant, known: Known) -> None:
        self._draft = draft
        self._policy = policy
        self._now = now
        self._began_at = began_at
        self._known = known

    def of(self, node: NodeName, priority: int) -> Outlook:
        facts = self._known.get(node)
        if facts is None or facts.revision != self._draft.changes.at(node):
            facts = self._known[node] = self._learn(node)
        above = sum(step < priority for step in facts.steps)
        known = facts.outlooks.get(above)
        if known is None:
            known = facts.outlooks[above] = self._look(node, priority, facts.stoppable)
        return known

    def _learn(self, node: NodeName) -> _Facts:
        runs = stoppable(self._draft, node, self._began_at)
        steps = {one.task.priority for one in runs} | {CRITICAL - 1}
        for book in self._draft.books_on(node):
            steps |= {pledge.priority for pledge in book.pledges.values()}
        return _Facts(self._draft.changes.at(node), runs, sorted(steps), {})

    def _look(self, node: NodeName, priority: int, runs: Iterable[Stoppable]) -> Outlook:
        leavers = tuple(
            one for one in runs if may_be_stopped(one.task, priority, self._policy, self._began_at)
        )
        books = list(self._draft.usable_books(node, self._policy, self._now))
        soon = [(book.device, book.soon_mb(priority=priority)) for book in books]
        beside = self._draft.headroom_soon(node, priority=priority)
        room = Room(tuple(soon), ceiling(soon), beside)
        if not leavers:
            return Outlook(room, room, ())
        most = [(device, mb + sum(one.frees.get(device.key, 0) for one in leavers)) for device, mb in soon]
        return Outlook(room, Room(tuple(most), ceiling(most), after(beside, leavers)), leavers)
