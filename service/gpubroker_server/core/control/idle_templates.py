"""Idle templates: how many more tasks of each the gateways are to submit, so that what is idle has work."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from gpubroker_server.core.domain.demand import Demand, may_use_node, need_mb
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.world.world import World

NAME_PREFIX = "idle/"
"""The name of a template's tasks is this and the template's; no other task may have such a name."""

MEMORY_SECONDS = Seconds(3600.0)
"""After so long without work, hardly a third of what a template has used still counts."""


class Template(NamedTuple):
    """What the leader needs to know of one."""

    name: str
    demand: Demand
    weight: int
    max_running: int

    @property
    def seats(self) -> int:
        """That one task takes."""
        return max(1, self.demand.gpus)


class Seat(NamedTuple):
    """An idle device, or the CPUs of an idle node: what one task may fill."""

    name: str
    node: NodeName
    takers: tuple[Template, ...]


class TemplateSeen(NamedTuple):
    """A template, as the leader publishes it."""

    name: str
    running: int = 0
    waiting: int = 0
    number: int = 0
    """Of its next task, in this term: all gateways choose the same key for it."""
    missing: int = 0
    """So many are to be submitted now, with this number and the following ones."""


def seats(world: World, idle: Iterable[str], templates: Sequence[Template]) -> list[Seat]:
    """Of these devices (by key) and nodes (by name), in the order of nodes."""
    found = []
    for name in idle:
        ledger = world.ledgers.get(DeviceKey(name))
        node = world.nodes.get(NodeName(name) if ledger is None else ledger.device.node)
        if node is None:
            continue
        if ledger is None:
            takers = [one for one in templates if not one.demand.gpus]
        else:
            takers = [one for one in templates if one.demand.gpus and need_mb(one.demand, ledger.device)]
        takers = [one for one in takers if may_use_node(one.demand, node)]
        if takers:
            found.append(Seat(name, node.name, tuple(takers)))
    return sorted(found, key=attrgetter("node", "name"))


def missing(
    open_seats: Sequence[Seat],
    alive: Mapping[str, int],
    waiting: Mapping[str, int],
    used_seconds: Mapping[str, float],
) -> Counter[str]:
    """How many more tasks of each template fill these seats. `alive`: tasks that run or wait, by template.

    Each seat goes to the template for which (what it has, with this task, and has used lately) / weight is
    least, as far as its `max_running` allows; first to those with tasks that wait already. So a few seats are
    shared by weight at each moment, and one seat is shared by weight as time goes by.
    """
    held, to_come, more = Counter(alive), Counter(waiting), Counter[str]()

    def cost(one: Template) -> tuple[bool, float, str]:
        used = (held[one.name] + 1) * one.seats + used_seconds.get(one.name, 0.0)
        return not to_come[one.name], used / one.weight, one.name

    for _, group in groupby(open_seats, attrgetter("node")):
        left = list(group)
        while able := [one for one in _able(left) if to_come[one.name] or held[one.name] < one.max_running]:
            chosen = min(able, key=cost)
            for seat in [seat for seat in left if chosen in seat.takers][: chosen.seats]:
                left.remove(seat)
            if to_come[chosen.name]:
                to_come[chosen.name] -= 1
            else:
                more[chosen.name] += 1
                held[chosen.name] += 1
    return more


def _able(left: Sequence[Seat]) -> Iterator[Template]:
    """Those that find enough seats among these, which are of one node."""
    count = Counter(one for seat in left for one in seat.takers)
    return (one for one, seats in count.items() if seats >= one.seats)


class IdleFill:
    """The templates of one term: which tasks are theirs, and what they have used lately."""

    def __init__(self) -> None:
        self.templates: Sequence[Template] = ()
        self.seen: tuple[TemplateSeen, ...] = ()
        self._seats: Sequence[Seat] = ()
        self._tasks: dict[TaskId, str] = {}
        self._submitted: Counter[str] = Counter()
        """In this term."""
        self._used_seconds: dict[str, float] = {}
        self._looked_at: Instant | None = None

    def note(self, task: Task, *, is_new: bool) -> None:
        """`is_new`: it was submitted in this term."""
        kind, _, name = task.name.partition("/")
        if f"{kind}/" == NAME_PREFIX and task.is_run:
            self._tasks[task.id] = name
            self._submitted[name] += is_new

    def find(self, world: World, idle: Iterable[str]) -> None:
        """What is idle has changed, or the templates have."""
        self._seats = seats(world, idle, self.templates) if self.templates else ()

    def look(self, world: World, idle: Set[str], now: Instant) -> None:
        """`idle`: what is still idle of what was found."""
        running, waiting = self._count(world)
        alive = running + waiting
        self._age(alive, now)
        open_seats = [seat for seat in self._seats if seat.name in idle and _is_open(world, seat)]
        more = missing(open_seats, alive, waiting, self._used_seconds)
        self.seen = tuple(
            TemplateSeen(one, running[one], waiting[one], self._submitted[one], more[one])
            for one in sorted({template.name for template in self.templates} | alive.keys())
        )

    def _count(self, world: World) -> tuple[Counter[str], Counter[str]]:
        """(tasks that run, tasks that wait) of each template."""
        running, waiting = Counter[str](), Counter[str]()
        for id, name in list(self._tasks.items()):
            task = world.tasks.get(id)
            if task is None or task.is_terminal:
                del self._tasks[id]
            elif task.is_active:
                running[name] += 1
            else:
                waiting[name] += 1
        return running, waiting

    def _age(self, alive: Mapping[str, int], now: Instant) -> None:
        """What was to be submitted counts as used too, whether it came or not: a template with refused
        tasks keeps no seat from the others."""
        seconds = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at)
        asked = {one.name: one.missing for one in self.seen}
        kept = max(0.0, 1.0 - seconds / MEMORY_SECONDS)
        self._used_seconds = {
            one.name: kept * self._used_seconds.get(one.name, 0.0)
            + seconds * one.seats * (alive.get(one.name, 0) + asked.get(one.name, 0))
            for one in self.templates
        }
        self._looked_at = now


def _is_open(world: World, seat: Seat) -> bool:
    """Nothing has a lease of the device; nothing runs on the node, if it is the node's CPUs."""
    ledger = world.ledgers.get(DeviceKey(seat.name))
    return not world.runs.get(seat.node) if ledger is None else not ledger.holdings
