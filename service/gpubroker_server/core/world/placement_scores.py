"""Scores of placements on real nodes by the fragmentation measures, and the mix of demands that the measures
use."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import fsum
from typing import NamedTuple

from msgspec.structs import replace

from gpubroker_server.core.domain.demand import Demand, PlacementConstraints, device_preference_rank, need_mb
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.units import DeviceKey, Mib
from gpubroker_server.core.world.fragmentation_gradient import (
    Inventory,
    Remainder,
    Shape,
    fgd,
    remaining_after,
    tasks_lost,
    typical_shapes,
)
from gpubroker_server.core.world.ledger import DeviceLedger

MAX_TYPICAL = 64
"""The most shapes that count as typical. The number is limited because each shape is evaluated on each state
of a node."""

MAX_CACHED_STATES = 10_000
"""The number of cached answers, some megabytes, at which all are dropped."""

DeviceClasses = Mapping[str, tuple[int, Device]]
"""Maps a device class to the number of its devices and one of them."""


class Row(NamedTuple):
    """The room that is left for one task on the devices of one class of one node."""

    room: Remainder
    devices: tuple[Device, ...]
    """The devices in key order, which is that of `room.left`."""


class ScoredPlacement(NamedTuple):
    unwanted: int
    score: int
    """A number from 0 to 100; 50 or more means that nothing new is stranded."""
    devices: tuple[tuple[DeviceKey, Mib], ...]
    """The devices in key order, each with the MiB that the demand takes."""


def device_classes(devices: Iterable[Device]) -> DeviceClasses:
    examples: dict[str, Device] = {}
    count: Counter[str] = Counter()
    for device in devices:
        if device.allocatable_mb:
            examples.setdefault(device.sort, device)
            count[device.sort] += 1
    return {name: (count[name], examples[name]) for name in sorted(examples)}


def rows(left: Iterable[tuple[Device, int]], cpu: float) -> tuple[Row, ...]:
    """Return what is left of a node, one row per class of devices. `left` has the node's devices in key order
    with their free MiB. A negative number counts as 0, also of CPUs: what is pledged of a node may be more
    than it has left, and a demand for no CPU fits all the same."""
    cpu = max(0.0, cpu)
    sorts: dict[str, list[tuple[Device, int]]] = {}
    for device, free_mb in left:
        sorts.setdefault(device.sort, []).append((device, max(0, free_mb)))
    return tuple(
        Row(Remainder(cpu, tuple(mb for _, mb in found), name), tuple(device for device, _ in found))
        for name, found in sorted(sorts.items())
    )


class PlacementScorer:
    """Scores placements. Answers are cached; they depend on the arguments alone."""

    def __init__(self, edition: Mapping[Demand, int], classes: DeviceClasses, policy: str) -> None:
        """`policy` is `stranded` for the service's measure or `fgd` for the paper's."""
        self._classes = classes
        self._shapes: dict[Demand, Shape] = {}
        self._stranded: dict[Remainder, tuple[Mib, ...]] = {}
        self.usual = self._usual(edition)
        stock: Inventory = {name: (count, device.allocatable_mb) for name, (count, device) in classes.items()}
        self._measure = fgd(self.usual, _mean(stock)) if policy == "fgd" else tasks_lost(self.usual, stock)

    def spot(self, demand: Demand, node: tuple[Row, ...]) -> ScoredPlacement | None:
        """Return the place on this node where the demand strands the least; None if the devices do not
        suffice.

        Of equally preferred devices the one with the highest score wins, then the lowest device. A demand for
        several devices gets the most preferred, then the fullest that have room.
        """
        shape = self.shape(demand)
        if not demand.gpus:
            rooms = [row.room for row in node]
            after = [remaining_after(room, shape, (), 0) for room in rooms]
            return ScoredPlacement(0, self._score(rooms, after), ())
        if len(node) == 1:
            return self._on_same_class(demand, shape, node[0])
        return self._on_mixed(demand, shape, node)

    def stranded(self, room: Remainder) -> tuple[Mib, ...]:
        """Return the MiB of each device that typical demands could not use, weighted by the demands'
        shares."""
        stranded = self._stranded.get(room)
        if stranded is None:
            if len(self._stranded) >= MAX_CACHED_STATES:
                self._stranded.clear()
            stranded = self._stranded[room] = tuple(self._useless(room))
        return stranded

    def _useless(self, room: Remainder) -> Iterator[Mib]:
        usable = [0.0] * len(room.left)
        for shape, share in self.usual.items():
            amount = dict(shape.amounts).get(room.kind)
            if amount is None or shape.cpu > room.cpu:
                continue
            fitting = [place for place, left in enumerate(room.left) if left >= amount]
            if len(fitting) >= shape.devices:
                for place in fitting:
                    usable[place] += share
        for left, share in zip(room.left, usable, strict=True):
            yield Mib(round(left * max(0.0, 1.0 - share)))

    @property
    def worked_out(self) -> int:
        """The number of rows of devices evaluated so far, without cached ones."""
        return self._measure.worked_out

    def shape(self, demand: Demand) -> Shape:
        """Return what the demand would take of devices of each class of the fleet."""
        shape = self._shapes.get(demand)
        if shape is None:
            shape = self._shapes[demand] = Shape(demand.cpu, demand.gpus, tuple(self._amounts(demand)))
        return shape

    def _amounts(self, demand: Demand) -> Iterator[tuple[str, int]]:
        if demand.gpus:
            for name, (_, device) in self._classes.items():
                need = need_mb(demand, device)
                if need is not None:
                    yield name, need

    def _usual(self, edition: Mapping[Demand, int]) -> dict[Shape, float]:
        """Return the most frequent shapes that could run on the fleet. Of equally frequent shapes the larger
        comes first, as in the paper's simulator."""
        mix: Counter[Shape] = Counter()
        for demand, count in edition.items():
            shape = self.shape(demand)
            if shape.amounts:
                mix[shape] += count
        return typical_shapes(
            dict(sorted(mix.items(), key=lambda item: (item[1], item[0]), reverse=True)[:MAX_TYPICAL])
        )

    def _on_same_class(self, demand: Demand, shape: Shape, row: Row) -> ScoredPlacement | None:
        spot = self._measure.spot(shape, row.room)
        if spot is None:
            return None
        unwanted = demand.gpus * device_preference_rank(demand, row.devices[0])
        need = Mib(dict(shape.amounts)[row.room.kind])
        return ScoredPlacement(
            unwanted, spot.score, tuple([(row.devices[place].key, need) for place in spot.devices])
        )

    def _on_mixed(self, demand: Demand, shape: Shape, node: tuple[Row, ...]) -> ScoredPlacement | None:
        amounts = dict(shape.amounts)
        options: list[_Option] = []
        for number, (room, devices) in enumerate(node):
            amount = amounts.get(room.kind)
            for place, left in enumerate(room.left):
                if amount is not None and amount <= left:
                    preference = device_preference_rank(demand, devices[place])
                    key = devices[place].key
                    options.append(_Option(preference, left - amount, key, Mib(amount), number, place))
        if len(options) < demand.gpus:
            return None
        rooms = [row.room for row in node]
        beside = [remaining_after(room, shape, (), 0) for room in rooms]
        ways = [sorted(options)[: demand.gpus]] if demand.gpus > 1 else [[option] for option in options]
        spots = [self._taking(shape, rooms, beside, way) for way in ways]
        return min(spots, key=lambda spot: (spot.unwanted, -spot.score, spot.devices))

    def _taking(
        self, shape: Shape, rooms: list[Remainder], beside: list[Remainder], chosen: list["_Option"]
    ) -> ScoredPlacement:
        """Return the placement that takes the devices of `chosen`. `beside` is what is left of rows from
        which the placement takes no device."""
        after = list(beside)
        for number in {option.row for option in chosen}:
            places = tuple(option.place for option in chosen if option.row == number)
            [amount] = {option.need for option in chosen if option.row == number}
            after[number] = remaining_after(rooms[number], shape, places, amount)
        unwanted = sum(option.unwanted for option in chosen)
        return ScoredPlacement(
            unwanted,
            self._score(rooms, after),
            tuple(sorted((option.key, option.need) for option in chosen)),
        )

    def _score(self, before: Iterable[Remainder], after: Iterable[Remainder]) -> int:
        lost = self._measure.lost
        return self._measure.rate(fsum(map(lost, before)) - fsum(map(lost, after)))


