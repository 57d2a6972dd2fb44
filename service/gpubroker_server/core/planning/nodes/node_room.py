"""The room of each node for a task: what is free now, what will be free after releases, and what would be
free if all possible victims left."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import is_

from msgspec import Struct

from gpubroker_server.core.domain.demand import NodeUpperBound, ceiling, need_mb
from gpubroker_server.core.domain.device import Device, DeviceSample
from gpubroker_server.core.domain.node_capacity import NodeHeadroom
from gpubroker_server.core.domain.policy import BANDS, Policy
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, TaskId
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.shields import ahead_of_priority
from gpubroker_server.core.planning.nodes.victims import PossibleVictim, after, gives_way, possible_victims
from gpubroker_server.core.world.background import IDLE_TOP
from gpubroker_server.core.world.placement_scores import Row, rows

CRITICAL = BANDS[0][1]
"""The priority from which on a task may preempt runs whatever shields them. A task above IDLE_TOP may preempt
idle work whatever shields it."""


class Room(Struct, frozen=True, dict=True):
    """The room that could be had of a node: of each device, and of CPU, host memory and slots."""

    devices: tuple[tuple[Device, int], ...]
    """The devices in key order, each with its MiB."""
    ceiling: NodeUpperBound
    beside: NodeHeadroom
    device_class: Device | None
    """One of the devices, if no demand can tell the devices apart; else None."""

    def with_amounts(self, devices: tuple[tuple[Device, int], ...], beside: NodeHeadroom) -> "Room":
        """Return a room that has the same devices with other amounts."""
        return Room(devices, ceiling(devices), beside, self.device_class)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """What is left by class of device. A room never changes, so the value needs no invalidation."""
        return rows(self.devices, self.beside.cpu)

    def may_fit(self, task: Task) -> bool:
        """Return False if the room is too small, True if it is perhaps large enough."""
        demand = task.demand
        gpus, amounts = demand.gpus, self.ceiling.amounts
        if gpus and (gpus > len(amounts) or amounts[gpus - 1] < (demand.gpu_mb or 1)):
            return False  # most calls end here, so this test calls nothing else
        return self.ceiling.may_fit(demand) and self.beside.fits(task)

    def fits(self, task: Task) -> bool:
        demand = task.demand
        if not (demand.gpus and self.may_fit(task)):
            return not demand.gpus and self.beside.fits(task)
        if self.device_class is not None and not demand.where.devices:
            need = need_mb(demand, self.device_class)
            return need is not None and need <= self.ceiling.amounts[demand.gpus - 1]
        needs = ((need_mb(demand, device), mb) for device, mb in self.devices)
        return sum(need is not None and need <= mb for need, mb in needs) >= demand.gpus


@dataclass(slots=True)
class _Facts:
    """Facts about one node since its newest revision. Rooms are kept by the number of the node's steps below
    a priority, since all priorities between two steps have the same room."""

    revision: int
    pledges: list[int]
    """The priorities of the node's pledges, ascending."""
    now: dict[int, Room] = field(default_factory=dict)
    soon: dict[int, Room] = field(default_factory=dict)
    runs: Mapping[TaskId, Sequence[PossibleVictim]] | None = None
    """The runs that could be victims of some task; None until asked for."""
    before: Mapping[TaskId, Sequence[PossibleVictim]] = field(default_factory=dict)
    """The value of `runs` before this revision, if it was found with the present samples."""
    samples: list[DeviceSample | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """The priorities of the node's pledges and runs, and those up to which their turn protects runs."""
    most: dict[int, Room] = field(default_factory=dict)
    """Maps a number of steps to the room once all possible victims have left. The bitwise inverse of a number
    maps to the room once only idle work has left."""


Known = dict[NodeName, _Facts]


class NodeRooms:
    """The rooms of the nodes of one draft, for tasks without pledges of their own. What is known about a node
    holds until its next revision."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant, began_at: Instant, known: Known) -> None:
        self._draft = draft
        self._policy = policy
        self._now = now
        self._began_at = began_at
        self._known = known
        self._revisions = draft.changes.by_node

    def now(self, node: NodeName, priority: int) -> Room:
        facts = self._facts(node)
        above = bisect_left(facts.pledges, priority) if facts.pledges else 0
        room = facts.now.get(above)
        if room is None:
            room = facts.now[above] = self.look(node, None, priority)
        return room

    def look(self, node: NodeName, task: TaskId | None, priority: int) -> Room:
        """Return the present room of the node. `task` is the task, if it has pledges."""
        ledgers = self._draft.usable_ledgers(node, self._policy, self._now)
        devices = [(ledger.device, ledger.free_mb(task=task, priority=priority)) for ledger in ledgers]
        return _room(devices, self._draft.headroom(node, task=task, priority=priority))

    def soon(self, node: NodeName, priority: int) -> Room:
        """Return the room of the node once every run that is leaving has left."""
        facts = self._facts(node)
        above = bisect_left(facts.pledges, priority) if facts.pledges else 0
        room = facts.soon.get(above)
        if room is None:
            ledgers = self._draft.usable_ledgers(node, self._policy, self._now)
            devices = [
                (ledger.device, ledger.free_after_releases_mb(priority=priority)) for ledger in ledgers
            ]
            room = facts.soon[above] = _room(devices, self._draft.headroom_soon(node, priority=priority))
        return room

    def most(self, node: NodeName, priority: int, below: int) -> Room:
        """Return the room for a task of this priority once every run that may be preempted for it has left
        too. `below` is the priority below which runs may be preempted (`stops_below`)."""
        if not self.has_runs_below(node, below):
            return self.soon(node, priority)
        facts = self._facts(node)
        above = bisect_left(self.steps(node), priority)
        above = above if below == priority else ~above
        room = facts.most.get(above)
        if room is None:
            leavers = self.leavers(node, below)
            freed: dict[DeviceKey, int] = {}
            for run in leavers:
                for key, mb in run.frees.items():
                    freed[key] = freed.get(key, 0) + mb
            soon = self.soon(node, priority)
            devices = tuple((device, mb + freed.get(device.key, 0)) for device, mb in soon.devices)
            room = soon.with_amounts(devices, after(soon.beside, node, leavers)) if leavers else soon
            facts.most[above] = room
        return room

    def has_runs_below(self, node: NodeName, priority: int) -> bool:
        """Return True if a run below this priority holds room on the node."""
        priorities = self._draft.use(node).priorities
        return bool(priorities) and min(priorities) < priority

    def steps(self, node: NodeName) -> Sequence[int]:
        """Return the priorities above each of which a task may have more room on the node, ascending. Treat
        the list as read-only."""
        facts = self._facts(node)
        if not facts.steps:
            first = (
                ahead_of_priority(victim.task, self._policy, self._began_at)
                for victim in self.possible_victims(node)
            )
            steps = {*facts.pledges, *self._draft.use(node).priorities, *first, IDLE_TOP, CRITICAL - 1}
            facts.steps = sorted(steps)
        return facts.steps

    def took(self, node: NodeName, since: int, task: Task, placement: Placement) -> None:
        """Update the rooms of a node after a placement, if nothing else has changed there since the revision
        `since`."""
        facts = self._known.get(node)
        if facts is None or facts.revision != since:
            return
        facts.revision = self._draft.changes.at(node)
        taken = dict(placement.devices)
        for rooms in (facts.now, facts.soon, facts.most):
            for above, room in rooms.items():
                devices = tuple((device, mb - taken.get(device.key, 0)) for device, mb in room.devices)
                rooms[above] = room.with_amounts(devices, room.beside.with_room_of(task, sign=-1))

    def leavers(self, node: NodeName, priority: int) -> list[PossibleVictim]:
        """Return the possible victims for a task of this priority, in no order."""
        began_at, policy = self._began_at, self._policy
        runs = self.possible_victims(node)
        return [run for run in runs if gives_way(run, priority, policy, began_at)]

    def possible_victims(self, node: NodeName) -> Iterable[PossibleVictim]:
        """Return the possible victims for any task, in no order."""
        facts = self._facts(node)
        if facts.runs is None:
            facts.runs = possible_victims(self._draft, node, self._began_at, facts.before)
        return chain.from_iterable(facts.runs.values())

    def _facts(self, node: NodeName) -> _Facts:
        facts = self._known.get(node)
        if facts is None or facts.revision != self._revisions.get(node, 0):
            ledgers = list(self._draft.ledgers_on(node))
            pledges = self._draft.pledge_priorities(node)
            samples = [ledger.sample for ledger in ledgers]
            before: Mapping[TaskId, Sequence[PossibleVictim]] = {}
            if facts is not None and _are_same(facts.samples, samples):
                before = facts.before if facts.runs is None else facts.runs
            facts = _Facts(self._draft.changes.at(node), pledges, before=before, samples=samples)
            self._known[node] = facts
        return facts


def _are_same(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


def _room(devices: Sequence[tuple[Device, int]], beside: NodeHeadroom) -> Room:
    sorts = {device.sort for device, _ in devices}
    return Room(tuple(devices), ceiling(devices), beside, devices[0][0] if len(sorts) == 1 else None)
