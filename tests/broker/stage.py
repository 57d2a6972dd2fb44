"""A leader on a stage: the real loop, store, blobs and executor, one turn at a time on one clock."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpubroker_server.adapters.blobs.directory import DirectoryBlobs
from gpubroker_server.adapters.secret_files import SecretFiles
from gpubroker_server.adapters.simulated_executor import SimulatedNode, WaitingExecutor
from gpubroker_server.broker.dispatch import Dispatcher
from gpubroker_server.broker.fleet import FleetKeeper, HostUse
from gpubroker_server.broker.inference_dispatch import InferenceDispatcher
from gpubroker_server.broker.loop import Leader
from gpubroker_server.broker.model_dispatch import ModelDispatcher
from gpubroker_server.broker.observe import Observer
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding
from gpubroker_server.core.control.fleet import FleetRules, FleetSeen
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.device import DiskOrder
from gpubroker_server.core.domain.leader_term import LeaderRow, LeaderTerm
from gpubroker_server.core.domain.orders import Order, Report, ReportedDevice, TermRefused
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.progress import Progress
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, MonotonicSeconds, NodeName, Seconds, TaskId, Term
from gpubroker_server.core.lifecycle.reconcile import InventoryRules
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.store import (
    AdmittedTask,
    CommitVerdict,
    RunSpec,
    StoreUnavailable,
    TaskStore,
)
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_task
from tests.contracts.scenes import next_term
from tests.stores import SqliteStore


class Hands:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.time = NOW

    def now(self) -> Instant:
        return self.time

    def ticks(self) -> MonotonicSeconds:
        """What the machine's clock shows; here it was switched on in 1970."""
        return MonotonicSeconds(self.time)


class WitnessedExecutor(WaitingExecutor):
    """Notes what was durable at the moment when orders were handed over."""

    def __init__(self, store: TaskStore, clock: Hands) -> None:
        devices = tuple(ReportedDevice(f"gpu{i}", "sim", i, Mib(24 * GIB), True) for i in range(2))
        super().__init__(SimulatedNode("n1", "test", 64.0, 256 * GIB, 64, devices), clock, 2.0, clock.ticks)
        self._store = store
        self.payloads: dict[TaskId, RunPayload] = {}
        self._refusals: list[TermRefused] = []
        self.sent: list[tuple[Order, Task]] = []
        """Each order with its task's row as the store had it then."""
        self.measured: list[NodeName] = []
        """Those that were to measure their devices at once."""
        self.looked: list[DiskOrder] = []

    def look_at_disks(self, order: DiskOrder) -> None:
        self.looked.append(order)
        super().look_at_disks(order)

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        for order in orders:
            record = await self._store.record(order.task)
            assert record is not None
            self.sent.append((order, record.task))
        self.payloads.update(payloads)
        await super().send(orders, payloads)

    def sample(self) -> None:
        """As a node does now and then."""
        super().measure([NodeName("n1")])

    def measure(self, nodes: Sequence[NodeName]) -> None:
        self.measured += nodes
        super().measure(nodes)

    def hear(self, refusal: TermRefused) -> None:
        """From an agent that takes no orders of this term."""
        self._refusals.append(refusal)
        self._arrived.set()

    async def reports(self) -> Sequence[Any]:
        reports = await super().reports()
        refusals, self._refusals = self._refusals, []
        return [*reports, *refusals]

    @property
    def begun(self) -> set[TaskId]:
        """Whose runs its node has, at work or over."""
        return {task for task, _, _ in self._runs}


