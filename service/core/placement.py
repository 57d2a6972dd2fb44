"""Where a task can run now: one node, and on it as many devices as it asks for."""

from collections.abc import Iterator
from heapq import nsmallest

from service.core.demand import Demand
from service.core.draft import Draft
from service.core.need import need_mb, unwanted_device, unwanted_node
from service.core.policy import Policy
from service.core.task import Placement, Task
from service.core.units import DeviceKey, Instant, Mib, NodeName

Option = tuple[float, DeviceKey, Mib]
"""(MiB left on the device afterwards, negated for `spread`; the device; MiB to lease)"""

Found = tuple[tuple[float, float, tuple[str, ...]], Placement]
"""((room left on the devices, CPU left on the node, names), placement): the smallest is the best."""


FAR_MB = 2**40
"""A place that is less wanted comes after all that are more so, as if more were left there than GPUs have."""


class Places:
    """The places of one draft. For equal tasks only nodes on which something changed are looked at again."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant) -> None:
        self._draft = draft
        self._policy = policy
        self._now = now
        self._nodes = tuple(draft.usable_nodes())
        self._known: dict[tuple[Demand, int], dict[NodeName, tuple[int, Found | None]]] = {}

    def best(self, task: Task) -> Placement | None:
        """The best place for a task. Total order, smallest first (`spread`: largest first):

        1. unmet preferences (always smallest first): of kinds, device by device, and of nodes
        2. room left on its devices
        3. CPU left on the node
        4. names of node and devices (always smallest first)
        """
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        found = [place for place in self._on_each_node(task) if place is not None]
        return min(found)[1] if found else None

    def _on_each_node(self, task: Task) -> Iterator[Found | None]:
        if self._draft.pledges_of(task.id):  # what is kept for it makes it unlike any other
            yield from (self._on(node, task) for node in self._nodes)
            return
        known = self._known.setdefault((task.demand, task.priority), {})
        for node in self._nodes:
            revision = self._draft.revision(node)
            place = known.get(node)
            if place is None or place[0] != revision:
                place = known[node] = revision, self._on(node, task)
            yield place[1]

    def _on(self, node: NodeName, task: Task) -> Found | None:
        demand = task.demand
        if demand.gpus and self._draft.largest_mb(node) < (demand.gpu_mb or 1):
            return None
        room = self._draft.headroom(node, task=task.id, priority=task.priority)
        if not room.fits(task):
            return None
        sign = -1 if demand.placement == "spread" else 1
        chosen = nsmallest(demand.gpus, self._devices(node, task, sign))
        if len(chosen) < demand.gpus:
            return None
        devices = tuple(sorted((key, mb) for _, key, mb in chosen))
        names = (node, *(key for key, _ in devices))
        far = FAR_MB * unwanted_node(demand, self._draft.world.nodes[node])
        return (far + sum(left for left, _, _ in chosen), sign * room.cpu, names), Placement(node, devices)

    def _devices(self, node: NodeName, task: Task, sign: int) -> Iterator[Option]:
        for book in self._draft.usable_books(node, self._policy, self._now):
            need = need_mb(task.demand, book.device)
            if need is not None and need <= book.unheld_mb():
                left = book.free_mb(task=task.id, priority=task.priority) - need
                if left >= 0:
                    far = FAR_MB * unwanted_device(task.demand, book.device)
                    yield sign * left + far, book.device.key, need