class _Option(NamedTuple):
    unwanted: int
    left_mb: int
    key: DeviceKey
    need: Mib
    row: int
    place: int


def _mean(stock: Inventory) -> float:
    return sum(count * whole for count, whole in stock.values()) / sum(count for count, _ in stock.values())


MAX_COUNTED = 10_000
"""The number of submissions above which all counts are halved, so that old submissions fade."""

MAX_DEMANDS = 1_000
"""The number of different demands above which counts are halved as well, which drops rare demands."""

FRESH_SHARE = 0.125
"""The share of new submissions with which a new edition is published."""


class DemandMix:
    """Counts of the submissions of each demand. They depend only on the submissions and their order."""

    def __init__(self, edition: Mapping[Demand, int] | None = None) -> None:
        self.edition: Mapping[Demand, int] = {} if edition is None else edition
        """The published counts. They stay for a while, so that scorers keep their caches."""
        self._counts: dict[Demand, int] = {}
        self._total = 0
        self._fresh = 0
        self._worths: dict[str, PlacementScorer | None] = {}
        """Maps a policy to its scorer for this edition and these devices."""
        self._classes: DeviceClasses = {}
        self._inventory_version = -1

    def add(self, demand: Demand) -> None:
        """Count a submission, or each rank of a gang. Demands without devices are not counted."""
        for rank in demand.bundles:
            self.add(rank)
        if not demand.gpus:
            return
        plain = _plain(demand)
        self._counts[plain] = self._counts.get(plain, 0) + 1
        self._total += 1
        self._fresh += 1
        if self._total > MAX_COUNTED or len(self._counts) > MAX_DEMANDS:
            self._counts = {known: count // 2 for known, count in self._counts.items() if count > 1}
            self._total = sum(self._counts.values())
        if self._fresh >= FRESH_SHARE * self._total:
            self.edition = dict(self._counts)
            self._worths.clear()
            self._fresh = 0

    def worth(
        self, ledgers: Mapping[DeviceKey, DeviceLedger], version: int, policy: str
    ) -> PlacementScorer | None:
        """Return the scorer for these devices; None while no demand is typical. Until the edition or the
        devices change, every call returns one object. `version` is that of the devices."""
        if policy not in ("stranded", "fgd"):
            return None
        if version != self._inventory_version:
            self._inventory_version = version
            classes = device_classes(ledger.device for ledger in ledgers.values())
            if classes != self._classes:
                self._classes = classes
                self._worths.clear()
        if policy not in self._worths:
            scorer = PlacementScorer(self.edition, self._classes, policy)
            self._worths[policy] = scorer if scorer.usual else None
        return self._worths[policy]


@lru_cache(4096)
def _plain(demand: Demand) -> Demand:
    """Return the demand with only the parts that decide on which devices it fits, and its CPU."""
    where = demand.where
    kinds = PlacementConstraints(
        kinds=where.kinds, min_power=where.min_power, min_device_mb=where.min_device_mb
    )
    return replace(demand, memory_mb=Mib(0), custom=(), slots=(), pool="", placement="pack", where=kinds)
