"""Idle templates: decide how many tasks of each template the gateways are to submit, so that idle devices
have work."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from gpubroker_server.core.domain.demand import Demand, may_use_node, need_mb
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.holders import Run
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.world.background import gives_way
from gpubroker_server.core.world.world import World

NAME_PREFIX = "idle/"
"""The beginning of the name of a template's tasks. The template's name follows. No other task may have such a
name."""

MEMORY_SECONDS = Seconds(3600.0)
"""Time constant with which a template's use is forgotten. After this time without work, about a third of the
use still counts."""

MAX_WAITING = 32
"""The most waiting tasks of one template. The number is small because gateways submit the tasks one by one,
and each look must be short."""

FIRST_PAUSE_SECONDS = Seconds(2.0)
LONGEST_PAUSE_SECONDS = Seconds(600.0)


class Template(NamedTuple):
    """The facts about a template that the leader needs."""

    name: str
    demand: Demand
    weight: int
    max_running: int

    @property
    def seats(self) -> int:
        """The number of seats that one task takes."""
        return max(1, self.demand.gpus)


class Seat(NamedTuple):
    """A place that one task may fill: an idle device, or the CPUs of an idle node."""

    name: str
    node: NodeName
    takers: tuple[Template, ...]


class TemplateSeen(NamedTuple):
    """The state of a template, as the leader publishes it."""

    name: str
    running: int = 0
    waiting: int = 0
    number: int = 0
    """The number of the template's next task in this term. All gateways derive the same idempotency key from
    it."""
    missing: int = 0
    """The number of tasks that are to be submitted now, with this number and the following ones."""
    paused_until: Instant | None = None
    """The time before which no task is to be submitted, since the last one failed."""


class Pause(NamedTuple):
    """A pause after a failure. It is twice as long as the pause before it, if no task has succeeded since."""

    seconds: Seconds
    until: Instant


def seats(world: World, idle: Iterable[str], templates: Sequence[Template]) -> list[Seat]:
    """Return the seats on these devices (by key) and nodes (by name), in the order of nodes."""
    all_seats = []
    for name in idle:
        ledger = world.ledgers.get(DeviceKey(name))
        node = world.nodes.get(NodeName(name) if ledger is None else ledger.device.node)
        if node is None:
            continue
        if ledger is None:
            takers = [template for template in templates if not template.demand.gpus]
        else:
            room_mb = (
                ledger.unallocated_mb() + ledger.held_mb()
            )  # the present holders have left when the seat is open
            takers = [template for template in templates if 0 < _need_mb(template, ledger.device) <= room_mb]
        takers = [template for template in takers if may_use_node(template.demand, node)]
        if takers:
            all_seats.append(Seat(name, node.name, tuple(takers)))
    return sorted(all_seats, key=attrgetter("node", "name"))


def _need_mb(template: Template, device: Device) -> int:
    """Return the MiB that a task of the template needs on the device; 0 if it cannot run there."""
    return (need_mb(template.demand, device) or 0) if template.demand.gpus else 0


def missing(
    open_seats: Iterable[Seat],
    alive: Mapping[str, int],
    waiting: Mapping[str, int],
    used_seconds: Mapping[str, float],
    paused: Container[str] = (),
) -> Counter[str]:
    """Return how many more tasks of each template fill these seats. `alive` has the number of tasks of each
    template that run or wait; `waiting` has the waiting ones.

    Each seat goes to the template for which (seats that it has with this task + recent use) / weight is
    least, as far as its `max_running` allows. Templates with waiting tasks go first. So several seats are
    shared by weight at each moment, and a single seat is shared over time.
    """
    held_tasks, to_come, more = Counter(alive), Counter(waiting), Counter[str]()

    may_come: dict[str, int] = {}

    def is_wanted(template: Template) -> bool:
        if (number := may_come.get(template.name)) is None:
            waits = waiting.get(template.name, 0)
            new = min(template.max_running - alive.get(template.name, 0), MAX_WAITING - waits)
            number = may_come[template.name] = waits + (0 if template.name in paused else max(0, new))
        return number > 0

    def cost(template: Template) -> tuple[bool, float, str]:
        used = (held_tasks[template.name] + 1) * template.seats + used_seconds.get(template.name, 0.0)
        return not to_come[template.name], used / template.weight, template.name

    for _, group in groupby(open_seats, attrgetter("node")):
        left = [SeatGroup(takers, len(list(same))) for takers, same in groupby(group, attrgetter("takers"))]
        while able := [template for template in _able(left) if is_wanted(template)]:
            chosen = min(able, key=cost)
            left = _without(left, chosen)
            may_come[chosen.name] -= 1
            if to_come[chosen.name]:
                to_come[chosen.name] -= 1
            else:
                more[chosen.name] += 1
                held_tasks[chosen.name] += 1
    return more


class SeatGroup(NamedTuple):
    """The number of seats of one node that the same templates may take."""

    takers: tuple[Template, ...]
    seats: int


def _able(left: Sequence[SeatGroup]) -> Iterable[Template]:
    """Return the templates of which a task finds enough seats among these."""
    if len(left) == 1:
        return (template for template in left[0].takers if template.seats <= left[0].seats)
    templates = {template.name: template for seat_group in left for template in seat_group.takers}
    count = Counter[str]()
    for seat_group in left:
        for template in seat_group.takers:
            count[template.name] += seat_group.seats
    return (template for name, template in templates.items() if template.seats <= count[name])


def _without(left: Sequence[SeatGroup], chosen: Template) -> list[SeatGroup]:
    """Return the seats that remain after a task of the chosen template has taken its seats."""
    need, after = chosen.seats, list[SeatGroup]()
    for seat_group in left:
        taken = min(need, seat_group.seats) if chosen in seat_group.takers else 0
        need -= taken
        if taken < seat_group.seats:
            after.append(SeatGroup(seat_group.takers, seat_group.seats - taken))
    return after


class IdleFill:
    """The templates of one term, with their tasks and what they have used lately."""

    def __init__(self, sample_period_seconds: float) -> None:
        self._period_seconds = sample_period_seconds
        self.templates: Sequence[Template] = ()
        self.seen: tuple[TemplateSeen, ...] = ()
        self._seats: Sequence[Seat] = ()
        self._tasks: dict[TaskId, str] = {}
        self._submitted: Counter[str] = Counter()
        """Template -> the number of tasks submitted in this term."""
        self._used_seconds: dict[str, float] = {}
        self._pauses: dict[str, Pause] = {}
        self._looked_at: Instant | None = None

    def note(self, task: Task, *, is_new: bool) -> None:
        """Count the task if it belongs to a template. `is_new` is True if the task was submitted in this
        term."""
        if (name := _template_of(task)) is not None:
            self._tasks[task.id] = name
            self._submitted[name] += is_new

    def end(self, task: Task, now: Instant) -> None:
        """Note how a task of a template ended. A template pauses after a failed task, so that failing tasks
        are not submitted for ever. Tasks that fail during a pause were submitted before it and do not
        count."""
        name = _template_of(task)
        if name is None:
            return
        if task.state is TaskState.SUCCEEDED:
            self._pauses.pop(name, None)
        elif task.state is TaskState.FAILED and not self._is_paused(name, now):
            last = self._pauses.get(name)
            seconds = FIRST_PAUSE_SECONDS if last is None else min(2 * last.seconds, LONGEST_PAUSE_SECONDS)
            self._pauses[name] = Pause(Seconds(seconds), Instant(now + seconds))

    def _is_paused(self, name: str, now: Instant) -> bool:
        return name in self._pauses and now < self._pauses[name].until

    def find(self, world: World, idle: Iterable[str]) -> None:
        """Find the seats anew. Called when the idle resources or the templates may have changed."""
        self._seats = seats(world, idle, self.templates) if self.templates else ()
        names = {template.name for template in self.templates}
        self._pauses = {name: pause for name, pause in self._pauses.items() if name in names}

    def look(self, world: World, idle: Set[str], now: Instant) -> None:
        """Set `seen` to the number of tasks of each template that run, wait and are missing. `idle` has the
        names of the devices and nodes that are still idle."""
        running, waiting = self._count(world)
        alive = running + waiting
        self._age(alive, now)
        paused = {name: pause.until for name, pause in self._pauses.items() if self._is_paused(name, now)}
        more = missing(self._open_seats(world, idle, now), alive, waiting, self._used_seconds, paused)
        self.seen = tuple(
            TemplateSeen(
                template,
                running[template],
                waiting[template],
                self._submitted[template],
                more[template],
                paused.get(template),
            )
            for template in sorted({template.name for template in self.templates} | alive.keys())
        )

    def _open_seats(self, world: World, idle: Set[str], now: Instant) -> Iterator[Seat]:
        """Yield the seats on which a task may start now, because all present holders give way."""
        for name, group in groupby(self._seats, attrgetter("node")):
            if not world.takes_work(world.nodes[name]):
                continue
            is_closed = world.background.is_closed(name)
            for seat in group:
                ledger = world.ledgers.get(DeviceKey(seat.name))
                if ledger is None:
                    is_open = not world.runs.get(name)
                else:
                    is_open = not (is_closed or ledger.takes_nothing(now, self._period_seconds))
                    is_open = is_open and all(
                        gives_way(holding.lease.priority) for holding in ledger.holdings.values()
                    )
                if is_open and seat.name in idle:
                    yield seat

    def _count(self, world: World) -> tuple[Counter[str], Counter[str]]:
        """Return (running tasks, waiting tasks) by template."""
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
        """Age the use of each template, and add the use since the last look. Tasks that were to be submitted
        count as used even if they were not, so that a template whose tasks are refused does not keep seats
        from the others."""
        seconds = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at)
        asked = {seen.name: seen.missing for seen in self.seen}
        remaining_share = max(0.0, 1.0 - seconds / MEMORY_SECONDS)
        self._used_seconds = {
            template.name: remaining_share * self._used_seconds.get(template.name, 0.0)
            + seconds * template.seats * (alive.get(template.name, 0) + asked.get(template.name, 0))
            for template in self.templates
        }
        self._looked_at = now


def _template_of(task: Task) -> str | None:
    name = task.name
    if not name or not name.startswith(NAME_PREFIX):
        return None
    match task.holder:
        case Run():
            return name.removeprefix(NAME_PREFIX)
        case _:
            return None
