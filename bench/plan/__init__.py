"""CPU time of planning cycles on 1,000 GPUs with 100,000 waiting tasks, as the leader runs them, without IO.

125 empty nodes with 8 GPUs of three kinds, and tasks with 200 different demands, 4 tenants and 5 priorities.
The first cycle fills the cluster. Then runs end one by one, or stop after a preemption; after each, one
cycle runs until nothing more is to be decided. Every second of simulated time the forecasts are recomputed;
plans respect them, and they have a figure of their own. The same number of cycles follows with running
elastic gangs that lack ranks. Finally, explain and simulate requests go through the gateway, JSON included;
before each of them a run ends and a cycle follows.

`World.apply` of the decisions is reported on stderr.
"""

import random
import resource
from argparse import ArgumentParser, Namespace
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from time import process_time
from typing import TypeVar

from gpubroker_server.bootstrap.process import make_full_collections_rare
from gpubroker_server.broker.planner import MAX_TURNS
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Device, DeviceSample, Node
from gpubroker_server.core.domain.holders import Gang, Member, MemberState
from gpubroker_server.core.domain.lease import LeaseState, Proof, move_lease, release
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import (
    DeviceKey,
    Fence,
    Instant,
    Mib,
    NodeName,
    Position,
    TaskId,
    device_key,
)
from gpubroker_server.core.planning.cycle import Slice
from gpubroker_server.core.planning.forecasts.forecast_rounds import ForecastRounds
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.events import events_of
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from bench.measuring import Figure, percentile, report
from bench.plan.answers import Gateway

GIB = 1024
KINDS = (("H100", 80), ("A100", 80), ("A100", 40), ("H100", 80), ("L40S", 48))
"""(kind, GiB) of the GPUs of a node; nodes take them in turn."""
PRIORITIES = (5, 20, 50, 60, 80)
TENANTS = ("research", "product", "search", "batch")
BEGIN = 1_000_000.0
GRACE_SECONDS = 0.2
"""The time that a preempted run takes to stop."""

