"""A day of a small cluster, replayed from a seed: the real leader and core against simulated machines."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.broker.dispatch import Dispatcher
from gpubroker_server.broker.loop import Leader, NewFleet
from gpubroker_server.broker.observe import Observer
from gpubroker_server.core.admission.feasibility import check
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.orders import (
    ForgetOrder,
    Heartbeat,
    Report,
    ReportedDevice,
    StartOrder,
    StopOrder,
)
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.units import (
    Mib,
    MonotonicSeconds,
    NodeName,
    Position,
    Seconds,
    TaskId,
    Term,
)
from gpubroker_server.core.lifecycle.reconcile import InventoryRules
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import AdmittedTask, CommitVerdict, RunSpec, StoreUnavailable
from msgspec import Struct
from structlog.testing import capture_logs

from tests.contracts.scenes import next_term
from tests.memory_blobs import Blobs
from tests.simulation.auditor import Auditor, Violation, require
from tests.simulation.cluster import Cluster, LeaderDied
from tests.simulation.machine import CLUSTER, Machine, Program
from tests.simulation.timeline import Timeline
from tests.simulation.workload import Workload
from tests.stores import SteppedStore, at_once

START = 1_700_000_000.0
POLICY = Policy(custom_limits=(CustomLimit("licence", 3.0),), beat_seconds=Seconds(5.0))
MACHINES = {"n1": 4, "n2": 2, "n3": 2}
TICK_SECONDS = 4.0
REACTION_SECONDS = 0.5
PATIENCE_HOURS = 48.0
"""So long after the last arrival every task must have come to its end."""


class DayReport(Struct, frozen=True):
    seed: int
    hours: float
    submitted: int
    refused: int
    terms: int
    digest: str
    counts: Counter[str]
    drained_after_hours: float


Tamper = Callable[[Decision], Decision]


def replay(seed: int, hours: float, tamper: Tamper | None = None) -> DayReport:
    """Raises Violation."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        return runner.run(Day(seed, hours, tamper).run())


class SteadyLoop(asyncio.SelectorEventLoop):
    """Half a millisecond passes with each look at its clock: no day depends on how quick a machine is."""

    def __init__(self) -> None:
        self._looks = 0
        super().__init__()

    def time(self) -> float:
        self._looks += 1
        return self._looks / 2000.0


class FlakyStore(SteppedStore):
    """The real store; now and then the database is not reached, and nothing was written.

    `tamper` falsifies what is committed, to show that the auditor sees it.
    """

    def __init__(self, timeline: Timeline, tamper: Tamper | None) -> None:
        super().__init__(timeline)
        self.is_away = False
        self._tamper = tamper

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        if self.is_away:
            raise StoreUnavailable("away")
        if self._tamper is not None:
            decisions = [self._tamper(decision) for decision in decisions]
        return await super().commit(term, decisions)


