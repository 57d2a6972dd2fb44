"""Where a task can run now: a node, and on it as many devices as it asks for."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf
from types import MappingProxyType

from gpubroker_server.core.domain.demand import Demand, device_preference_rank, need_mb, node_preference_rank
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, TaskId, node_of
from gpubroker_server.core.planning.budget import ProbeBudget, Steps
from gpubroker_server.core.planning.forecasts.reservations import Reservations
from gpubroker_server.core.planning.gangs.gang_nodes import gang_nodes_of
from gpubroker_server.core.planning.gangs.gang_search import Gang, place_gang
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.node_room import NodeRooms, Room
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.background import IDLE_TOP
from gpubroker_server.core.world.placement_scores import PlacementScorer, Row, rows
from gpubroker_server.core.world.world import World

Found = tuple[tuple[float, int, float, tuple[str, ...]], Placement]
"""((memory left on its devices, runs on the node if they count, CPU left on it, names), placement): the
smallest is the best."""

Option = tuple[float, DeviceKey, Mib]
"""(MiB left on the device afterwards, negated for `spread`; device; MiB to lease)"""

CLOSE_LOOK = 5
"""Cost of probing a node's devices, in units of one quick capacity check."""

Allows = Callable[[DeviceKey, Mib], bool]
"""Whether a task may take so many MiB of a device."""

FAR_MB = 2**40
"""Added for each unmet preference: more than any device has left."""


STARTS_AT_ONCE = 4
"""A task without GPUs passes over a node with more runs that are being started, for one with fewer."""

BUSY_MB = 2**30
"""Added for each STARTS_AT_ONCE of them: less than an unmet preference, more than any room that is left."""


def scores_of(world: World, policy: Policy) -> PlacementScorer | None:
    """Placement scores as of now; None if the policy does not ask for them or no demand is known."""
    return world.mix.worth(world.ledgers, world.inventory_version, policy.placement)


@dataclass(slots=True)
class PlaceTable:
    """The best place of equal tasks on each node that has one."""

    seen: int = -1
    """Revision of the draft's changes up to which it holds; -1: no node was probed yet."""
    found: dict[NodeName, Found] = field(default_factory=dict)


PlaceTables = dict[tuple[Demand, int] | TaskId, PlaceTable]
"""(demand, priority) -> places of such tasks; a task with pledges has a table of its own."""

NOWHERE: Mapping[NodeName, Found] = MappingProxyType({})


