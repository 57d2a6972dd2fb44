"""How long the planner takes on 1,000 GPUs with 100,000 tasks waiting: the core alone, without any IO.

125 nodes of 8 GPUs of three kinds, empty at first, and tasks of 200 different demands, 4 tenants and 5
priorities. After the first plan the cluster is full; then runs end one by one, and each end is followed by a
cycle. Times are those of planning; taking over what was decided (`World.apply`) is told beside them.
"""

import random
import resource
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TypeVar

from bench.measuring import Figure, percentile, say
from service.core.cycle import SLICE, plan_cycle
from service.core.demand import Demand
from service.core.device import Device, DeviceSample, Node
from service.core.events import events_of
from service.core.explain import explain
from service.core.lease import LeaseState, move_lease
from service.core.memory import Memory
from service.core.plan import Decision, write_move
from service.core.policy import Policy
from service.core.task import Move, Task, TaskState
from service.core.units import DeviceKey, Instant, Mib, NodeName, Position, TaskId, device_key
from service.core.world import World

GIB = 1024
KINDS = (("H100", 80), ("A100", 80), ("A100", 40), ("H100", 80), ("L40S", 48))
"""(kind, GiB) of all GPUs of a node, taken in turn."""
PRIORITIES = (5, 20, 50, 60, 80)
TENANTS = ("research", "product", "search", "batch")
BEGIN = 1_000_000.0

T = TypeVar("T")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=125, help="of 8 GPUs each")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--demands", type=int, default=200)
    parser.add_argument("--cycles", type=int, default=1000, help="ends of runs, a cycle after each")
    parser.add_argument("--explained", type=int, default=200)
    parser.add_argument("--seed", type=int, default=42)


def measure(options: Namespace) -> Iterator[Figure]:
    chance = random.Random(options.seed)
    room = Room(a_cluster(options, chance))
    first = room.cycle()
    say(
        f"first plan: {len(first)} slices, the longest {1000 * max(first):.1f} ms, "
        f"{len(room.world.active):,} started; taking them over took {room.applied_s:.2f} s more"
    )
    yield Figure("plan", "plan.first_s", sum(first), "s", len(first))
    room.settle()
    cycles, slices = [], []
    for _ in range(options.cycles):
        room.pass_time(0.02)
        room.let_one_end(chance)
        cycles.append(sum(taken := room.cycle()))
        slices += taken
    say(f"cycles: median {1000 * percentile(cycles, 50):.2f} ms, longest slice {1000 * max(slices):.1f} ms")
    yield Figure("plan", "plan.cycle.p99_ms", 1000 * percentile(cycles, 99), "ms", len(cycles))
    waiting = sorted(task.id for task in room.world.tasks.values() if task.state is TaskState.PENDING)
    explained = [
        timed(partial(explain, room.world, task, room.policy, room.now))[0]
        for task in chance.sample(waiting, min(options.explained, len(waiting)))
    ]
    yield Figure("plan", "plan.explain.p99_ms", 1000 * percentile(explained, 99), "ms", len(explained))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield Figure("plan", "plan.rss_mb", peak_mb, "MB", 1)