class Day:
    new_fleet: NewFleet | None = None

    def __init__(self, seed: int, hours: float, tamper: Tamper | None = None) -> None:
        self._seed = seed
        self._end = START + hours * 3600.0
        self._hours = hours
        self._chance = Random(f"{seed}/faults")
        self._timeline = Timeline(START)
        self._programs: dict[TaskId, Program] = {}
        self._cluster: Any = Cluster(self._timeline, Random(f"{seed}/cluster"), self._hear)
        for name, gpus in MACHINES.items():
            devices = tuple(ReportedDevice(f"gpu{i}", "H100", i, Mib(80 * 1024), True) for i in range(gpus))
            chance = Random(f"{seed}/{name}")
            machine = Machine(name, devices, self._programs, self._timeline, chance, self._cluster.deliver)
            self._cluster.machines[NodeName(name)] = machine
        self._workload = Workload(Random(f"{seed}/workload"))
        self._auditor = Auditor(self._cluster.machines.values)
        self._store = FlakyStore(self._timeline, tamper)
        self._blobs = Blobs()
        self._store.listen(self._on_events)
        self._world = World()
        self._leader: Leader | None = None
        self._turn_is_planned = self._is_paused = False
        self._requests = self._submitted = self._refused = self._terms = 0

    async def run(self) -> DayReport:
        try:
            return await self._run()
        finally:
            await self._store.close()

    async def _run(self) -> DayReport:
        with capture_logs() as logs:
            await self._lead()
            self._tick()
            self._arrive_later()
            self._plan_faults()
            await self._live_until_all_is_done()
        errors = [line for line in logs if line["log_level"] in ("error", "critical")]
        require(not errors, "nothing that must not happen was logged", errors=errors[:3])
        await self._compare_with_rows()
        return DayReport(
            seed=self._seed,
            hours=self._hours,
            submitted=self._submitted,
            refused=self._refused,
            terms=self._terms,
            digest=self._auditor.digest,
            counts=self._auditor.counts,
            drained_after_hours=(self._timeline.now() - self._end) / 3600.0,
        )

    async def _live_until_all_is_done(self) -> None:
        deadline = self._end + PATIENCE_HOURS * 3600.0
        while self._timeline.now() < self._end or self._auditor.unfinished():
            if self._timeline.now() > deadline:
                stuck = [self._world.tasks.get(TaskId(task)) for task in self._auditor.unfinished()[:3]]
                raise Violation(
                    f"every accepted task ends: {len(self._auditor.unfinished())} did not: {stuck}"
                )
            await self._step()

    async def _step(self) -> None:
        done = self._timeline.step()
        if inspect.isawaitable(done):
            await done
        self._auditor.look()

    def _on_events(self, events: Sequence[Event]) -> None:
        """Everything the World learns has been read from the rows of the log."""
        first = events[0].position
        read = at_once(self._store.events(Position(first - 1), len(events)))
        self._auditor.read(read)
        self._world.apply(read)

    def _hear(self, report: Report) -> None:
        if self._leader is not None:
            self._leader.hear([report])
            self._wake()

    # The leader

    async def _lead(self) -> None:
        """A new process: it knows the rows and nothing else."""
        self._terms += 1
        self._world = await self._world_from_rows()
        rules = InventoryRules(CLUSTER)
        observer = Observer(self._world, POLICY, self._blobs, rules, 65536, {}, self._ticks)
        term = await next_term(self._store, f"leader-{self._terms}")
        self._leader = Leader(
            leader_term=LeaderTerm(term),
            ticks=self._ticks,
            world=self._world,
            policy=POLICY,
            store=self._store,
            executor=self._cluster,
            observer=observer,
            dispatcher=Dispatcher(self._store, self._blobs, self._cluster, self._world, self._timeline, ()),
            clock=self._timeline,
            new_fleet=self.new_fleet,
        )
        try:
            await self._leader.take_over()
        except StoreUnavailable:
            self._die()
            return
        await self._cluster.start(self._leader.leader_term, self._world.lineage)
        self._wake()

    async def _world_from_rows(self) -> World:
        world = World()
        fill(world, await self._store.snapshot())
        return world

    def _ticks(self) -> MonotonicSeconds:
        return MonotonicSeconds(self._timeline.now())

    def _tick(self) -> None:
        self._wake()
        self._timeline.after(TICK_SECONDS, self._tick)

    def _wake(self) -> None:
        if not self._turn_is_planned:
            self._turn_is_planned = True
            self._timeline.after(REACTION_SECONDS, self._turn)

    async def _turn(self) -> None:
        self._turn_is_planned = False
        if self._leader is None or self._is_paused:
            return
        for machine in self._cluster.machines.values():
            if machine.can_be_measured:
                self._world.measure(machine.samples())
                self._leader.hear([Heartbeat(machine.name, self._timeline.now())])
        try:
            with suppress(StoreUnavailable):
                await self._leader.cycle()
        except LeaderDied:
            self._die()
        self._check_use()

    def _die(self) -> None:
        self._leader = None
        self._timeline.after(self._chance.uniform(0.5, 40.0), self._lead)

    def _check_use(self) -> None:
        for name, use in self._world.use.items():
            node = self._world.nodes[name]
            fits = use.cpu <= node.cpu and use.memory_mb <= node.memory_mb and use.runs <= node.max_runs
            require(
                fits, "runs fit on their node", node=node, cpu=use.cpu, memory=use.memory_mb, runs=use.runs
            )
        for limit in POLICY.custom_limits:
            used = self._world.custom_use.get(limit.name, 0.0)
            require(used <= limit.amount, "custom resources keep their limit", resource=limit.name, used=used)

    async def _compare_with_rows(self) -> None:
        rows, seen = await self._world_from_rows(), self._world
        for name in (
            "tasks",
            "leases",
            "pledges",
            "nodes",
            "active",
            "requests",
            "finished",
            "custom_use",
            "expiring",
        ):
            mine, theirs = _known(getattr(seen, name)), _known(getattr(rows, name))
            require(mine == theirs, "the picture from the log is the picture from the rows", part=name)

    # What people do

    def _arrive_later(self) -> None:
        self._timeline.after(self._workload.pause_seconds(), self._arrive)

    async def _arrive(self) -> None:
        if self._timeline.now() >= self._end:
            return
        self._arrive_later()
        arrival = self._workload.arrival(self._timeline.now())
        task = arrival.task
        devices = [ledger.device for ledger in self._world.ledgers.values()]
        if check(task.demand, devices, self._world.nodes.values(), POLICY) is not None:
            self._refused += 1
            return
        self._submitted += 1
        self._programs[task.id] = arrival.program
        self._workload.accepted.append((task.id, task.tenant))
        await self._store.submit(AdmittedTask(task, RunSpec("command")))
        for seconds, what, fields in arrival.requests:
            self._timeline.after(seconds, partial(self._ask, task.id, what, fields))
        self._wake()

    async def _ask(self, task: TaskId, what: str, fields: dict[str, Any]) -> None:
        self._requests += 1
        request = Request(f"r{self._requests:05}", task, "red", what, fields, self._timeline.now())
        await self._store.request(request)
        self._wake()

    # What breaks

    def _plan_faults(self) -> None:
        for machine in self._cluster.machines.values():
            self._often(1.5, lambda machine=machine: self._cluster.cut(machine, self._draw(1.0, 120.0)))
            self._often(
                8.0, lambda machine=machine: self._cluster.lose_power(machine, self._draw(30.0, 900.0))
            )
            self._often(2.0, lambda machine=machine: self._lose_agent(machine))
        self._often(0.7, self._kill_leader)
        self._often(2.0, self._pause_leader)
        self._often(1.0, self._lose_store)

    def _often(self, mean_hours: float, fault: Any) -> None:
        """A fault every so many hours on average, until people have gone home."""

        def strike() -> None:
            if self._timeline.now() < self._end:
                fault()
                self._often(mean_hours, fault)

        self._timeline.after(self._chance.expovariate(1 / (mean_hours * 3600.0)), strike)

    def _draw(self, low: float, high: float) -> float:
        return self._chance.uniform(low, high)

    def _lose_agent(self, machine: Machine) -> None:
        with_processes = self._chance.random() < 0.5
        self._cluster.lose_agent(machine, self._draw(0.5, 40.0), with_processes=with_processes)

    def _kill_leader(self) -> None:
        kind = self._chance.choice((None, StartOrder, StopOrder, ForgetOrder))
        if kind is not None:
            self._cluster.dies_before = kind
        elif self._leader is not None:
            self._die()

    def _pause_leader(self) -> None:
        """Its machine sleeps: reports wait, requests wait, and deadlines pass."""
        self._is_paused = True
        self._timeline.after(self._draw(5.0, 300.0), self._resume_leader)

    def _resume_leader(self) -> None:
        self._is_paused = False

    def _lose_store(self) -> None:
        self._store.is_away = True
        self._timeline.after(self._draw(1.0, 60.0), self._find_store)

    def _find_store(self) -> None:
        self._store.is_away = False


def _known(rows: Any) -> Any:
    return {key: value for key, value in rows.items() if value} if isinstance(rows, dict) else rows
