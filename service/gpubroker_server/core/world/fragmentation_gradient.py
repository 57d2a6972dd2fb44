"""Measures of the free room of a node that no typical demand could use, and the choice of the place where a
demand strands the least.

The method is that of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
Fragmentation Gradient Descent" (USENIX ATC 2023; github.com/hkust-adsl/kubernetes-scheduler-simulator).
docs/decisions/0024 says why our own measure differs. Host memory is left out, because the caller has checked
it.

Amounts are in one unit of the caller's choice: MiB in the service, thousandths of a GPU in the benchmark.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

COVERAGE = 0.95
"""The share of recent tasks that the typical demands cover."""

CAPACITY_SHARE = 0.1
"""The weight of the capacity term in our measure, chosen on the openb traces, where all weights from 0.05 to
0.2 give equal results."""

MAX_CACHED = 50_000
"""The number of answers, about 20 MB, that a measure caches before it drops them all."""


class Shape(NamedTuple):
    """The resources that a demand takes of a node, without tenant and priority."""

    cpu: float
    devices: int
    amounts: tuple[tuple[str, int], ...] = ()
    """The kinds that can host the demand, sorted, each with the amount on each device, which is at least 1.
    For a whole device it is all that a device of the kind has."""


class Remainder(NamedTuple):
    """What is left of a node: its CPU, and the amount on each of its devices of one kind, in index order."""

    cpu: float
    left: tuple[int, ...]
    kind: str


class DeviceChoice(NamedTuple):
    score: int
    """A number from 0 to 100; 50 or more means that nothing new is stranded."""
    devices: tuple[int, ...]
    """The chosen indexes into `Remainder.left`, ascending."""


Inventory = Mapping[str, tuple[int, int]]
"""Maps a kind to the number of its devices and the amount of a whole one."""


class TypicalDemand(NamedTuple):
    cpu: float
    devices: int
    amount: int | None
    """The amount on each device; None if the kind cannot host the demand."""
    weight: float


def typical_shapes(mix: Mapping[Shape, int], coverage: float = COVERAGE) -> dict[Shape, float]:
    """Return the most frequent shapes that together cover the share `coverage` of all tasks, with their
    shares among themselves. Of equally frequent shapes the larger comes first, as in the paper's
    simulator."""
    enough = coverage * sum(mix.values())
    counted: dict[Shape, int] = {}
    covered = 0
    for shape, count in sorted(mix.items(), key=lambda item: (item[1], item[0]), reverse=True):
        if covered >= enough:
            break
        counted[shape] = count
        covered += count
    return {shape: count / covered for shape, count in counted.items()}


class FragmentationMeasure:
    """The weighted room of a node that typical demands could not use, and the placement scores that follow
    from it. Answers are cached; they depend on the arguments alone."""

    def __init__(
        self, weights: Mapping[Shape, float], *, capacity_share: float, step: float, in_tasks: bool
    ) -> None:
        """`step` is the growth of lost room, about one device, at which a score falls from 50 to 26.

        With `in_tasks`, room counts by the number of tasks of a shape that it holds, not by its amount.
        """
        self._weights = tuple(weights.items())
        self._capacity_share = capacity_share
        self._step = step
        self._in_tasks = in_tasks
        self._usual: dict[str, tuple[tuple[TypicalDemand, ...], float]] = {}
        """Maps a kind to the typical demands there, and to the sum of their weights."""
        self._tables: dict[tuple[tuple[int, ...], str], Table] = {}
        self._lost: dict[Remainder, float] = {}
        self._spots: dict[Shape, dict[Remainder, DeviceChoice | None]] = {}
        self._remembered = 0
        self.worked_out = 0
        """The number of rows of devices evaluated so far, which is the cost of answers that were not
        cached."""

    def lost(self, room: Remainder) -> float:
        """Return the weighted room that typical demands could not use, between 0 and `whole`."""
        key = Remainder(room.cpu, tuple(sorted(room.left)), room.kind)
        lost = self._lost.get(key)
        if lost is None:
            self._make_room()
            lost = self._lost[key] = self._table(key.left, key.kind).lost(key.cpu)
        return lost

    def whole(self, room: Remainder) -> float:
        """Return what `lost` would be if no typical demand could use any of the room."""
        return self._table(tuple(sorted(room.left)), room.kind).whole

    def spot(self, shape: Shape, room: Remainder) -> DeviceChoice | None:
        """Return the place where the demand strands the least on this node; None if it does not fit. Of
        places with equal scores the lowest device wins. A demand for several devices gets the fullest that
        have room."""
        spots = self._spots.setdefault(shape, {})
        try:
            return spots[room]
        except KeyError:
            self._make_room()
            spot = spots[room] = self._best(shape, room)
            return spot

    def _best(self, shape: Shape, room: Remainder) -> DeviceChoice | None:
        if shape.cpu > room.cpu:
            return None
        if not shape.devices:
            return DeviceChoice(self._score(room, remaining_after(room, shape, (), 0)), ())
        amount = dict(shape.amounts).get(room.kind)
        if amount is None:
            return None
        best: DeviceChoice | None = None
        lost = self.lost(room)
        for devices in candidate_devices(room.left, shape.devices, amount):
            score = self.rate(lost - self.lost(remaining_after(room, shape, devices, amount)))
            if best is None or score > best.score:
                best = DeviceChoice(score, devices)
        return best

    def rate(self, gain: float) -> int:
        """Return the score, from 0 to 100, of a gain in usable room; 50 for no gain."""
        steps = max(-700.0, gain / self._step)  # exp(710) overflows
        return math.floor(100 / (1 + math.exp(-steps)))

    def _score(self, before: Remainder, after: Remainder) -> int:
        return self.rate(self.lost(before) - self.lost(after))

    def _table(self, left: tuple[int, ...], kind: str) -> "Table":
        table = self._tables.get((left, kind))
        if table is None:
            usual = self._usual.get(kind)
            if usual is None:
                demands = tuple(self._on(kind))
                usual = self._usual[kind] = demands, math.fsum(typical.weight for typical in demands)
            self.worked_out += 1
            table = self._tables[left, kind] = Table(left, *usual, self._capacity_share)
        return table

    def _on(self, kind: str) -> list[TypicalDemand]:
        demands = []
        for shape, weight in self._weights:
            amount = dict(shape.amounts).get(kind)
            task_size = task_amount(shape, kind) if self._in_tasks else 1
            demands.append(TypicalDemand(shape.cpu, shape.devices, amount, weight / task_size))
        return sorted(demands, key=lambda typical: typical.cpu)

    def _make_room(self) -> None:
        self._remembered += 1
        if self._remembered <= MAX_CACHED:
            return
        self._remembered = 0
        self._tables.clear()
        self._lost.clear()
        for spots in self._spots.values():
            spots.clear()


class Table:
    """The use that typical demands could make of one row of devices, for any amount of CPU."""

    def __init__(
        self,
        left: tuple[int, ...],
        known: tuple[TypicalDemand, ...],
        total_weight: float,
        capacity_share: float,
    ) -> None:
        """`total_weight` is the sum of the weights of `known`."""
        self.whole = sum(left) * total_weight
        self._uses: list[tuple[float, float, float, int]] = []
        """The uses by CPU: the CPU of one task, the value if one task fits, the value of each task that fits,
        and the number of tasks that fit if CPU allows."""
        # A measure makes thousands of tables, each for up to 64 demands, so this loop calls little.
        count = len(left)
        sums = list(accumulate(reversed(left), initial=0))  # sums over the emptiest devices: `left` ascends
        for cpu, devices, amount, weight in known:
            if amount is None:
                continue
            too_full = bisect_left(left, amount)
            if count - too_full < devices:
                continue
            usable, slots = sums[count - too_full], [room // amount for room in left[too_full:]]
            copies = sum(slots) if devices == 1 else most_copies(slots, devices)
            once = (1 - capacity_share) * weight * usable
            loss = capacity_share * weight * devices * amount
            self._uses.append((cpu, once, loss, copies))

    def lost(self, cpu_left: float) -> float:
        usable = 0.0
        for cpu, once, loss, copies in self._uses:  # in order of CPU
            if cpu > cpu_left:
                break
            if loss and cpu:
                allowed = int(cpu_left / cpu + 1e-9)  # 0.3 / 0.1 is a little less than 3
                copies = allowed if allowed < copies else copies
            usable += once + loss * copies
        return max(0.0, self.whole - usable)


def fgd(shapes: Mapping[Shape, float], device: float) -> FragmentationMeasure:
    """Return the paper's measure: a shape counts by its share of all tasks, including tasks without devices.

    F is the sum over shapes of share x R if the node cannot host the shape, else of share x what is left on
    devices too full for it. R is what is left on all devices. `device` is the amount of a whole device.
    """
    return FragmentationMeasure(shapes, capacity_share=0.0, step=device, in_tasks=False)


def tasks_lost(shapes: Mapping[Shape, float], stock: Inventory) -> FragmentationMeasure:
    """Return the service's measure: the number of typical tasks that what is left could not hold.

    A shape counts by its share x sqrt(all of the stock / what of it can host the shape), and room by (0.9 x
    the paper's F + 0.1 x (R - what copies of the shape could fill)) / what one task takes.
    """
    weights = {shape: share * scarcity(shape, stock) for shape, share in shapes.items() if shape.devices}
    weights = {shape: weight for shape, weight in weights.items() if weight}
    count = sum(number for number, _ in stock.values())
    device = sum(number * size for number, size in stock.values()) / count if count else 1.0
    step = device * math.fsum(weight / task_amount(shape) for shape, weight in weights.items())
    return FragmentationMeasure(weights, capacity_share=CAPACITY_SHARE, step=step or 1.0, in_tasks=True)


def scarcity(shape: Shape, stock: Inventory) -> float:
    """Return 1 for a shape that fits anywhere, more the less of the stock can host it, and 0 if nothing can.

    The square root is a compromise: without scarcity, demands for a rare kind find it taken; with the plain
    ratio the rest of the stock is filled worse.
    """
    everything = sum(number * size for number, size in stock.values())
    usable = sum(stock[kind][0] * stock[kind][1] for kind, _ in shape.amounts if kind in stock)
    return math.sqrt(everything / usable) if usable else 0.0


def task_amount(shape: Shape, kind: str | None = None) -> int:
    """Return the amount that one task takes of all its devices together, on this kind or else on the kind
    where it takes the least."""
    amounts = dict(shape.amounts)
    amount = amounts.get(kind) if kind is not None else None
    return shape.devices * (amount or min(amounts.values()))


def most_copies(slots: list[int], devices: int) -> int:
    """Return how many tasks of `devices` different devices each fit, if each device has that many slots."""
    if devices == 1:
        return sum(slots)
    # A device serves each task once, so at most `copies` of its slots count. That many slots are also enough:
    # if they are dealt out to the tasks in turn, device by device, no task gets two slots of one device
    # (McNaughton's wrap-around rule).
    copies = sum(slots) // devices
    while copies and sum(min(slot, copies) for slot in slots) < copies * devices:
        copies -= 1
    return copies


def candidate_devices(left: tuple[int, ...], devices: int, amount: int) -> list[tuple[int, ...]]:
    """Return the choices worth comparing: for one device, the lowest of equally full ones; for several
    devices, only the fullest."""
    fitting = [place for place, room in enumerate(left) if room >= amount]
    if devices > 1:
        fullest = sorted(fitting, key=lambda place: left[place])[:devices]
        return [tuple(sorted(fullest))] if len(fullest) == devices else []
    lowest: dict[int, int] = {}
    for place in fitting:
        lowest.setdefault(left[place], place)
    return [(place,) for place in lowest.values()]


def remaining_after(room: Remainder, shape: Shape, devices: tuple[int, ...], amount: int) -> Remainder:
    left = list(room.left)
    for place in devices:
        left[place] -= amount
    return Remainder(round(room.cpu - shape.cpu, 6), tuple(left), room.kind)
