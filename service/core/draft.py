"""A picture of the World in which a plan is tried out: copy on write, thrown away or made into decisions."""

from service.core.errors import Overcommitted
from service.core.lease import Lease, Pledge
from service.core.ledger import Book
from service.core.task import Task
from service.core.units import DeviceKey, NodeName, TaskId
from service.core.world import NodeUse, World


class Draft:
    """Reads through to the World; what it changes stays here. Cheap: only touched devices are copied."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._books: dict[DeviceKey, Book] = {}
        self._use: dict[NodeName, NodeUse] = {}
        self._tasks: dict[TaskId, Task] = {}
        self.custom_use: dict[str, float] = dict(world.custom_use)
        self._pledges: dict[TaskId, dict[DeviceKey, Pledge]] = {}

    def task(self, task: TaskId) -> Task:
        return self._tasks.get(task) or self.world.tasks[task]

    def book(self, device: DeviceKey) -> Book:
        """The book to read; never change what this returns."""
        return self._books.get(device) or self.world.books[device]

    def use(self, node: NodeName) -> NodeUse:
        """The node's use to read; never change what this returns."""
        return self._use.get(node) or self.world.use[node]

    def pledges_of(self, task: TaskId) -> dict[DeviceKey, Pledge]:
        known = self._pledges.get(task)
        return self.world.pledges.get(task, {}) if known is None else known

    def replace_task(self, before: Task, after: Task) -> None:
        """Enter a moved task and count it on the node it came to or left."""
        self._tasks[after.id] = after
        if before.is_active and before.node is not None:
            self._own_use(before.node).count(before, -1)
            self._count_custom(before, -1)
        if after.is_active and after.node is not None:
            self._own_use(after.node).count(after, +1)
            self._count_custom(after, +1)
        if before.freeing_for != after.freeing_for:
            for lease in self.world.leases_of(after):
                self._own(lease.device).put(lease, after.freeing_for)

    def put_lease(self, lease: Lease) -> None:
        """Enter a lease. Raises Overcommitted if a new one does not fit even without any pledge."""
        book = self._own(lease.device)
        book.put(lease)
        if lease.version == 1 and book.free_mb(priority=101) < 0:
            raise Overcommitted(f"{lease.key}: {lease.mb} MiB do not fit on {lease.device}")

    def put_pledge(self, pledge: Pledge) -> None:
        self._own(pledge.device).pledges[pledge.preemptor] = pledge
        self._pledges[pledge.preemptor] = {**self.pledges_of(pledge.preemptor), pledge.device: pledge}

    def end_pledge(self, pledge: Pledge) -> None:
        self._own(pledge.device).pledges.pop(pledge.preemptor, None)
        mine = dict(self.pledges_of(pledge.preemptor))
        mine.pop(pledge.device, None)
        self._pledges[pledge.preemptor] = mine

    def _own(self, device: DeviceKey) -> Book:
        book = self._books.get(device)
        if book is None:
            book = self._books[device] = self.world.books[device].copy()
        return book

    def _own_use(self, node: NodeName) -> NodeUse:
        use = self._use.get(node)
        if use is None:
            use = self._use[node] = self.world.use[node].copy()
        return use

    def _count_custom(self, task: Task, sign: int) -> None:
        for name, amount in task.demand.custom:
            self.custom_use[name] = self.custom_use.get(name, 0.0) + sign * amount
