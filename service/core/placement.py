"""Where a task can run now: one node, and on it as many devices as it asks for."""

from collections.abc import Iterator
from heapq import nsmallest

from service.core.draft import Draft
from service.core.memory import Found, Left, Likes, Memory, Standing
from service.core.need import ceiling, need_mb, unwanted_device, unwanted_node
from service.core.policy import Policy
from service.core.task import Placement, Task
from service.core.units import DeviceKey, Instant, Mib, NodeName, TaskId

Option = tuple[float, DeviceKey, Mib]
"""(MiB left on the device afterwards, negated for `spread`; the device; MiB to lease)"""

CLOSE_LOOK = 5
"""A look at a node's devices costs as much as so many at what the node has at most."""


FAR_MB = 2**40
"""A place that is less wanted comes after all that are more so, as if more were left there than GPUs have."""


class Places:
    """The places of one draft. Only nodes on which something changed are looked at again for equal tasks.

    A memory must have been opened for the draft's World, and the draft must mark its changes there.
    """

    def __init__(self, draft: Draft, policy: Policy, now: Instant, memory: Memory | None = None) -> None:
        self.looks = 0
        """How many nodes were looked at for a task; close looks count more."""
        self._draft = draft
        self._policy = policy
        self._now = now
        self._memory = memory
        self._nodes = frozenset(draft.usable_nodes())

    def best(self, task: Task, likes: Likes | TaskId | None = None) -> Placement | None:
        """The best place for a task. Total order, smallest first (`spread`: largest first):

        1. unmet preferences (always smallest first): of kinds, device by device, and of nodes
        2. room left on its devices
        3. CPU left on the node
        4. names of node and devices (always smallest first)

        `likes`: under which its places are remembered.
        """
        self.looks += 1
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        if likes is None or self._memory is None:
            found = [place for node in self._nodes if (place := self.on(node, task)) is not None]
            return min(found)[1] if found else None
        standing = self._memory.standings.setdefault(likes, Standing())
        for node in self._memory.changes.since(standing.seen):
            place = self.on(node, task)
            if place is not None:
                standing.found[node] = place
            else:
                standing.found.pop(node, None)
        standing.seen = self._memory.changes.revision
        return min(standing.found.values())[1] if standing.found else None

    def on(self, node: NodeName, task: Task) -> Found | None:
        """The best place for a task on one node."""
        demand = task.demand
        self.looks += 1
        if node not in self._nodes:
            return None
        ceiling, room = self._left(node, task)
        if not (ceiling.may_fit(demand) and room.fits(task)):
            return None
        self.looks += CLOSE_LOOK
        sign = -1 if demand.placement == "spread" else 1
        chosen = nsmallest(demand.gpus, self._devices(node, task, sign))
        if len(chosen) < demand.gpus:
            return None
        devices = tuple(sorted((key, mb) for _, key, mb in chosen))
        names = (node, *(key for key, _ in devices))
        far = FAR_MB * unwanted_node(demand, self._draft.world.nodes[node])
        return (far + sum(left for left, _, _ in chosen), sign * room.cpu, names), Placement(node, devices)

    def _left(self, node: NodeName, task: Task) -> Left:
        """What a task of this priority could have of a node; worked out once for all without pledges."""
        if self._draft.pledges_of(task.id):
            return self._look(node, task.id, task.priority)
        revision = self._draft.changes.at(node)
        lefts = {} if self._memory is None else self._memory.lefts
        known = lefts.get((node, task.priority))
        if known is None or known[0] != revision:
            self.looks += CLOSE_LOOK
            known = lefts[node, task.priority] = revision, self._look(node, None, task.priority)
        return known[1]

    def _look(self, node: NodeName, task: TaskId | None, priority: int) -> Left:
        books = self._draft.usable_books(node, self._policy, self._now)
        most = ceiling((book.device, book.free_mb(task=task, priority=priority)) for book in books)
        return most, self._draft.headroom(node, task=task, priority=priority)

    def _devices(self, node: NodeName, task: Task, sign: int) -> Iterator[Option]:
        for book in self._draft.usable_books(node, self._policy, self._now):
            need = need_mb(task.demand, book.device)
            if need is not None and need <= book.unheld_mb():
                left = book.free_mb(task=task.id, priority=task.priority) - need
                if left >= 0:
                    far = FAR_MB * unwanted_device(task.demand, book.device)
                    yield sign * left + far, book.device.key, need
