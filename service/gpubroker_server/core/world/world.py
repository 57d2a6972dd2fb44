"""Everything that decisions depend on, built from the event log alone."""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import QueuePause, Request, StreamState
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
"""(holder, fence)"""


class World:
    """Mutable, owned by one loop, changed by `apply` (committed events), and by `measure` and `control` (what
    was last measured, and what fleet control makes of it) only.

    `tasks` holds every task that is not terminal, and terminal ones until their last lease is released. From
    a database snapshot, rows are added in this order: nodes, devices, tasks, leases, usage, pledges,
    requests. Each is entered into what is there before it: a lease into the ledger of its device with the
    stop notice of its task, usage in place of what entering the leases has counted.
    """

    def __init__(self, usage_half_life_seconds: Seconds = HALF_LIFE_SECONDS) -> None:
        self.position = Position(0)
        self.lineage = Lineage(0)
        """The lineage of the log. Claims made in it have higher fences: runs of an earlier lineage, of which
        the database knows nothing any more, may still have the others."""
        self.as_of = Instant(0.0)
        self.tasks: dict[TaskId, Task] = {}
        self.worker_sets = WorkerSets()
        self.awaited = DependencyIndex(self.worker_sets)
        self.queue = PendingQueue(self.awaited.inheritance.priorities)
        self.expiring = DueTimes()
        self.marks = WorldRevisions()
        """Nodes on which anything changed that a plan depends on, time apart."""
        self.nodes: dict[NodeName, Node] = {}
        self.ledgers: dict[DeviceKey, DeviceLedger] = {}
        self.node_samples: dict[NodeName, NodeSample] = {}
        self.background = BackgroundRoom()
        self.full_disks: dict[NodeName, str] = {}
        """Nodes on which nothing starts because a disk is too full, and which one."""
        self.inventory_version = 0
        """Version that rises with every new or changed node or device row."""
        self.by_node: dict[NodeName, list[DeviceKey]] = {}
        self.leases: dict[Claim, dict[str, Lease]] = {}
        """Unreleased leases of each claim, by key."""
        self.unconfirmed = UnconfirmedHolders()
        self.unseen_releases: set[DeviceKey] = set()
        """Devices that give nothing before a sample shows that memory released there is free."""
        self.pledges: dict[TaskId, dict[DeviceKey, Pledge]] = {}
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, StreamState] = {}
        self.use: dict[NodeName, NodeUsage] = {}
        self.custom_use: dict[str, float] = {}
        self.active = DueTimes()
        """Active tasks, with the earliest instant at which a limit of theirs, or of a rank, can pass."""
        self.runs: dict[NodeName, set[TaskId]] = {}
        self.growable: set[TaskId] = set()
        """Running elastic gangs that lack ranks."""
        self.finished: Counter[tuple[str, TaskState]] = Counter()
        """(tenant, terminal state) -> how many tasks ever ended so; survives pruning."""
        self.preempted: Counter[str] = Counter()
        """`task` or `model` -> number of times that one made room since this World was first read."""
        self.pending: Counter[str] = Counter()
        """Tenant -> number of its pending tasks, whatever they wait for."""
        self.pending_held: Counter[str] = Counter()
        """Tenant -> number of its pending tasks that are held: they wait for a person."""
        self.pending_bytes: Counter[str] = Counter()
        """Tenant -> bytes that its pending tasks keep for their runs."""
        self.models = ModelIndex()
        self.learned = RunHistory()
        self.mix = DemandMix()
        self.accounts = Accounts(usage_half_life_seconds)

    def apply(self, events: Iterable[Event]) -> None:
        """Apply committed events in order of position; earlier ones are skipped.

        Raises OutOfSync if one is missing: then nothing is changed. Raises it, too, if one does not fit: then
        the events before it are applied.
        """
        for event in consecutive(events, self.position):
            self.as_of = event.at  # first: leases and accounts are entered as of this instant
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
        """Take over samples of devices and nodes; unknown devices are ignored."""
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
        """Take over what fleet control lets start from now on, and how much each work stream counts."""
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
        if (known := self.ledgers.get(device.key)) is not None:
            known.register(device)
            self._drop_if_gone(known)
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
        """The task with this newest claim; None if the claim has ended, or was never a task's."""
        task = self.tasks.get(TaskId(holder))
        return task if task is not None and task.fence == fence else None

    def enter_due(self, now: Instant) -> None:
        for task in self.queue.delayed.due(now):
            self.queue.enter(self.tasks[task])

    def snapshot(self) -> "World":
        """A copy without its queue, for planning in another thread: it shares nothing that changes. It cannot
        explain pending tasks, of which it knows only the tenants."""
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
                # Its closure, which has events of its own, stays as it is.
                seen = changed(device.device, event.payload) if device else read(event.payload, Device)
                self.add_device(seen)
            case "gpu":
                if (device := self.ledgers.get(DeviceKey(event.key))) is not None:
                    closure = read(event.payload, ClosureChange).closure
                    self.add_device(replace(device.device, closure=closure))
            case "node":
                known = self.nodes.get(NodeName(event.key))
                # Its cordon, which has events of its own, stays as it is.
                self.add_node(changed(known, event.payload) if known else read(event.payload, Node))
            case "cordon":
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
        # A start that is reported gives no room. It does make victims of the ranks that an elastic gang can
        # lose: only a running gang goes on without them.
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
            # Once admitted, a single task uses what was kept for it; a pledge elsewhere grows when it ends.
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
        """True if its task runs on the node and has leased as much there: nothing grows for others."""
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
        # A new lease only takes room. One that becomes HELD may give some: it explains use that counted as
        # unexplained where use cannot be attributed.
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
        else:  # active: what has ended changes no more
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
        """A removed device is forgotten once nothing on it is held or pledged, unless it is closed: an
        operator's closure outlasts its absence."""
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
    """Return the lease after a change that was committed. Raises IllegalTransition."""
    after = changed(lease, payload, version=lease.version + 1)
    if after.overused_mb == lease.overused_mb:
        moved_lease(lease, after.state)
    return after