T = TypeVar("T")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=125, help="nodes with 8 GPUs each")
    parser.add_argument("--tasks", type=int, default=100_000, help="waiting tasks")
    parser.add_argument("--demands", type=int, default=200, help="different demands")
    parser.add_argument("--cycles", type=int, default=1000, help="cycles to measure, one after each release")
    parser.add_argument("--gangs", type=int, default=50, help="running gangs that would take more ranks")
    parser.add_argument("--explained", type=int, default=200, help="requests per endpoint")
    parser.add_argument(
        "--large", action="store_true", help="10,000 GPUs and 1,000,000 tasks; overrides --nodes and --tasks"
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of the random choices")


def measure(options: Namespace) -> Iterator[Figure]:
    if options.large:
        options.nodes, options.tasks = 1_250, 1_000_000
    chance = random.Random(options.seed)
    leader = Leader(a_cluster(options, chance))
    make_full_collections_rare()
    first = leader.cycle()
    report(
        f"first plan: {len(first):,} turns, the longest {1000 * max(first):.1f} ms, "
        f"{len(leader.world.active):,} started; applying the decisions took {leader.applied_s:.2f} s more"
    )
    yield _figure("first_s", sum(first), "s", len(first))
    leader.settle()
    cycles = yield from releases(leader, options.cycles, chance)
    yield from growth(leader, options.gangs, cycles, chance)
    yield from answers(leader, options.explained, chance)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield _figure("rss_mb", peak_mb, "MB", 1)


def releases(leader: "Leader", count: int, chance: random.Random) -> Generator[Figure, None, list[float]]:
    """Run one cycle after each release of memory, by a run that ended or was preempted, and return the
    seconds of each cycle. A cycle may take many turns."""
    slices: list[float] = []
    cycles: list[float] = []
    last_admissions: list[float] = []
    leader.decided.clear()
    leader.rounds.clear()
    for _ in range(count):
        turn_seconds = leader.cycle_after_a_release(chance)
        slices += turn_seconds
        cycles.append(sum(turn_seconds))
        if leader.last_admission_s is not None:
            last_admissions.append(leader.last_admission_s)
    report(
        f"{count:,} cycles: {leader.decided['admit']:,} tasks started, {leader.decided['preempt']:,} "
        f"preempted others; median {1000 * percentile(cycles, 50):.2f} ms; turns: p99 "
        f"{1000 * percentile(slices, 99):.1f} ms, the longest {1000 * max(slices):.1f} ms; "
        f"the last admission of a cycle came within {1000 * percentile(last_admissions, 99):.1f} ms (p99)"
    )
    yield _figure("cycle.p99_ms", 1000 * percentile(cycles, 99), "ms", len(cycles))
    yield _figure("slice.max_ms", 1000 * max(slices), "ms", len(slices))
    if leader.rounds:
        steps = [step for steps in leader.rounds for step in steps]
        report(
            f"{len(leader.forecast_rounds.forecasts)} forecasts, computed {len(leader.rounds)} times, "
            f"{len(steps):,} steps: p99 {1000 * percentile(steps, 99):.1f} ms, "
            f"the longest {1000 * max(steps):.1f} ms"
        )
        yield _figure("forecasts.max_ms", 1000 * max(map(sum, leader.rounds)), "ms", len(leader.rounds))
    return cycles


def growth(leader: "Leader", gangs: int, without: Sequence[float], chance: random.Random) -> Iterator[Figure]:
    """Run as many cycles as `without` has, with gangs that would take any GPU that no waiting task can
    use."""
    leader.add_gangs(gangs, chance)
    turns = [leader.cycle_after_a_release(chance) for _ in without]
    cycles = list(map(sum, turns))
    before_ms, now_ms = 1000 * percentile(without, 50), 1000 * percentile(cycles, 50)
    report(
        f"with {gangs} gangs that lack ranks, of which {leader.decided['grow']} grew, a cycle took "
        f"{now_ms:.2f} ms (median), before {before_ms:.2f} ms; the longest turn "
        f"{1000 * max(map(max, turns)):.1f} ms"
    )
    yield _figure("growth.ratio", now_ms / before_ms, "x", len(cycles))


def answers(leader: "Leader", count: int, chance: random.Random) -> Iterator[Figure]:
    """Send explain and simulate requests to a gateway that does nothing else meanwhile."""

    def next_cycle() -> None:
        leader.release_one(chance)
        leader.cycle()

    waiting = sorted(task.id for task in leader.world.tasks.values() if task.state is TaskState.PENDING)
    gateway = Gateway(leader.world, leader.policy, leader.now, leader.forecast_rounds.forecasts, next_cycle)
    asked = [leader.world.tasks[task] for task in chance.sample(waiting, min(count, len(waiting)))]
    for name, ask in (("explain", gateway.explained), ("simulate", gateway.simulated)):
        found = ask(asked)
        report(
            f"{name}: median {1000 * percentile(found.seconds, 50):.1f} ms, the longest "
            f"{1000 * max(found.seconds):.1f} ms; {max(found.bytes) / 1024:,.0f} KiB at most"
        )
        yield _figure(f"{name}.p99_ms", 1000 * percentile(found.seconds, 99), "ms", len(found.seconds))


def _figure(name: str, value: float, unit: str, n: int) -> Figure:
    return Figure("plan", f"plan.{name}", value, unit, n)


class Leader:
    """A World, its clock and the planner, driven as the loop of the leader drives them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.policy = Policy()
        self.now = Instant(BEGIN)
        self.cache = PlanCache()
        self.forecast_rounds = ForecastRounds()
        self.rounds: list[list[float]] = []
        """The seconds of each step, one list for each computation of the forecasts."""
        self.applied_s = 0.0
        self.decided: Counter[str] = Counter()
        self.preempted: deque[tuple[float, TaskId]] = deque()
        """(time of the notice, preempted task)"""
        self.last_admission_s: float | None = None
        """CPU seconds from the start of the last cycle to its last admission."""

    def cycle_after_a_release(self, chance: random.Random) -> list[float]:
        self.pass_time(0.02)
        self.release_one(chance)
        turn_seconds = self.cycle()
        self.forecast()
        return turn_seconds

    def cycle(self) -> list[float]:
        """Run a whole cycle and start what it admits; return the seconds of each turn."""
        taken: list[float] = []
        admitted: list[TaskId] = []
        self.last_admission_s = None
        cursor, turns = None, 1
        while True:
            forecasts = self.forecast_rounds.forecasts
            open_slice = partial(Slice, self.world, self.policy, self.now, cursor, self.cache, forecasts)
            spent, part = timed(open_slice)
            count = 0
            while not part.is_last and (count < turns or part.is_searching):
                more, _ = timed(part.take_turn)
                count += 1
                taken.append(spent + more)
                spent = 0.0
            spent, plan = timed(part.plan)
            taken[-1] += spent
            self.commit(plan.decisions)
            for decision in plan.decisions:
                self.decided[decision.why] += 1
                names = [write.task.id for write in decision.tasks]
                if decision.why == "admit":
                    admitted += names
                    self.last_admission_s = sum(taken)
                elif decision.why == "preempt":
                    self.preempted += ((self.now, name) for name in names)
            cursor, turns = plan.cursor, MAX_TURNS
            if cursor is None:
                self.start(admitted)
                return taken

    def forecast(self) -> None:
        """Compute the forecasts if they are due, which is once a second."""
        steps: list[float] = []
        is_unfinished = True
        while is_unfinished:
            spent, is_unfinished = timed(
                partial(self.forecast_rounds.step, self.world, self.policy, self.now)
            )
            steps.append(spent)
        if len(steps) > 1:
            self.rounds.append(steps)

    def start(self, names: Iterable[TaskId]) -> None:
        for name in names:
            task = self.world.tasks[name]
            leases = tuple(move_lease(lease, LeaseState.HELD) for lease in self.world.leases_of(task))
            started = write_move(task, Move.STARTED, started_at=self.now)
            self.commit([Decision(name, "started", tasks=(started,), leases=leases)])

    def add_gangs(self, count: int, chance: random.Random) -> None:
        """Add running gangs of one rank without a GPU. Seven more ranks would each take any whole GPU."""
        demand = Demand(bundles=(Demand(), *[Demand(gpus=1)] * 7), min_ranks=1)
        for number in range(count):
            first = Member(0, chance.choice(sorted(self.world.nodes)), MemberState.READY, False, "10.0.0.1:1")
            self.world.add_task(
                Task(
                    TaskId(f"gang_{number:026}"),
                    chance.choice(TENANTS),
                    "bench",
                    PRIORITIES[0],
                    demand,
                    self.now,
                    state=TaskState.RUNNING,
                    fence=Fence(1),
                    admitted_at=self.now,
                    started_at=self.now,
                    holder=Gang((first,)),
                )
            )

    def settle(self) -> None:
        """Stop preempted runs and plan again until nothing changes any more."""
        while True:
            self.pass_time(1.0)
            position = self.world.position
            for name in sorted(self.world.active):
                task = self.world.tasks[name]
                if task.state is TaskState.STOPPING:
                    self.stop(task)
            self.cycle()
            self.forecast()
            if self.world.position == position:
                return

    def stop(self, task: Task) -> None:
        off = {"node": None, "stop_reason": None, "stop_deadline_at": None, "freeing_for": None}
        again = write_move(task, Move.REQUEUED, preemptions=task.preemptions + 1, **off)
        leases = tuple(release(lease, Proof.PROCESS_ABSENT) for lease in self.world.leases_of(task))
        self.commit([Decision(task.id, "gone", tasks=(again,), leases=leases)])

    def release_one(self, chance: random.Random) -> None:
        """Stop a run that was preempted at least GRACE_SECONDS ago, or else end a run. Its memory is free at
        once."""
        while self.preempted and self.preempted[0][0] <= self.now - GRACE_SECONDS:
            task = self.world.tasks.get(self.preempted.popleft()[1])
            if task is not None and task.state is TaskState.STOPPING:
                self.stop(task)
                return
        task = self.world.tasks[chance.choice(sorted(self.world.active))]
        done = write_move(task, Move.SUCCEEDED, finished_at=self.now)
        leases = [move_lease(lease, LeaseState.RELEASING) for lease in self.world.leases_of(task)]
        self.commit([Decision(task.id, "ended", tasks=(done,), leases=tuple(leases))])
        released = [release(lease, Proof.PROCESS_ABSENT) for lease in leases]
        self.commit([Decision(task.id, "gone", leases=tuple(released))])

    def pass_time(self, seconds: float) -> None:
        """Let simulated time pass, and measure every GPU once a second, as the node agents do."""
        before, self.now = int(self.now), Instant(self.now + seconds)
        if int(self.now) != before:
            self.world.measure([an_idle_sample(key, self.now) for key in self.world.ledgers])

    def commit(self, decisions: Iterable[Decision]) -> None:
        began = process_time()
        for decision in decisions:
            self.world.apply(
                new.at(Position(position), self.now)
                for position, new in enumerate(events_of(decision), start=self.world.position + 1)
            )
        self.applied_s += process_time() - began


def timed(what: Callable[[], T]) -> tuple[float, T]:
    began = process_time()
    result = what()
    return process_time() - began, result


def a_cluster(options: Namespace, chance: random.Random) -> World:
    """Return a cluster of empty nodes, and of waiting tasks that were submitted during the last hour."""
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
                TaskId(f"task_{number:026}"),
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
    """Return random demands: three of five take a part of one GPU; the others a fraction, whole GPUs, parts
    of several, or none."""
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
