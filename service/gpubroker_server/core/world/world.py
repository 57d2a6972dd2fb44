"""The World: everything that decisions depend on, built from the event log alone."""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import QueuePause, Request, StreamState
from gpubroker_server.core.domain.demand import environment_of
from gpubroker_server.core.domain.device import Device, DeviceSample, Node, NodeSample
from gpubroker_server.core.domain.errors import OutOfSync
from gpubroker_server.core.domain.holders import Gang, Model
from gpubroker_server.core.domain.lease import (
    HOLDERS_OF_TASKS,
    Lease,
    LeaseState,
    Pledge,
    is_unproven,
    moved_lease,
)
from gpubroker_server.core.domain.node_capacity import NodeUsage, count_custom
from gpubroker_server.core.domain.policy import HALF_LIFE_SECONDS
from gpubroker_server.core.domain.ranks import may_be_late_at, rank_tasks, removable_ranks, vacant_bundles
from gpubroker_server.core.domain.task import Task, TaskState, stop_notice, stop_notices
from gpubroker_server.core.domain.units import (
    DeviceKey,
    Fence,
    Instant,
    Lineage,
    NodeName,
    Position,
    Seconds,
    TaskId,
    node_of,
)
from gpubroker_server.core.world.background import BackgroundRoom
from gpubroker_server.core.world.dependencies import DependencyIndex
from gpubroker_server.core.world.due_times import DueTimes
from gpubroker_server.core.world.events import ClosureChange, Event, consecutive
from gpubroker_server.core.world.ledger import DeviceLedger, UnconfirmedHolders
from gpubroker_server.core.world.model_index import ModelIndex
from gpubroker_server.core.world.past_runs import RunHistory
from gpubroker_server.core.world.payload import Payload, changed, changed_task, read, read_task
from gpubroker_server.core.world.placement_scores import DemandMix
from gpubroker_server.core.world.queue import PendingQueue
from gpubroker_server.core.world.revisions import WorldRevisions
from gpubroker_server.core.world.tenant_accounts import Accounts
from gpubroker_server.core.world.worker_sets import WorkerSets

Claim = tuple[str, int]
"""The holder and the fence of a claim."""


