"""Places where a task can run now: a node, and as many of its devices as the task asks for."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from heapq import nsmallest
from types import MappingProxyType

from gpubroker_server.core.domain.demand import Demand, device_preference_rank, need_mb, node_preference_rank
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, TaskId, node_of
from gpubroker_server.core.planning.budget import CLOSE_LOOK, PROBE_SIFTED, PROBES_AT_A_TIME, Steps
from gpubroker_server.core.planning.forecasts.reservations import Reservations
from gpubroker_server.core.planning.gangs.gang_nodes import gang_nodes_of, taken_share
from gpubroker_server.core.planning.gangs.gang_search import Gang, place_gang
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.node_room import NodeRooms, Room
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.background import IDLE_TOP
from gpubroker_server.core.world.placement_scores import PlacementScorer, Row, rows
from gpubroker_server.core.world.world import World

Devices = tuple[tuple[DeviceKey, Mib], ...]

Found = tuple[tuple[float, int, int, float, NodeName, Devices], Placement]
"""A sort key and a placement. The smallest is the best.

The first entry of the key is the penalty for unmet preferences, plus the MiB left on the devices, the number
of holders on them for `spread`, or the negated placement score. The others are the share of the devices that
is taken and the runs on the node, which only `spread` counts; the CPU left, which placement scores do not
count; and the names of node and devices."""

Option = tuple[float, int, DeviceKey, Mib]
"""A device with its sort key. The entries are the MiB left on the device afterwards, or for `spread` the
number of its holders; the share of the device that is taken, which is 0 unless for `spread`; the device; and
the MiB to lease."""

Allows = Callable[[DeviceKey, Mib], bool]
"""Returns True if a task may take so many MiB of a device."""

FAR_MB = 2**40
"""The amount added to a place's key for each unmet preference: more than any device has left."""


STARTS_AT_ONCE = 4
"""The number of runs that a node may be starting before a task without GPUs prefers nodes that start
fewer."""

BUSY_MB = 2**30
"""The amount added to a place's key for each STARTS_AT_ONCE runs that the node is starting: less than an
unmet preference, more than any room that is left."""


def scores_of(world: World, policy: Policy) -> PlacementScorer | None:
    """Return the present placement scores; None if the policy does not ask for them or no demand is known."""
    return world.mix.worth(world.ledgers, world.inventory_version, policy.placement)


@dataclass(slots=True)
class PlaceTable:
    """The best place of equal tasks on each node that has one."""

    seen: int = -1
    """The revision of the draft's changes up to which the table holds; -1 before the first probe."""
    found: dict[NodeName, Found] = field(default_factory=dict)


PlaceTables = dict[tuple[Demand, int] | TaskId, PlaceTable]
"""Maps a demand, and the lowest priority of pledges that keep room from it, to the places of such tasks. A
task with pledges has a table of its own."""

NO_NODES: Set[NodeName] = frozenset()

NOWHERE: Mapping[NodeName, Found] = MappingProxyType({})


