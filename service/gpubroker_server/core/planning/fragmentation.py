"""The share of free memory that is in pieces too small to use, and the check whether tasks wait because of
that."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpubroker.wire.stats import Scattered
from msgspec import Struct

from gpubroker_server.core.domain.decisions import Decision, Fields, Notice
from gpubroker_server.core.domain.demand import Demand, may_use_node, need_mb
from gpubroker_server.core.domain.interval import Interval
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, Seconds
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.placement_scores import rows
from gpubroker_server.core.world.world import World

LOOK_SECONDS = Seconds(30.0)
"""The time between two looks. Only a state that two looks in a row have seen is reported."""


class FreeMemory(NamedTuple):
    """The free memory of some devices, and how much of it is stranded."""

    free_mb: int = 0
    stranded_mb: int = 0

    @property
    def share(self) -> float | None:
        """The share (0 to 1) of the free memory that is stranded; None if nothing is free."""
        return self.stranded_mb / self.free_mb if self.free_mb else None

    def plus(self, other: "FreeMemory") -> "FreeMemory":
        return FreeMemory(self.free_mb + other.free_mb, self.stranded_mb + other.stranded_mb)


class Fragmentation(Struct, frozen=True):
    """The free memory of usable devices, and how much of it the usual demands could not use.

    Demands count by their share of recent submissions: of memory that only a quarter of the submissions could
    use, three quarters are stranded. Without recent submissions nothing is stranded.
    """

    devices: Mapping[DeviceKey, FreeMemory]
    kinds: Mapping[str, FreeMemory]
    """The free memory of each kind of GPU, in name order."""

    @property
    def total(self) -> FreeMemory:
        total = FreeMemory()
        for free in self.kinds.values():
            total = total.plus(free)
        return total


def fragmentation(world: World, policy: Policy, now: Instant) -> Fragmentation:
    worth = world.mix.worth(world.ledgers, world.inventory_version, "stranded")
    devices: dict[DeviceKey, FreeMemory] = {}
    kinds: dict[str, FreeMemory] = {}
    draft = Draft(world)
    for node in draft.usable_nodes():
        left = [(ledger.device, ledger.free_mb()) for ledger in draft.usable_ledgers(node, policy, now)]
        for row in rows(left, draft.headroom(node).cpu) if left else ():
            stranded = (0,) * len(row.devices) if worth is None else worth.stranded(row.room)
            for device, free_mb, stranded_mb in zip(row.devices, row.room.left, stranded, strict=True):
                devices[device.key] = free = FreeMemory(free_mb, stranded_mb)
                kinds[device.kind] = kinds.get(device.kind, FreeMemory()).plus(free)
    return Fragmentation(devices, {kind: kinds[kind] for kind in sorted(kinds)})


def find_scattered_demand(world: World, policy: Policy, now: Instant) -> Scattered | None:
    """Return the most common waiting demand for devices if it lacks only a piece that is large enough, else
    None. Ignores CPU, host memory and limits, which `explain` covers."""
    waiting: Counter[Demand] = Counter()
    for group in world.queue.groups.values():
        if group.demand.gpus:
            waiting[group.demand] += len(group)
    if not waiting:
        return None
    [(demand, count)] = waiting.most_common(1)
    pieces = list(_pieces(Draft(world), demand, policy, now))
    if not pieces:
        return None
    roomy = Counter(piece.node for piece in pieces if piece.free_mb >= piece.need_mb)
    need, free = min(piece.need_mb for piece in pieces), sum(piece.free_mb for piece in pieces)
    if free < demand.gpus * need or any(count >= demand.gpus for count in roomy.values()):
        return None
    return Scattered(demand.gpus, need, count, free, max(piece.free_mb for piece in pieces))


class ScatteredWatch:
    """Reports once when the most common waiting demand would fit into the sum of free memory but into no
    single piece, and once when that is over. The watch lives in one leader's memory: the next leader reports
    again."""

    def __init__(self) -> None:
        self._pace = Interval(LOOK_SECONDS)
        self._found_before = False
        self._is_said = False

    def look(self, world: World, policy: Policy, now: Instant) -> list[Decision]:
        """Look at most every LOOK_SECONDS, and return the notices. A state that is seen only once is not
        reported, because it may end with the next start."""
        if not self._pace.is_due(now):
            return []
        self._pace.done(now)
        found = find_scattered_demand(world, policy, now)
        is_lasting = found is not None and self._found_before
        self._found_before = found is not None
        if found is None and self._is_said:
            self._is_said = False
            return [_notice("memory.defragmented", {})]
        if found is not None and is_lasting and not self._is_said:
            self._is_said = True
            sizes = {"need_mb": found.gpu_mb, "free_mb": found.free_mb, "largest_mb": found.largest_mb}
            return [_notice("memory.fragmented", {"waiting": found.waiting, **sizes})]
        return []


def _notice(kind: str, facts: Fields) -> Decision:
    return Decision("cluster", kind, notices=(Notice(kind, "cluster", facts),))


class _Piece(NamedTuple):
    node: NodeName
    free_mb: int
    need_mb: Mib


def _pieces(draft: Draft, demand: Demand, policy: Policy, now: Instant) -> Iterator[_Piece]:
    """Yield every device that could host the demand."""
    for node in draft.usable_nodes():
        if may_use_node(demand, draft.world.nodes[node]):
            for ledger in draft.usable_ledgers(node, policy, now):
                need = need_mb(demand, ledger.device)
                if need is not None:
                    yield _Piece(node, _free_mb(ledger), need)


def _free_mb(ledger: DeviceLedger) -> int:
    return max(0, ledger.free_mb())