class World:
    """The mutable state that decisions depend on, owned by one loop. Only `apply` (committed events),
    `measure` (samples) and `control` (what fleet control decides) change it.

    `tasks` holds every task that is not terminal, and terminal ones until their last lease is released. The
    rows of a database snapshot are added in this order: nodes, devices, tasks, leases, usage, pledges,
    requests. Each kind depends on the ones before: a lease enters the ledger of its device, with the stop
    notice of its task, and usage replaces what the leases have counted.
    """

    def __init__(self, usage_half_life_seconds: Seconds = HALF_LIFE_SECONDS) -> None:
        self.position = Position(0)
        self.lineage = Lineage(0)
        """The lineage of the log. Claims made in this lineage have higher fences than all earlier ones,
        because runs of an earlier lineage that the database no longer knows may still have the lower
        fences."""
        self.as_of = Instant(0.0)
        self.tasks: dict[TaskId, Task] = {}
        self.worker_sets = WorkerSets()
        self.awaited = DependencyIndex(self.worker_sets)
        self.queue = PendingQueue(self.awaited.inheritance.priorities)
        self.expiring = DueTimes()
        self.marks = WorldRevisions()
        """The nodes on which anything changed that a plan depends on, apart from the passing of time."""
        self.nodes: dict[NodeName, Node] = {}
        self.ledgers: dict[DeviceKey, DeviceLedger] = {}
        self.node_samples: dict[NodeName, NodeSample] = {}
        self.background = BackgroundRoom()
        self.full_disks: dict[NodeName, str] = {}
        """Maps a node on which nothing starts, because a disk is too full, to that disk."""
        self.inventory_version = 0
        """A version that rises with every new or changed node or device row."""
        self.by_node: dict[NodeName, list[DeviceKey]] = {}
        self.leases: dict[Claim, dict[str, Lease]] = {}
        """The unreleased leases of each claim, by key."""
        self.unconfirmed = UnconfirmedHolders()
        self.unseen_releases: set[DeviceKey] = set()
        """The devices on which nothing is placed before a sample shows that released memory is free."""
        self.pledges: dict[TaskId, dict[DeviceKey, Pledge]] = {}
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, StreamState] = {}
        self.use: dict[NodeName, NodeUsage] = {}
        self.custom_use: dict[str, float] = {}
        self.active = DueTimes()
        """The active tasks, with the earliest instant at which a time limit of the task or of a rank can
        pass."""
        self.runs: dict[NodeName, set[TaskId]] = {}
        self.growable: set[TaskId] = set()
        """The running elastic gangs that lack ranks."""
        self.finished: Counter[tuple[str, TaskState]] = Counter()
        """Maps a tenant and a terminal state to the number of tasks that ever ended so. Pruning does not
        lower the number."""
        self.preempted: Counter[str] = Counter()
        """Maps `task` and `model` to the number of preemptions since this World was first read."""
        self.pending: Counter[str] = Counter()
        """Maps a tenant to the number of its pending tasks, whatever they wait for."""
        self.pending_held: Counter[str] = Counter()
        """Maps a tenant to the number of its pending tasks that are held until a person lets them go."""
        self.pending_bytes: Counter[str] = Counter()
        """Maps a tenant to the bytes that its pending tasks keep for their runs."""
        self.unprepared: dict[str, set[TaskId]] = {}
        """Maps the key of an environment to the pending tasks that run in it."""
        self.models = ModelIndex()
        self.learned = RunHistory()
        self.mix = DemandMix()
        self.accounts = Accounts(usage_half_life_seconds)

    def apply(self, events: Iterable[Event]) -> None:
        """Apply committed events in order of position; events that were applied before are skipped.

        Raises OutOfSync if an event is missing; then nothing is changed. Raises OutOfSync also if an event
        does not fit; then the events before it are applied.
        """
        for event in consecutive(events, self.position):
            self.as_of = event.at  # set first, because leases and accounts are entered as of this instant
            try:
                self._take_over(event)
            except Exception as fault:
                raise OutOfSync(
                    f"event {event.position} ({event.kind} {event.key}) does not fit the World: "
                    f"{fault!r}; the World is at {self.position}; read it again from the rows"
                ) from fault
            self.position = event.position

    def next_fence(self, holder: Task) -> Fence:
        """Return the fence of the holder's next claim."""
        return Fence(max(holder.fence, self.lineage) + 1)

    def measure(self, samples: Iterable[DeviceSample], nodes: Iterable[NodeSample] = ()) -> None:
        """Record samples of devices and nodes; unknown devices are ignored."""
        self.node_samples.update((sample.node, sample) for sample in nodes)
        for sample in samples:
            ledger = self.ledgers.get(sample.device)
            if ledger is not None and ledger.takes(sample):
                before = ledger.sampled_at, ledger.taken()
                ledger.measure(sample)
                self.unseen_releases.discard(sample.device)
                if before[0] is None or before[1] != ledger.taken():
                    self.marks.mark(ledger.device.node)
                self.learned.measure(ledger.holdings)

    def control(
        self,
        background: BackgroundRoom,
        full_disks: Mapping[NodeName, str],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Record where fleet control lets work start from now on, and the weight of each work stream."""
        self.queue.weigh(weights or {})
        before = {*self.background.closed(), *self.full_disks}
        after = {*background.closed(), *full_disks}
        self.background, self.full_disks = background, dict(full_disks)
        for node in sorted(before ^ after):
            self.marks.mark(node, grows=node in before)

    def takes_work(self, node: Node) -> bool:
        return node.ready and not node.cordoned and node.name not in self.full_disks

    def add_task(self, task: Task) -> None:
        """Add a task row, from a database snapshot or from its first event."""
        self.tasks[task.id] = task
        self.mix.add(task.demand)
        self._count_in(task)
        self.awaited.enter(task, self.tasks)
        self.queue.reposition(self.awaited.inheritance.changed, self.tasks)

    def add_lease(self, lease: Lease) -> None:
        self._enter(lease)
        self.leases.setdefault((lease.holder, lease.fence), {})[lease.key] = lease
        self.unconfirmed.note(lease, self.as_of)
        self.accounts.change(lease.tenant, lease.mb, self.as_of)
        for node in self.background.take(lease):
            self.marks.mark(node, grows=False)

    def add_pledge(self, pledge: Pledge) -> None:
        self.pledges.setdefault(pledge.preemptor, {})[pledge.device] = pledge
        if (ledger := self.ledgers.get(pledge.device)) is not None:
            ledger.pledges[pledge.preemptor] = pledge
        self.marks.mark(node_of(pledge.device), grows=False)

    def add_device(self, device: Device) -> None:
        self.inventory_version += 1
        self.marks.mark(device.node)
        if (ledger := self.ledgers.get(device.key)) is not None:
            ledger.register(device)
            self._drop_if_gone(ledger)
            return
        self.ledgers[device.key] = DeviceLedger(device)
        insort(self.by_node.setdefault(device.node, []), device.key)

    def add_node(self, node: Node) -> None:
        self.inventory_version += 1
        self.marks.mark(node.name)
        self.nodes[node.name] = node
        self.use.setdefault(node.name, NodeUsage())

    def add_request(self, request: Request) -> None:
        self.requests[request.id] = request

    def leases_of(self, task: Task) -> list[Lease]:
        """Return the unreleased leases of a task's newest claim, ordered by key."""
        run = self.leases.get((task.id, task.fence), {})
        return [run[key] for key in sorted(run)]

    def holder(self, holder: str, fence: int) -> Task | None:
        """Return the task whose newest claim this is; None if the claim has ended, or was never a task's."""
        task = self.tasks.get(TaskId(holder))
        return task if task is not None and task.fence == fence else None

    def enter_due(self, now: Instant) -> None:
        for task in self.queue.delayed.due(now):
            self.queue.enter(self.tasks[task])

    def snapshot(self) -> "World":
        """Return a copy for planning in another thread, which shares nothing that changes. The copy has no
        queue: of pending tasks it knows only the tenants, so it cannot explain them."""
        twin = World(self.accounts.half_life_seconds)
        twin.position, twin.as_of, twin.inventory_version = self.position, self.as_of, self.inventory_version
        twin.nodes, twin.tasks = dict(self.nodes), dict(self.tasks)
        twin.background, twin.full_disks = self.background.copy(), dict(self.full_disks)
        twin.active, twin.custom_use = self.active.copy(), dict(self.custom_use)
        twin.by_node = {node: list(keys) for node, keys in self.by_node.items()}
        twin.ledgers = {key: ledger.copy() for key, ledger in self.ledgers.items()}
        twin.use = {node: use.copy() for node, use in self.use.items()}
        twin.runs = {node: set(names) for node, names in self.runs.items()}
        twin.leases = {claim: dict(leases) for claim, leases in self.leases.items()}
        twin.pledges = {task: dict(pledges) for task, pledges in self.pledges.items()}
        twin.queue = PendingQueue(dict(self.awaited.inheritance.priorities))
        twin.queue.tenants = Counter(self.queue.tenants)
        twin.learned.sketches = dict(self.learned.sketches)
        twin.mix, twin.accounts = DemandMix(self.mix.edition), self.accounts.copy()
        return twin

    def _take_over(self, event: Event) -> None:
        subject, _, change = event.kind.partition(".")
        match subject:
            case "task":
                self._apply_task(event, change)
            case "lease":
                self._apply_lease(event)
            case "pledge":
                self._apply_pledge(event, change)
            case "device":
                device = self.ledgers.get(DeviceKey(event.key))
                # The device's closure has events of its own, and stays as it is.
                seen = changed(device.device, event.payload) if device else read(event.payload, Device)
                self.add_device(seen)
            case "gpu":
                if (device := self.ledgers.get(DeviceKey(event.key))) is not None:
                    closure = read(event.payload, ClosureChange).closure
                    self.add_device(replace(device.device, closure=closure))
            case "node":
                node = self.nodes.get(NodeName(event.key))
                # The node's cordon and environments have events of their own, and stay as they are.
                self.add_node(changed(node, event.payload) if node else read(event.payload, Node))
            case "cordon" | "environments":
                self.add_node(changed(self.nodes[NodeName(event.key)], event.payload))
            case "request" if change == "made":
                self.add_request(read(event.payload, Request))
            case "request":
                self.requests.pop(event.key, None)
            case "estimate":
                self.learned.apply(event, change)
            case "worker_set":
                self.worker_sets.apply(event, change)
                if change == "over":
                    self.awaited.set_is_over(TaskId(event.key))
            case "queue":
                pause = read(event.payload, QueuePause) if change == "paused" else None
                self.queue.set_pause(event.key, pause, self.tasks)
            case "stream" if change == "changed":
                self.streams[event.key] = read(event.payload, StreamState)
            case "stream":
                self.streams.pop(event.key, None)

    def _apply_task(self, event: Event, change: str) -> None:
        if change == "submitted":
            self.add_task(event.task or read_task(event.payload))
            return
        before = self.tasks.get(TaskId(event.key))
        if before is None:
            return
        after = event.task or changed_task(before, event.payload, event.version)
        # The report of a start frees no room. But it makes victims of the ranks that an elastic gang can
        # lose, since only a running gang goes on without them.
        begins = (before.state, after.state) == (TaskState.ADMITTED, TaskState.RUNNING)
        grows = before.is_active and (not begins or bool(removable_ranks(after)))
        self._count_out(before, grows=grows)
        self.tasks[after.id] = after
        self._count_in(after, grows=grows)
        self.awaited.update(after)
        self.models.answered.note(before, after)
        if preemptions := after.preemptions - before.preemptions:
            match after.holder:
                case Model():
                    self.preempted["model"] += preemptions
                case _:
                    self.preempted["task"] += preemptions
        self.queue.reposition(self.awaited.inheritance.changed, self.tasks)
        for device in self.pledges.get(after.id, ()):
            # Once admitted, a single task uses what was pledged to it. Where it does not use its pledge, room
            # is freed when the pledge ends.
            uses_it = after.state is TaskState.ADMITTED and not isinstance(after.holder, Gang)
            self.marks.mark(node_of(device), grows=not uses_it)
        if stop_notices(before) != stop_notices(after):
            for lease in self.leases_of(after):
                self._enter(lease)
        if after.is_terminal:
            if not isinstance(after.holder, Model):
                self.finished[after.tenant, after.state] += 1
            self._drop_if_done(after.id)

    def _apply_lease(self, event: Event) -> None:
        if event.version == 1:
            self.add_lease(read(event.payload, Lease))
            return
        kind, holder, fence, _rest = event.key.split(":", 3)
        run = self.leases.get((holder, int(fence)), {})
        before = run.get(event.key)
        if before is None:
            return
        after = _changed_lease(before, event.payload)
        self._enter(after)
        self.unconfirmed.note(after, event.at)
        if is_unproven(after) and (ledger := self.ledgers.get(after.device)) is not None:
            ledger.require_new_sample(event.at)
            self.unseen_releases.add(after.device)
        if after.state is not LeaseState.RELEASED:
            run[event.key] = after
            return
        del run[event.key]
        self.accounts.change(after.tenant, -after.mb, event.at)
        self.learned.drop(event.key)
        if not run:
            del self.leases[holder, int(fence)]
            if kind in HOLDERS_OF_TASKS:
                self._drop_if_done(TaskId(holder))

    def _apply_pledge(self, event: Event, change: str) -> None:
        pledge = read(event.payload, Pledge)
        if change == "made":
            self.add_pledge(pledge)
            return
        pledges = self.pledges.get(pledge.preemptor, {})
        pledges.pop(pledge.device, None)
        if not pledges:
            self.pledges.pop(pledge.preemptor, None)
        self.marks.mark(node_of(pledge.device), grows=not self._is_taken_up(pledge))
        if (ledger := self.ledgers.get(pledge.device)) is not None:
            ledger.pledges.pop(pledge.preemptor, None)
            self._drop_if_gone(ledger)

    def _is_taken_up(self, pledge: Pledge) -> bool:
        """Return True if the pledge's task runs on the node and has leased all that was pledged: then the end
        of the pledge frees nothing for others."""
        task = self.tasks.get(pledge.preemptor)
        if task is None or isinstance(task.holder, Gang) or task.node != node_of(pledge.device):
            return False
        leased = sum(lease.mb for lease in self.leases_of(task) if lease.device == pledge.device)
        return task.is_active and leased >= pledge.mb

    def _enter(self, lease: Lease) -> None:
        """Enter a lease in its device's ledger, with its run's stop notice. Raises KeyError for an unknown
        device."""
        task = self.holder(lease.holder, lease.fence)
        freeing_for, stopping = (None, False) if task is None else stop_notice(task, lease.rank)
        ledger = self.ledgers[lease.device]
        unallocated_mb = ledger.unallocated_mb()
        ledger.put(lease, freeing_for, stopping=stopping)
        # A new lease only takes room. A lease that becomes HELD may free some: where use cannot be
        # attributed, the lease explains use that was unexplained before.
        grows = lease.version > 1 and (
            lease.state is not LeaseState.HELD or ledger.unallocated_mb() > unallocated_mb
        )
        self.marks.mark(ledger.device.node, grows=grows)
        self._drop_if_gone(ledger)

    def _count_in(self, task: Task, *, grows: bool = True) -> None:
        self.models.note(task)
        if task.state is TaskState.PENDING:
            self.pending[task.tenant] += 1
            self.pending_bytes[task.tenant] += task.queued_bytes
            if task.held:
                self.pending_held[task.tenant] += 1
            self.queue.add(task)
            if task.waits_until is not None:
                self.expiring[task.id] = task.waits_until
            if key := environment_of(task.demand):
                self.unprepared.setdefault(key, set()).add(task.id)
        elif task.is_active:
            self._count_active(task, +1, grows=grows)
            self.active[task.id] = may_be_late_at(task)
            if vacant_bundles(task):
                self.growable.add(task.id)

    def _count_out(self, task: Task, *, grows: bool) -> None:
        if task.state is TaskState.PENDING:
            self.pending[task.tenant] -= 1
            self.pending_bytes[task.tenant] -= task.queued_bytes
            if task.held:
                self.pending_held[task.tenant] -= 1
            self.queue.remove(task)
            self.expiring.pop(task.id, None)
            if key := environment_of(task.demand):
                self.unprepared[key].discard(task.id)
                if not self.unprepared[key]:
                    del self.unprepared[key]
        else:  # the task is active, since a task that has ended no longer changes
            self._count_active(task, -1, grows=grows)
            self.active.pop(task.id, None)
            self.growable.discard(task.id)

    def _count_active(self, task: Task, sign: int, *, grows: bool) -> None:
        for node, part in rank_tasks(task):
            self.marks.mark(node, grows=grows)
            self.use.setdefault(node, NodeUsage()).count(part, sign)
            runs = self.runs.setdefault(node, set())
            (runs.add if sign > 0 else runs.discard)(task.id)
        count_custom(self.custom_use, task, sign)

    def _drop_if_gone(self, ledger: DeviceLedger) -> None:
        """Forget a removed device once nothing on it is held or pledged. A closed device is kept, because an
        operator's closure holds until it is lifted, also while the device is absent."""
        device = ledger.device
        if not (device.present or device.closure or ledger.holdings or ledger.pledges):
            self.inventory_version += 1
            del self.ledgers[device.key]
            self.by_node[device.node].remove(device.key)
            self.unseen_releases.discard(device.key)

    def _drop_if_done(self, task: TaskId) -> None:
        row = self.tasks.get(task)
        if row is not None and row.is_terminal and (task, row.fence) not in self.leases:
            self.models.drop(row)
            del self.tasks[task]


def _changed_lease(lease: Lease, payload: Payload) -> Lease:
    """Return the lease after a change that was committed. Raises IllegalTransition if the change is not
    allowed."""
    after = changed(lease, payload, version=lease.version + 1)
    if after.overused_mb == lease.overused_mb:
        moved_lease(lease, after.state)
    return after