class Places:
    """The places of one draft. For a task equal to an earlier one, only nodes that changed are probed
    again."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        *,
        scores: PlacementScorer | None = None,
        rooms: NodeRooms | None = None,
        tables: PlaceTables | None = None,
    ) -> None:
        """`scores` rank places as of the beginning of the cycle; with None the room left on the devices ranks
        them. `tables` are those of earlier drafts that share this draft's changes."""
        self._rooms = NodeRooms(draft, policy, now, now, {}) if rooms is None else rooms
        self._tables: PlaceTables = {} if tables is None else tables
        self._draft = draft
        self._policy = policy
        self._now = now
        self._scores = scores
        self._nodes = frozenset(draft.usable_nodes())

    def best(self, task: Task) -> Placement | None:
        """Return the best place for a task; None if there is none. The order of places is total, smallest
        first:

        1. the unmet preferences for kinds (counted by device) and nodes
        2. for a task without GPUs, the runs that the node is starting, divided by STARTS_AT_ONCE
        3. the percentage of the usual demands that the place strands. The room left on the devices, then the
           CPU left on the node, count instead if the task or the policy says `best_fit`, if the task names
           its devices, or if no demand is known. With `spread` these count instead: the fewest holders on the
           devices, then the smallest share of their memory taken (`taken_share`), then the fewest runs on the
           node, then the most CPU left
        4. the names of node and devices
        """
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        places = [place for node in self._nodes if (place := self.on(node, task)) is not None]
        return min(places)[1] if places else None

    def table(self, task: Task, nodes: Set[NodeName] | None = None) -> Steps[Mapping[NodeName, Found]]:
        """Return the best place on each node that has one. Reserved room counts as free. All nodes outside
        `nodes` are known to have no place."""
        if self._draft.short_of(task, self._policy.custom_limits):
            return NOWHERE
        kept_nodes = self._nodes_kept_for(task)
        # Tasks of two priorities with no pledge between them have the same room on every node. The key has
        # the priority of the lowest pledge that binds them, so a table stays right while no pledge begins or
        # ends.
        key = task.id if kept_nodes else (task.demand, self._draft.least_pledge_from(task.priority))
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = PlaceTable()
        changes, scores, cost = self._draft.changes, self._scores, 1.0
        worked_out = 0 if scores is None else scores.worked_out
        for node in self._nodes if table.seen < 0 else changes.since(table.seen):
            if nodes is not None and node not in nodes:
                table.found.pop(node, None)
                continue
            place = self._best_on(node, task, kept_nodes)
            if place is not None:
                table.found[node] = place
                cost += CLOSE_LOOK
            else:
                table.found.pop(node, None)
            cost += CLOSE_LOOK + 1 if node in kept_nodes else 1
            if cost >= PROBES_AT_A_TIME:
                if scores is not None:
                    cost += CLOSE_LOOK * (scores.worked_out - worked_out)
                    worked_out = scores.worked_out
                yield cost
                cost = 0.0
        table.seen = changes.revision
        yield cost
        return table.found

    def kept(self, task: Task) -> Placement | None:
        """Return a place on the devices that are pledged to the task; None if it cannot start there now."""
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        pledges = self._draft.pledges_of(task.id)
        node = node_of(min(pledges))
        found = self.on(node, task, lambda device, _mb: device in pledges)
        return None if found is None else found[1]

    def best_beside(
        self,
        reservations: Reservations,
        task: Task,
        table: Mapping[NodeName, Found],
        *,
        all_reservations: bool,
    ) -> Placement | None:
        """Return the best of these places where the task delays no reservation ahead of it, or with
        `all_reservations` no reservation at all."""
        places = [place for node, place in table.items() if node not in reservations.on]
        if not reservations.is_depth_reached:
            for node in reservations.on.keys() & table.keys():
                window = reservations.backfill_window(task, node, all_reservations=all_reservations)
                place = self.on(node, task, window.allows) if window.fits((task,)) else None
                if place is not None:
                    places.append(place)
        return min(places)[1] if places else None

    def gang(
        self, task: Task, reservations: Reservations | None = None, *, all_reservations: bool = False
    ) -> Gang | None:
        """Return places for all ranks of a gang, within its quota. With `reservations`, only places count
        where the gang delays no reservation ahead of it, or with `all_reservations` no reservation at all."""
        if self._draft.short_of(task, self._policy.custom_limits):
            return None
        gang_nodes = gang_nodes_of(self._draft, task, self._policy, self._now, self._scores)
        within_limits = self._draft.ranks_within_limits(task, self._policy.custom_limits)
        most = min(Quotas(self._draft, self._policy).max_ranks(task), within_limits)
        if reservations is not None:
            gang_nodes = list(
                reservations.nodes_for_gang(task, gang_nodes, all_reservations=all_reservations)
            )
        return place_gang(task, gang_nodes, most)

    def without_idle_work(self, task: Task, nodes: Set[NodeName]) -> Steps[Placement | None]:
        """Return the best place on the given nodes once all idle work, and all that is leaving anyway, has
        left. Only nodes that run idle work are searched: if the task fitted on another node, the search for
        victims, which comes first, would have answered that the task waits for that room."""
        places: list[Found] = []
        with_idle_work = [n for n in nodes & self._nodes if self._rooms.has_runs_below(n, IDLE_TOP + 1)]
        yield PROBE_SIFTED * len(nodes)
        for node in with_idle_work:
            room = self._rooms.most(node, task.priority, IDLE_TOP + 1)
            place = self._in(room, node, task, None) if room.may_fit(task) else None
            if place is not None:
                places.append(place)
            yield CLOSE_LOOK
        return min(places)[1] if places else None

    def on(self, node: NodeName, task: Task, allows: Allows | None = None) -> Found | None:
        """Return the best place on one node, using only devices that are allowed; None if there is none."""
        return self._best_on(node, task, self._nodes_kept_for(task), allows)

    def _best_on(
        self, node: NodeName, task: Task, kept_nodes: Set[NodeName], allows: Allows | None = None
    ) -> Found | None:
        if node not in self._nodes:
            return None
        if node in kept_nodes:
            room = self._rooms.look(node, task.id, task.priority)
        else:
            room = self._rooms.now(node, task.priority)
        return self._in(room, node, task, allows) if room.may_fit(task) else None

    def _in(self, room: Room, node: NodeName, task: Task, allows: Allows | None) -> Found | None:
        demand, penalty = task.demand, 0
        if demand.where.prefer_nodes:
            penalty = FAR_MB * node_preference_rank(demand, self._draft.world.nodes[node])
        if demand.gpus == 0:
            penalty += BUSY_MB * (self._draft.use(node).starting // STARTS_AT_ONCE)
        if self._scores is None or demand.placement == "spread" or demand.where.devices:
            return self._by_room(room, node, task, penalty, allows)
        spot = self._scores.spot(demand, _allowed(room, task, allows) if allows else room.rows)
        if spot is None:
            return None
        rank = penalty + FAR_MB * spot.unwanted - spot.score
        return (rank, 0, 0, 0.0, node, spot.devices), Placement(node, spot.devices)

    def _by_room(
        self, room: Room, node: NodeName, task: Task, penalty: int, allows: Allows | None
    ) -> Found | None:
        demand = task.demand
        is_spread = "spread" in (demand.placement, self._policy.placement)
        sign, runs = (-1, self._draft.use(node).runs) if is_spread else (1, 0)
        options = self._devices(room, task, is_spread=is_spread)
        if allows is not None:
            options = (option for option in options if allows(option[2], option[3]))
        chosen = nsmallest(demand.gpus, options)
        if len(chosen) < demand.gpus:
            return None
        devices = tuple(sorted((key, mb) for *_, key, mb in chosen))
        rank, share = penalty + sum(row[0] for row in chosen), sum(row[1] for row in chosen)
        return (rank, share, runs, sign * room.beside.cpu, node, devices), Placement(node, devices)

    def _devices(self, room: Room, task: Task, *, is_spread: bool) -> Iterator[Option]:
        for device, mb in room.devices:
            need = need_mb(task.demand, device)
            if need is not None and need <= mb:
                penalty = FAR_MB * device_preference_rank(task.demand, device)
                if is_spread:
                    holders = len(self._draft.ledger(device.key).holdings)
                    yield penalty + holders, taken_share(device, mb), device.key, need
                else:
                    yield penalty + mb - need, 0, device.key, need

    def _nodes_kept_for(self, task: Task) -> Set[NodeName]:
        """Return the nodes on which room is pledged to this task."""
        pledges = self._draft.pledges_of(task.id)
        return frozenset(map(node_of, pledges)) if pledges else NO_NODES


def _allowed(room: Room, task: Task, allows: Allows) -> tuple[Row, ...]:
    """Return what is left by class of device, with nothing left on devices that are not allowed."""
    left = []
    for device, mb in room.devices:
        need = need_mb(task.demand, device) if task.demand.gpus else None
        left.append((device, mb if need is None or allows(device.key, need) else 0))
    return rows(left, room.beside.cpu)
