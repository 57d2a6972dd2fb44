"""A copy-on-write view of the World in which a plan is tried out, then dropped or turned into decisions."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType

from msgspec.structs import replace

from gpubroker_server.core.domain.errors import Overcommitted
from gpubroker_server.core.domain.holders import Gang, MemberState
from gpubroker_server.core.domain.lease import Lease, LeaseState, Pledge
from gpubroker_server.core.domain.node_capacity import NodeHeadroom, NodeUsage, count_custom
from gpubroker_server.core.domain.policy import CustomLimit, Policy, wildcard_limit
from gpubroker_server.core.domain.ranks import needs_gpus, rank_task, rank_tasks, rank_tasks_on, ranks_of
from gpubroker_server.core.domain.task import Task, TaskState, members_of, stop_notice, stop_notices
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, TaskId, node_of
from gpubroker_server.core.world.background import BACKGROUND_TOP
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.revisions import RevisionLog
from gpubroker_server.core.world.world import World

NOTHING: Mapping[DeviceKey, int] = MappingProxyType({})

NO_PLEDGE = 2**31
"""A priority above all others, which stands for no pledge."""


class Draft:
    """The World with changes that stay in the draft. Only devices that change are copied."""

    def __init__(
        self, world: World, changes: RevisionLog | None = None, growth: RevisionLog | None = None
    ) -> None:
        self.world = world
        self.changes = RevisionLog() if changes is None else changes
        """The nodes that changed in this draft."""
        self.growth = RevisionLog() if growth is None else growth
        """The nodes on which a task may now find room, or victims, that it did not find before."""
        self.custom_use: dict[str, float] = dict(world.custom_use)
        self.background = world.background.copy()
        self.given: list[tuple[str, int]] = []
        """The (tenant, MiB) of each lease made in this draft; the MiB are negative for a lease taken back."""
        self._given_to: dict[str, list[DeviceKey]] = {}
        """Maps a holder to the devices that were leased to it in this draft."""
        self._books: dict[DeviceKey, DeviceLedger] = {}
        self._use: dict[NodeName, NodeUsage] = {}
        self._tasks: dict[TaskId, Task] = {}
        self._admitted: dict[NodeName, set[TaskId]] = {}
        self._pledges = {task: dict(pledges) for task, pledges in world.pledges.items()}
        self._waiting: dict[NodeName, list[tuple[int, Task]]] | None = None
        self._binding: list[int] | None = None
        """The priorities of all pledges, ascending; None until asked for."""

    def copy(self) -> "Draft":
        twin = Draft(self.world)
        twin.custom_use, twin.given = dict(self.custom_use), list(self.given)
        twin.background = self.background.copy()
        twin._given_to = {holder: list(devices) for holder, devices in self._given_to.items()}
        twin._books = {key: ledger.copy() for key, ledger in self._books.items()}
        twin._use = {node: use.copy() for node, use in self._use.items()}
        twin._tasks, twin._pledges = dict(self._tasks), dict(self._pledges)
        twin._admitted = {node: set(names) for node, names in self._admitted.items()}
        return twin

    def task(self, task: TaskId) -> Task:
        return self._tasks.get(task) or self.world.tasks[task]

    def holder(self, lease: Lease) -> Task | None:
        """Return the task whose newest claim holds the lease; None if that claim has ended or is no
        task's."""
        task = self._tasks.get(TaskId(lease.holder)) or self.world.tasks.get(TaskId(lease.holder))
        return task if task is not None and task.fence == lease.fence else None

    def ledger(self, device: DeviceKey) -> DeviceLedger:
        """Return the ledger of a device. Treat it as read-only."""
        return self._books.get(device) or self.world.ledgers[device]

    def ledgers_on(self, node: NodeName) -> Iterator[DeviceLedger]:
        """Return the ledgers of the node in key order. Treat them as read-only."""
        return map(self.ledger, self.world.by_node.get(node, ()))

    def usable_nodes(self) -> Iterator[NodeName]:
        """Yield the nodes on which something may be placed, in no order."""
        return (row.name for row in self.world.nodes.values() if self.world.takes_work(row))

    def usable_ledgers(self, node: NodeName, policy: Policy, now: Instant) -> Iterator[DeviceLedger]:
        """Yield the ledgers of devices that are open and have a fresh sample, in key order."""
        period = policy.sample_period_seconds
        return (ledger for ledger in self.ledgers_on(node) if not ledger.takes_nothing(now, period))

    def use(self, node: NodeName) -> NodeUsage:
        """Return what runs use of a node. Treat it as read-only."""
        return self._use.get(node) or self.world.use[node]

    def pledges_of(self, task: TaskId) -> dict[DeviceKey, Pledge]:
        return self._pledges.get(task, {})

    def pledged(self) -> Iterator[TaskId]:
        """Yield the tasks with a live pledge, in no order."""
        return iter(self._pledges)

    def runs_on(self, node: NodeName) -> Iterator[Task]:
        """Yield the runs that were on the node before this draft, in their present state and in no order."""
        return map(self.task, self.world.runs.get(node, ()))

    def active_on(self, node: NodeName) -> Iterator[Task]:
        """Yield each of the node's runs as a task of its own, those admitted in this draft included."""
        for name in (*self.world.runs.get(node, ()), *self._admitted.get(node, ())):
            yield from rank_tasks_on(self.task(name), node)

    def active(self) -> Iterator[Task]:
        """Yield all runs, including those that were admitted in this draft, in no order."""
        return filter(lambda row: row.is_active, map(self.task, {*self.world.active, *self._tasks}))

    def kinds_for(self, node: NodeName, task: Task) -> set[str]:
        """Return the kinds of the node's devices, by which the task's run times are told apart; the empty
        kind for a task without GPUs."""
        return {ledger.device.kind for ledger in self.ledgers_on(node)} if needs_gpus(task.demand) else {""}

    def headroom(self, node: NodeName, *, task: TaskId | None = None, priority: int = -1) -> NodeHeadroom:
        """Return what a task of this id and priority could take of the node: all that is neither used nor
        pledged to others. What counts as pledged is a run slot, CPU and host memory too, because a preemptor
        needs them once its devices are free."""
        row, use = self.world.nodes[node], self.use(node)
        custom = tuple((name, round(amount - use.custom.get(name, 0.0), 6)) for name, amount in row.custom)
        cpu = round(row.cpu - use.cpu, 6)
        is_closed = priority <= BACKGROUND_TOP and self.background.is_closed(node)
        is_open = task in self._pledges or not is_closed
        room = NodeHeadroom(cpu, row.memory_mb - use.memory_mb, row.max_runs - use.runs, custom, row, is_open)
        for other in self._respected(node, task, priority):
            room = room.with_room_of(other, sign=-1)
        return room

    def headroom_soon(self, node: NodeName, *, priority: int) -> NodeHeadroom:
        """Return the headroom that the node will have once every run under notice has left it."""
        return self.headroom(node, priority=priority).with_room_of(*self._under_notice(node))

    def _under_notice(self, node: NodeName) -> Iterator[Task]:
        touched = self._tasks.keys() & self.world.runs.get(node, set())
        for name in touched | self.use(node).stopping:
            for part in rank_tasks_on(self.task(name), node):
                if part.state is TaskState.STOPPING:
                    yield part

    def short_of(self, task: Task, limits: Iterable[CustomLimit]) -> list[str]:
        """Return the cluster-wide resources of which too little is left for this task now, in name order.

        What is reserved for higher priorities counts as used. `NodeHeadroom` covers the resources of a node.
        """
        left = self.left_of(task, limits) if task.demand.counted else {}
        return [name for name, amount in task.demand.counted if amount > round(left[name], 6)]

    def left_of(self, task: Task, limits: Iterable[CustomLimit]) -> dict[str, float]:
        """Return what this task could take now of each cluster-wide resource that it counts against."""
        by_name = {limit.name: limit for limit in limits}
        left: dict[str, float] = {}
        for name, _ in task.demand.counted:
            left[name] = self._left_of(
                name, by_name.get(name) or by_name.get(wildcard_limit(name)), task.priority
            )
        for preemptor, pledges in self._pledges.items():
            if preemptor != task.id and any(pledge.priority >= task.priority for pledge in pledges.values()):
                for name, amount in self._counted_when_it_starts(preemptor):
                    left[name] = left.get(name, 0.0) - amount
        return left

    def ranks_within_limits(self, task: Task, limits: Iterable[CustomLimit]) -> int:
        """Return how many ranks of a gang the cluster-wide limits allow now, but at least the required
        ones."""
        demand = task.demand
        names = {name for part in demand.bundles for name, _ in part.counted}
        if not names or demand.least_ranks == len(demand.bundles):
            return len(demand.bundles)
        every = tuple((name, 0.0) for name in sorted(names))
        left = self.left_of(replace(task, demand=replace(demand, custom=(), slots=every)), limits)
        for count, part in enumerate(demand.bundles):
            for name, amount in part.counted:
                left[name] = round(left[name] - amount, 6)
            if count >= demand.least_ranks and any(left[name] < 0 for name, _ in part.counted):
                return count
        return len(demand.bundles)

    def _counted_when_it_starts(self, preemptor: TaskId) -> Iterable[tuple[str, float]]:
        """Return what will count against cluster-wide limits when the preemptor starts. A gang counts as a
        whole; a task that is being moved counts already, so nothing is added."""
        task = self._tasks.get(preemptor) or self.world.tasks.get(preemptor)
        return task.demand.counted if task is not None and task.state is TaskState.PENDING else ()

    def _left_of(self, name: str, limit: CustomLimit | None, priority: int) -> float:
        """Return what is left of a cluster-wide resource; -inf if no node offers it any more, or if it is
        reserved for higher priorities. A limit that was removed limits nothing."""
        if limit is None:
            return inf if ":" in name else -inf
        if priority < limit.priority_threshold:
            return -inf
        return inf if limit.per_node else limit.amount - self.custom_use.get(name, 0.0)

    def replace_task(self, before: Task, after: Task) -> None:
        """Enter a task that was admitted, which now counts on its node, or a run that was given notice."""
        self._tasks[after.id] = after
        has_other_notices = stop_notices(before) != stop_notices(after)
        # A run that is given notice before it has started is no longer one that its node is starting.
        for node, part in rank_tasks(before) if before.is_active else ():
            self._own_use(node).count(part, -1)
        for node, part in rank_tasks(after):
            self.changes.mark(node)
            self._own_use(node).count(part, +1)
            if not before.is_active:
                self._admitted.setdefault(node, set()).add(after.id)
            if has_other_notices:
                self.growth.mark(node)
        if not before.is_active:
            count_custom(self.custom_use, after, +1)
        if has_other_notices:
            for lease in self.world.leases_of(after):
                freeing_for, stopping = stop_notice(after, lease.rank)
                self._own(lease.device).put(lease, freeing_for, stopping=stopping)

    def add_ranks(self, before: Task, after: Task) -> None:
        """Enter the ranks that were added to a running gang."""
        self._tasks[after.id] = after
        first_new = len(members_of(before))
        self._recount(before, after)
        for rank, node in ranks_of(after):
            if rank >= first_new:
                self._own_use(node).count(rank_task(after, rank), +1)
                self.changes.mark(node)
                if after.id not in self.world.runs.get(node, ()):
                    self._admitted.setdefault(node, set()).add(after.id)

    def _recount(self, before: Task, after: Task) -> None:
        """Replace what a running gang counts against cluster-wide limits, after its ranks have changed."""
        count_custom(self.custom_use, before, -1)
        count_custom(self.custom_use, after, +1)

    def assume_started(self, task: TaskId) -> None:
        """Assume that the processes of a task that this draft admitted have started."""
        for node, _ in rank_tasks(self.task(task)):
            self._own_use(node).starting -= 1
            self.changes.mark(node)

    def remove_run(self, run: Task, ranks: Collection[int] | None = None) -> None:
        """Assume that the run has ended, or only the ranks `ranks` of a gang that goes on without them."""
        if ranks is None:
            after, parts = replace(run, state=TaskState.SUCCEEDED), rank_tasks(run)
            count_custom(self.custom_use, run, -1)
        else:
            members = members_of(run)
            parts = tuple((members[rank].node, rank_task(run, rank)) for rank in ranks)
            left = {rank: replace(members[rank], state=MemberState.LEFT, gone=True) for rank in ranks}
            after = replace(run, holder=Gang(tuple(left.get(member.rank, member) for member in members)))
            self._recount(run, after)
        self._tasks[run.id] = after
        for node, part in parts:
            self.changes.mark(node)
            self.growth.mark(node)
            self._own_use(node).count(part, -1)
        for lease in self.world.leases_of(run):
            if lease.key in self.ledger(lease.device).holdings and (ranks is None or lease.rank in ranks):
                self._take_back(lease)

    def release_ended(self, node: NodeName) -> None:
        """Assume that everything that ended runs still hold on the node is released."""
        for key in self.world.by_node.get(node, ()):
            for holding in list(self.ledger(key).holdings.values()):
                if holding.lease.state is LeaseState.RELEASING:
                    self._take_back(holding.lease)

    def _take_back(self, lease: Lease) -> None:
        self._own(lease.device).assume_released(lease.key)
        self.given.append((lease.tenant, -lease.mb))

    def put_lease(self, lease: Lease) -> None:
        """Enter a new lease. Raises Overcommitted, with no change, if the lease does not fit; pledges do not
        count."""
        if lease.mb > self.ledger(lease.device).unallocated_mb():
            raise Overcommitted(f"{lease.key}: {lease.mb} MiB do not fit on {lease.device}")
        self._own(lease.device).put(lease)
        for node in self.background.take(lease):
            self.changes.mark(node)
        self.given.append((lease.tenant, lease.mb))
        self._given_to.setdefault(lease.holder, []).append(lease.device)

    def given_to(self, holder: str) -> Sequence[DeviceKey]:
        """Return the devices that this draft has leased to the holder."""
        return self._given_to.get(holder, ())

    def leaving(self) -> Iterator[Lease]:
        """Yield the leases that are expected to be released, because their run has ended or is under
        notice."""
        return (holding.lease for key in self.world.ledgers for holding in self.ledger(key).leaving())

    def claimed(self, task: TaskId, priority: int) -> Iterator[tuple[str, int]]:
        """Yield the (tenant, MiB) that are pledged to other tasks at this priority or a higher one. A task
        that is being moved holds its memory already and does not count twice."""
        for preemptor, pledges in self._pledges.items():
            other = self._tasks.get(preemptor) or self.world.tasks.get(preemptor)
            if preemptor != task and not (other is not None and other.is_moving):
                yield from ((p.tenant, p.mb) for p in pledges.values() if p.priority >= priority)

    def put_pledge(self, pledge: Pledge) -> None:
        if pledge.device in self.world.ledgers:
            self._own(pledge.device).pledges[pledge.preemptor] = pledge
        self.changes.mark(node_of(pledge.device))
        self._pledges[pledge.preemptor] = {**self.pledges_of(pledge.preemptor), pledge.device: pledge}
        self._waiting = self._binding = None

    def end_pledges(self, preemptor: TaskId, taken: Mapping[DeviceKey, int] = NOTHING) -> tuple[Pledge, ...]:
        """End all pledges of a preemptor together, and return them in device order. `taken` maps a device to
        the MiB that the preemptor is about to lease. A device of which it leases all that was pledged offers
        other tasks no more than before."""
        ended = self._pledges.pop(preemptor, {})
        for device, pledge in ended.items():
            if device in self.world.ledgers:
                del self._own(device).pledges[preemptor]
            self.changes.mark(node_of(device))
            if taken.get(device, -1) < pledge.mb:
                self.growth.mark(node_of(device))
        self._waiting = self._binding = None
        return tuple(ended[device] for device in sorted(ended))

    def is_room_coming(self, task: TaskId) -> bool:
        """Return True if the memory being released will be enough for the task's pledges, False if nothing is
        being released."""
        pledges = self.pledges_of(task)
        ledgers = [(self.ledger(key), pledges[key]) for key in pledges if key in self.world.ledgers]
        is_leaving = any(any(ledger.leaving()) for ledger, _ in ledgers)
        is_leaving = is_leaving or any(any(self._under_notice(node_of(key))) for key in pledges)
        return is_leaving and all(
            ledger.free_after_releases_mb(task=task, priority=pledge.priority) >= pledge.mb
            for ledger, pledge in ledgers
        )

    def pledge_priorities(self, node: NodeName) -> list[int]:
        """Return the priorities of the pledges that keep something on the node, and the priority up to which
        the node is closed to background work, ascending."""
        devices = (pledge for ledger in self.ledgers_on(node) for pledge in ledger.pledges.values())
        waiting = (priority for priority, _ in self._preemptors().get(node, ()))
        closed = (BACKGROUND_TOP,) if self.background.is_closed(node) else ()
        return sorted({*(pledge.priority for pledge in devices), *waiting, *closed})

    def least_pledge_from(self, priority: int) -> int:
        """Return the lowest priority, from this one on, at which something may be kept on any node: the
        priority of a pledge, or that up to which a node can be closed to background work."""
        if self._binding is None:
            pledged = {pledge.priority for of_task in self._pledges.values() for pledge in of_task.values()}
            self._binding = sorted({*pledged, BACKGROUND_TOP, NO_PLEDGE})
        return self._binding[bisect_left(self._binding, priority)]

    def _respected(self, node: NodeName, task: TaskId | None, priority: int) -> Iterator[Task]:
        for pledged, other in self._preemptors().get(node, ()):
            if other.id != task and pledged >= priority:
                yield other

    def _preemptors(self) -> dict[NodeName, list[tuple[int, Task]]]:
        """Return, by node, each task that waits for room on the node, with the priority of its pledges. Each
        rank of a gang is a task of its own."""
        if self._waiting is None:
            self._waiting = {}
            for preemptor, pledges in self._pledges.items():
                task = self._tasks.get(preemptor) or self.world.tasks.get(preemptor)
                if task is not None and (task.state is TaskState.PENDING or task.is_moving):
                    for node, priority, part in self._awaited_parts(task, pledges):
                        self._waiting.setdefault(node, []).append((priority, part))
        return self._waiting

    def _awaited_parts(
        self, task: Task, pledges: dict[DeviceKey, Pledge]
    ) -> Iterator[tuple[NodeName, int, Task]]:
        """Yield the parts of the task that wait for room, with the node and the priority of their pledges. In
        a gang that uses GPUs, ranks without GPUs have no pledge."""
        if not task.demand.bundles:
            # All pledges of a single task are on one node and have one priority.
            device, pledge = next(iter(pledges.items()))
            yield node_of(device), pledge.priority, task
            return
        ranks = {rank: pledge for pledge in pledges.values() for rank in pledge.ranks}
        for rank, pledge in ranks.items():
            yield node_of(pledge.device), pledge.priority, rank_task(task, rank)

    def _own(self, device: DeviceKey) -> DeviceLedger:
        ledger = self._books.get(device)
        if ledger is None:
            ledger = self._books[device] = self.world.ledgers[device].copy()
        self.changes.mark(ledger.device.node)
        return ledger

    def _own_use(self, node: NodeName) -> NodeUsage:
        use = self._use.get(node)
        if use is None:
            use = self._use[node] = self.world.use[node].copy()
        return use