class Room:
    """A World, its clock, and the planner at work on it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.policy = Policy()
        self.now = Instant(BEGIN)
        self.memory = Memory()
        self.applied_s = 0.0

    def cycle(self) -> list[float]:
        """One whole cycle, made true slice by slice; seconds of planning of each."""
        taken: list[float] = []
        cursor = None
        while True:
            spent, plan = timed(
                partial(plan_cycle, self.world, self.policy, self.now, cursor, SLICE, self.memory)
            )
            taken.append(spent)
            self.commit(plan.decisions)
            cursor = plan.cursor
            if cursor is None:
                return taken

    def settle(self) -> None:
        """Let those go who were asked to, until nobody need be stopped any more."""
        while True:
            self.pass_time(1.0)
            position = self.world.position
            for name in sorted(self.world.active):
                task = self.world.tasks[name]
                if task.state is TaskState.STOPPING:
                    self.let_go(task)
            self.cycle()
            if self.world.position == position:
                return

    def let_go(self, task: Task) -> None:
        off = {"node": None, "stop_reason": None, "stop_deadline_at": None, "freeing_for": None}
        again = write_move(task, Move.REQUEUED, preemptions=task.preemptions + 1, **off)
        leases = tuple(move_lease(lease, LeaseState.RELEASED) for lease in self.world.leases_of(task))
        self.commit([Decision(task.id, "gone", tasks=(again,), leases=leases)])

    def let_one_end(self, chance: random.Random) -> None:
        """One run ends, and its memory is back at once."""
        task = self.world.tasks[chance.choice(sorted(self.world.active))]
        done = write_move(task, Move.SUCCEEDED, finished_at=self.now)
        leases = [move_lease(lease, LeaseState.RELEASING) for lease in self.world.leases_of(task)]
        self.commit([Decision(task.id, "ended", tasks=(done,), leases=tuple(leases))])
        gone = [move_lease(lease, LeaseState.RELEASED) for lease in leases]
        self.commit([Decision(task.id, "gone", leases=tuple(gone))])

    def pass_time(self, seconds: float) -> None:
        """Every GPU is measured anew each second, as its node's agent would."""
        before, self.now = int(self.now), Instant(self.now + seconds)
        if int(self.now) != before:
            self.world.measure([an_idle_sample(key, self.now) for key in self.world.books])

    def commit(self, decisions: Iterable[Decision]) -> None:
        began = perf_counter()
        for decision in decisions:
            self.world.apply(
                new.at(Position(position), self.now)
                for position, new in enumerate(events_of(decision), start=self.world.position + 1)
            )
        self.applied_s += perf_counter() - began


def timed(what: Callable[[], T]) -> tuple[float, T]:
    began = perf_counter()
    result = what()
    return perf_counter() - began, result


def a_cluster(options: Namespace, chance: random.Random) -> World:
    """Empty nodes, and the tasks that wait, submitted during the last hour."""
    world = World()
    world.as_of = Instant(BEGIN)
    for number in range(options.nodes):
        kind, size = KINDS[number % len(KINDS)]
        node = NodeName(f"n{number:04}")
        world.add_node(Node(node, 128.0, Mib(1024 * GIB), 64, incarnation="1", boot_id="1"))
        for index in range(8):
            key = device_key("bench", node, f"gpu{index}")
            world.add_device(Device(key, node, f"gpu{index}", kind, index, Mib(size * GIB), Mib(512)))
            world.measure([an_idle_sample(key, BEGIN)])
    demands = some_demands(options.demands, chance)
    for number in range(options.tasks):
        world.add_task(
            Task(
                TaskId(f"t{number:07}"),
                chance.choice(TENANTS),
                "bench",
                chance.choice(PRIORITIES),
                replace(chance.choice(demands)),
                Instant(BEGIN - 3600 + 3600 * number / options.tasks),
            )
        )
    return world


def an_idle_sample(key: DeviceKey, at: float) -> DeviceSample:
    return DeviceSample(key, Instant(at), Mib(0))


def some_demands(count: int, chance: random.Random) -> list[Demand]:
    """Three of five take part of one GPU; the others a fraction, whole GPUs, parts of several, or none."""
    found: dict[Demand, None] = {}
    while len(found) < count:
        plain = Demand(cpu=float(chance.choice((1, 2, 4, 8))), memory_mb=Mib(chance.choice((2, 8, 16)) * GIB))
        found[a_demand(chance.randrange(20), chance, plain)] = None
    return list(found)


def a_demand(sort: int, chance: random.Random, plain: Demand) -> Demand:
    if sort < 12:
        return replace(plain, gpus=1, gpu_mb=Mib(chance.randrange(4, 76) * GIB))
    if sort < 14:
        return replace(plain, gpus=1, gpu_fraction=chance.choice((0.1, 0.25, 0.5)))
    if sort < 17:
        return replace(plain, gpus=chance.choice((1, 2, 4, 8)))
    if sort < 19:
        return replace(plain, gpus=chance.choice((2, 4)), gpu_mb=Mib(chance.randrange(8, 40) * GIB))
    return plain