class ForgetfulStore(SqliteStore):
    """The real store, with a connection that can be cut at once or in the middle of a commit."""

    away = False
    until_away: int | None = None
    """So many more decisions are written before it is cut."""

    async def leader(self) -> LeaderRow:
        if self.away:
            raise StoreUnavailable("cut by the test")
        return await super().leader()

    async def renew(self, term: Term, ttl_seconds: Seconds) -> None:
        if self.away:
            raise StoreUnavailable("cut by the test")
        await super().renew(term, ttl_seconds)

    async def commit(self, term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        written = list(decisions[: self.until_away])
        if self.until_away is not None:
            self.until_away -= len(written)
            self.away |= len(written) < len(decisions)
        elif self.away:
            written = []
        verdicts = await super().commit(term, written)
        return [*verdicts, *[CommitVerdict.UNAVAILABLE] * (len(decisions) - len(written))]

    def come_back(self) -> None:
        self.away, self.until_away = False, None


class Stage:
    def __init__(
        self,
        folder: Path,
        store: TaskStore | None = None,
        clock: Hands | None = None,
        **policy: Any,
    ) -> None:
        self.clock = clock or Hands()
        self.store: TaskStore = store or ForgetfulStore(self.clock)
        self.world = World()
        folder.mkdir(parents=True, exist_ok=True)
        self.blobs_folder = folder
        self.blobs = DirectoryBlobs(folder, max_bytes=10_000)
        self.secrets = SecretFiles(folder / "secrets")
        self.executor = WitnessedExecutor(self.store, self.clock)
        self.progress: dict[TaskId, Progress] = {}
        self.policy = Policy(**policy)
        self.fleet_rules = FleetRules()
        """Of a leader that begins from now on."""
        self.fleet_before: FleetSeen | None = None
        self.host = HostUse(10.0, 20.0)
        self.entrypoints: tuple[str, ...] = ("m:*",)
        """What a leader allows that begins from now on."""
        self.leader = self.new_leader(LeaderTerm(Term(0)))
        self.store.listen(self._on_events)

    @property
    def forgetful(self) -> ForgetfulStore:
        assert isinstance(self.store, ForgetfulStore)
        return self.store

    def use(self, desk: ModelDispatcher) -> None:
        """From now on there are servers of models; whoever calls has it run."""
        self.leader = self.new_leader(self.leader.leader_term, desk)

    def use_inferences(self, desk: InferenceDispatcher) -> None:
        """The same for those that are asked: another leader begins."""
        self.leader = self.new_leader(self.leader.leader_term, inferences=desk)

    def _diagnose(self, fleet: FleetSeen) -> Iterator[Finding]:
        known = FleetKnown(self.executor.status(), has_leader=True, fleet=fleet)
        return diagnose_fleet(self.world, self.policy, known, self.clock.now())

    def new_leader(
        self,
        leader_term: LeaderTerm,
        desk: ModelDispatcher | None = None,
        inferences: InferenceDispatcher | None = None,
    ) -> Leader:
        def fleet(commit_seconds: Callable[[], float]) -> FleetKeeper:
            rules, host = self.fleet_rules, lambda: self.host
            clock, store = self.clock, self.store
            before, policy = self.fleet_before, self.policy
            given = rules, self.world, policy, clock, host, commit_seconds, store, before
            return FleetKeeper(*given, self._diagnose)

        rules = InventoryRules("test", Mib(0))
        return Leader(
            leader_term=leader_term,
            ticks=self.clock.ticks,
            world=self.world,
            policy=self.policy,
            store=self.store,
            executor=self.executor,
            observer=Observer(
                self.world, self.policy, self.blobs, rules, 1024, self.progress, self.clock.ticks
            ),
            dispatcher=Dispatcher(
                self.store,
                self.blobs,
                self.executor,
                self.world,
                self.clock,
                self.entrypoints,
                desk,
                inferences,
                secrets=self.secrets,
            ),
            clock=self.clock,
            new_fleet=fleet,
        )

    async def lead(self, leader_term: LeaderTerm | None = None) -> None:
        """In this term or the next one; its node has answered."""
        self.leader = self.new_leader(leader_term or LeaderTerm(await next_term(self.store, "test")))
        await self.leader.take_over()
        await self.executor.start(self.leader.leader_term, self.world.lineage)
        await self.turn()

    def _on_events(self, events: Sequence[Event]) -> None:
        self.world.apply(events)
        self.leader.on_events(events)

    async def submit(
        self, id: str, seconds: float = 0.0, spec: Mapping[str, Any] | None = None, **fields: Any
    ) -> Task:
        arguments = json.dumps({"args": [], "kwargs": {"seconds": seconds}}).encode()
        task = a_task(id, **fields)
        run = RunSpec(kind="entrypoint", entrypoint="m:f", arguments=arguments)
        await self.store.submit(AdmittedTask(task, replace(run, **(spec or {}))))
        return task

    async def hear(self, *reports: Report) -> None:
        """One turn of the leader that begins with these reports."""
        self.leader.hear(reports)
        await self.leader.cycle()

    async def turn(self) -> None:
        """One turn of the leader that begins with what its executor has to say."""
        await self.hear(*await self.executor.reports())

    async def turns_until(self, id: str, state: TaskState) -> None:
        """As many turns as it takes; the time limit of the test ends a wait in vain."""
        while (await self.row(id)).state is not state:
            await self.turn()

    async def later(self, seconds: float) -> None:
        """Let time pass, measure again, and give the leader its turn."""
        self.clock.time = Instant(self.clock.time + seconds)
        self.executor.sample()
        await self.turn()

    async def row(self, id: str) -> Task:
        record = await self.store.record(TaskId(id))
        assert record is not None
        return record.task


@asynccontextmanager
async def a_stage(
    folder: Path, store: TaskStore | None = None, clock: Hands | None = None, **policy: Any
) -> AsyncIterator[Stage]:
    """A leader with its term, whose one node has answered."""
    stage = Stage(folder, store, clock, **policy)
    await stage.lead()
    try:
        yield stage
    finally:
        await stage.executor.close(stop_cluster=True)
