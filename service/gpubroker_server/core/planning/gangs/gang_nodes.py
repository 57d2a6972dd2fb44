"""Nodes and their devices, in the form in which the search for a gang's places uses them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from gpubroker_server.core.domain.demand import Demand, device_preference_rank, need_mb
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.node_capacity import NodeHeadroom
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.placement_scores import PlacementScorer, ScoredPlacement, rows

Chosen = tuple[tuple[DeviceKey, Mib], ...]


def taken_share(device: Device, free_mb: int) -> int:
    """Return the share of a device's memory that is leased or otherwise not free, in millionths."""
    size_mb = max(1, device.allocatable_mb)
    return (size_mb - free_mb) * 1_000_000 // size_mb


@dataclass(slots=True)
class GangNode:
    """What is left of one node while the search adds and removes ranks."""

    node: Node
    room: NodeHeadroom
    free: dict[DeviceKey, int]
    """Maps a usable device to the MiB that the gang could have."""
    devices: Mapping[DeviceKey, Device]
    worth: PlacementScorer | None = None
    """The scores of places by the usual demands. If None, places are compared by the room left."""
    ranks: list[int] = field(default_factory=list)
    holders: dict[DeviceKey, int] = field(default_factory=dict)
    """Maps a device to the number of its holders, including the gang's ranks, for `placement: spread`."""
    _spots: dict[Demand, ScoredPlacement | None] = field(default_factory=dict, init=False)
    """The answers of `_spot`, cached until a rank is added or removed."""

    @property
    def room_left(self) -> tuple[float, float]:
        return sum(self.free.values()), self.room.cpu

    def add(self, rank: int, part: Task, chosen: Chosen) -> None:
        self.room = self.room.with_room_of(part, sign=-1)
        for key, mb in chosen:
            self.free[key] -= mb
            self.holders[key] = self.holders.get(key, 0) + 1
        self.ranks.append(rank)
        self._spots.clear()

    def remove(self, part: Task, chosen: Chosen) -> None:
        self.room = self.room.with_room_of(part)
        for key, mb in chosen:
            self.free[key] += mb
            self.holders[key] -= 1
        self.ranks.pop()
        self._spots.clear()

    def score(self, part: Task) -> int:
        """Return a score from 0 to 100 that is higher the less of the usual demands a rank strands on the
        node; 0 without scores."""
        spot = self._spot(part)
        return 0 if spot is None else spot.score

    def device_choices(self, part: Task) -> Iterator[Chosen]:
        """Yield every choice of devices for a rank, the best first, without equivalent choices.

        Preferred kinds come first; then, for a rank with one device, the device where it strands the least;
        then the fullest devices. With `spread`, the devices with the fewest holders come before those with
        the smallest share taken.
        """
        demand = part.demand
        if not self.room.fits(part):
            return
        if not demand.gpus:
            yield ()
            return
        is_spread = demand.placement == "spread"
        spot = self._spot(part) if demand.gpus == 1 else None
        best = {key for key, _ in spot.devices} if spot is not None else ()
        options = sorted(
            (
                device_preference_rank(demand, device),
                key not in best,
                (self.holders.get(key, 0), taken_share(device, free)) if is_spread else (free - need, 0),
                key,
                need,
            )
            for key, device in self.devices.items()
            if (need := need_mb(demand, device)) is not None and need <= (free := self.free[key])
        )
        tried = set()
        for chosen in combinations(options, demand.gpus):
            signature = tuple((unwanted, left, need) for unwanted, _, left, _, need in chosen)
            if signature not in tried:
                tried.add(signature)
                yield tuple(sorted((key, need) for *_, key, need in chosen))

    def _spot(self, part: Task) -> ScoredPlacement | None:
        demand = part.demand
        if self.worth is None or demand.placement == "spread" or demand.where.devices:
            return None
        if demand not in self._spots:
            left = [(self.devices[key], free) for key, free in self.free.items()]
            device_rows = rows(left, self.room.cpu) if self.room.fits(part) else ()
            self._spots[demand] = self.worth.spot(demand, device_rows) if device_rows else None
        return self._spots[demand]

    def signature(self) -> object:
        """Return a value that is equal for nodes which are equivalent for the remaining ranks."""
        room, node = self.room, self.node
        amounts = room.cpu, room.memory_mb, room.runs, room.custom, room.gives_gpus
        devices = ((self.devices[key].sort, free) for key, free in self.free.items())
        return amounts, node.labels, node.ready_environments, bool(self.ranks), tuple(sorted(devices))


def gang_nodes_of(
    draft: Draft,
    task: Task,
    policy: Policy,
    now: Instant,
    worth: PlacementScorer | None = None,
    nodes: Iterable[NodeName] | None = None,
) -> list[GangNode]:
    """Return the usable nodes, with what the task could have of each now. If `nodes` is given, return only
    these, which must be usable."""
    gang_nodes = []
    for name in sorted(draft.usable_nodes() if nodes is None else nodes):
        ledgers = list(draft.usable_ledgers(name, policy, now))
        gang_nodes.append(
            GangNode(
                draft.world.nodes[name],
                draft.headroom(name, task=task.id, priority=task.priority),
                {ledger.device.key: _free_mb(ledger, task) for ledger in ledgers},
                {ledger.device.key: ledger.device for ledger in ledgers},
                worth,
                holders={ledger.device.key: len(ledger.holdings) for ledger in ledgers},
            )
        )
    return gang_nodes


def _free_mb(ledger: DeviceLedger, task: Task) -> int:
    return min(ledger.unallocated_mb(), ledger.free_mb(task=task.id, priority=task.priority))


def empty_gang_nodes(nodes: Iterable[Node], devices: Iterable[Device]) -> list[GangNode]:
    """Return all nodes, ready or not, as if nothing ran on them."""
    devices_on: dict[NodeName, list[Device]] = {}
    for device in devices:
        devices_on.setdefault(device.node, []).append(device)
    return [
        GangNode(
            node,
            NodeHeadroom(node.cpu, node.memory_mb, node.max_runs, node.custom, node),
            {device.key: device.allocatable_mb for device in devices_on.get(node.name, ())},
            {device.key: device for device in devices_on.get(node.name, ())},
        )
        for node in sorted(nodes, key=lambda node: node.name)
    ]


def copy_node(gang_node: GangNode) -> GangNode:
    return GangNode(
        gang_node.node,
        gang_node.room,
        dict(gang_node.free),
        gang_node.devices,
        gang_node.worth,
        holders=dict(gang_node.holders),
    )