class Places:
    """The places of one draft. For equal tasks only nodes that changed are probed again."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        *,
        scores: PlacementScorer | None = None,
        budget: ProbeBudget | None = None,
        rooms: NodeRooms | None = None,
        tables: PlaceTables | None = None,
    ) -> None:
        """`scores` of places, as they were when the cycle began; None: by room left on the devices.
        `tables`: of earlier drafts that share this draft's changes."""
        self._budget = ProbeBudget(inf) if budget is None else budget
        self._rooms = NodeRooms(draft, policy, now, now, {}) if rooms is None else rooms
        self._tables: PlaceTables = {} if tables is None else tables
        self._draft = draft
        self._policy = policy
        self._now = now
        self._scores = scores
        self._nodes = frozenset(draft.usable_nodes())

    def best(self, task: Task) -> Placement | None:
        """The best place for a task. Total order, smallest first:

        1. unmet preferences: kinds, device by device, and nodes
        2. for a task without GPUs, runs that the node is starting, STARTS_AT_ONCE by STARTS_AT_ONCE
        3. how much of the usual demands it strands, in percent; or room left on its devices, then CPU left on
           the node, if the task or the policy says `spread` or `best_fit`, if the task names its devices, or
           if no demand is known. `spread`: most room first, then fewest runs on the node, then most CPU
        4. names of node and devices
        """
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        found = [place for node in self._nodes if (place := self.on(node, task)) is not None]
        return min(found)[1] if found else None

    def table(self, task: Task, nodes: Set[NodeName] | None = None) -> Steps[Mapping[NodeName, Found]]:
        """The best place on each node that has one; what is reserved counts as free. `nodes`: the others have
        none."""
        self._budget.spent += 1
        if self._draft.short_of(task, self._policy.custom_limits):
            return NOWHERE
        key = task.id if self._draft.pledges_of(task.id) else (task.demand, task.priority)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = PlaceTable()
        changes = self._draft.changes
        for node in self._nodes if table.seen < 0 else changes.since(table.seen):
            place = self.on(node, task) if nodes is None or node in nodes else None
            if place is not None:
                table.found[node] = place
            else:
                table.found.pop(node, None)
            if self._budget.calls_for_a_pause:
                yield
        table.seen = changes.revision
        return table.found

    def kept(self, task: Task) -> Placement | None:
        """On the devices pledged to it and no others; None if it cannot start there now."""
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        mine = self._draft.pledges_of(task.id)
        node = node_of(min(mine))
        found = self.on(node, task, lambda device, _mb: device in mine)
        return None if found is None else found[1]

    def best_beside(
        self,
        reservations: Reservations,
        task: Task,
        table: Mapping[NodeName, Found],
        *,
        all_reservations: bool,
    ) -> Placement | None:
        """The best of these places where the task delays no reservation ahead of it, or none at all."""
        places = [place for node, place in table.items() if node not in reservations.on]
        if not reservations.is_depth_reached:
            for node in reservations.on.keys() & table.keys():
                window = reservations.backfill_window(task, node, all_reservations=all_reservations)
                place = self.on(node, task, window.allows) if window.fits((task,)) else None
                if place is not None:
                    places.append(place)
        return min(places)[1] if places else None

    def gang(self, task: Task, reservations: Reservations | None = None) -> Gang | None:
        """Places for all ranks of a gang, within its quota. `reservations`: only where it delays
        none that is ahead of it."""
        self._budget.spent += CLOSE_LOOK * len(self._nodes)
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        scores = self._scores
        before = 0 if scores is None else scores.worked_out
        gang_nodes = gang_nodes_of(self._draft, task, self._policy, self._now, scores)
        most = Quotas(self._draft, self._policy).max_ranks(task)
        found = place_gang(
            task,
            gang_nodes if reservations is None else list(reservations.nodes_for_gang(task, gang_nodes)),
            most,
        )
        if scores is not None:
            self._budget.spent += CLOSE_LOOK * (scores.worked_out - before)
        return found

    def without_idle_work(self, task: Task, nodes: Set[NodeName]) -> Steps[Placement | None]:
        """The best place on these nodes once all idle work has left, and all that is leaving anyway."""
        places: list[Found] = []
        for node in nodes & self._nodes:
            self._budget.spent += 1
            room = self._rooms.most(node, task.priority, IDLE_TOP + 1)
            place = self._in(room, node, task, None) if room.may_fit(task) else None
            if place is not None:
                places.append(place)
            if self._budget.calls_for_a_pause:
                yield
        return min(places)[1] if places else None

    def on(self, node: NodeName, task: Task, allows: Allows | None = None) -> Found | None:
        """The best place on one node, of the devices that are allowed."""
        self._budget.spent += 1
        if node not in self._nodes:
            return None
        is_kept = self._is_kept_for(node, task)
        rooms, priority = self._rooms, task.priority
        room = rooms.look(node, task.id, priority) if is_kept else rooms.now(node, priority)
        self._budget.spent += CLOSE_LOOK * is_kept
        return self._in(room, node, task, allows) if room.may_fit(task) else None

    def _in(self, room: Room, node: NodeName, task: Task, allows: Allows | None) -> Found | None:
        demand = task.demand
        self._budget.spent += CLOSE_LOOK
        far = FAR_MB * node_preference_rank(demand, self._draft.world.nodes[node])
        if demand.gpus == 0:
            far += BUSY_MB * (self._draft.use(node).starting // STARTS_AT_ONCE)
        if self._scores is None or demand.placement == "spread" or demand.where.devices:
            return self._by_room(room, node, task, far, allows)
        there = _allowed(room, task, allows) if allows else room.rows()
        return self._by_worth(node, task, far, self._scores, there)

    def _by_room(
        self, room: Room, node: NodeName, task: Task, far: int, allows: Allows | None
    ) -> Found | None:
        demand = task.demand
        is_spread = "spread" in (demand.placement, self._policy.placement)
        sign, runs = (-1, self._draft.use(node).runs) if is_spread else (1, 0)
        options = _devices(room, task, sign)
        if allows is not None:
            options = (option for option in options if allows(option[1], option[2]))
        chosen = nsmallest(demand.gpus, options)
        if len(chosen) < demand.gpus:
            return None
        devices = tuple(sorted((key, mb) for _, key, mb in chosen))
        names = (node, *(key for key, _ in devices))
        rank = far + sum(left for left, _, _ in chosen)
        return (rank, runs, sign * room.beside.cpu, names), Placement(node, devices)

    def _by_worth(
        self, node: NodeName, task: Task, far: int, worth: PlacementScorer, there: tuple[Row, ...]
    ) -> Found | None:
        before = worth.worked_out
        spot = worth.spot(task.demand, there)
        self._budget.spent += CLOSE_LOOK * (worth.worked_out - before)
        if spot is None:
            return None
        devices = []
        for key in spot.devices:
            need = need_mb(task.demand, self._draft.ledger(key).device)
            assert need is not None, "it was found to fit"
            devices.append((key, need))
        rank = far + FAR_MB * spot.unwanted - spot.score
        return (rank, 0, 0.0, (node, *spot.devices)), Placement(node, tuple(devices))

    def _is_kept_for(self, node: NodeName, task: Task) -> bool:
        """Whether room on the node is pledged to this task."""
        return any(node_of(device) == node for device in self._draft.pledges_of(task.id))


def _devices(room: Room, task: Task, sign: int) -> Iterator[Option]:
    for device, mb in room.devices:
        need = need_mb(task.demand, device)
        if need is not None and need <= mb:
            far = FAR_MB * device_preference_rank(task.demand, device)
            yield sign * (mb - need) + far, device.key, need


def _allowed(room: Room, task: Task, allows: Allows) -> tuple[Row, ...]:
    """Devices that are not allowed have nothing left."""
    left = []
    for device, mb in room.devices:
        need = need_mb(task.demand, device) if task.demand.gpus else None
        left.append((device, mb if need is None or allows(device.key, need) else 0))
    return rows(left, room.beside.cpu)
