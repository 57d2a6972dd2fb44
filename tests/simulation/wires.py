"""What lies between the processes of the broker and the agents: slow, at times broken, in no good order."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.orders import (
    Gone,
    Heartbeat,
    NodeLost,
    NodeReport,
    Order,
    Report,
    ReportedDevice,
    Sampled,
    StartOrder,
)
from gpubroker_server.core.domain.units import Instant, Lineage, Mib, NodeName, TaskId, Term
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.store import Clock
from msgspec.structs import replace

from tests.simulation.line_to_database import Guard
from tests.simulation.machine import Announcement, Machine, Program
from tests.simulation.timeline import Timeline
from tests.simulation.virtual_loop import Host

BEAT_SECONDS = 2.0
AGENT_PATIENCE_SECONDS = 20.0
"""A node is declared lost if its agent does not answer for this long."""
ANSWER_SECONDS = (0.02, 20.0)
"""Until a process finds that its orders have not arrived."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0


class Network:
    """All machines, and which of them which process reaches."""

    def __init__(self, timeline: Timeline, chance: Random, looked: Callable[[], None]) -> None:
        """`looked`: called after each order that arrived."""
        self.machines: dict[NodeName, Machine] = {}
        self.wires: list[Wire] = []
        self.disorder = 0.0
        """Of a hundred messages, so many are lost, doubled or overtaken, each."""
        self.timeline, self._chance, self._looked = timeline, chance, looked
        self._cuts: set[tuple[str, NodeName]] = set()
        self._held: dict[NodeName, dict[Any, list[Report]]] = defaultdict(dict)
        """Reports that others overtake: of each run in order, and none past its agent's answer."""

    def add(self, name: str, gpus: int, programs: Mapping[TaskId, Program], chance: Random) -> None:
        node = NodeName(name)
        devices = tuple(ReportedDevice(f"gpu{i}", "H100", i, Mib(80 * 1024), True) for i in range(gpus))

        def hear(message: tuple[Term, Report]) -> None:
            self._arrive(node, *message)

        self.machines[node] = Machine(name, devices, programs, self.timeline, chance, hear)
        self._beat(node)

    def happens(self, times: float = 1.0) -> bool:
        return 100.0 * self._chance.random() < self.disorder * times

    def reaches(self, process: str, node: NodeName) -> bool:
        return (process, node) not in self._cuts

    def cut(self, process: str, node: NodeName, seconds: float) -> None:
        """Between these two nothing passes, either way; what is under way is lost."""
        self._cuts.add((process, node))
        self.timeline.after(seconds, lambda: self.mend(process, node))

    def mend(self, process: str, node: NodeName) -> None:
        if (process, node) in self._cuts:
            self._cuts.discard((process, node))
            self.doubt(node)

    def mend_all(self) -> None:
        for process, node in sorted(self._cuts):
            self.mend(process, node)

    def doubt(self, node: NodeName) -> None:
        """Whoever leads finds out, some time, that the conversation with this agent has broken off."""
        for wire in self.wires:
            wire.announce_later(node, self._chance.uniform(*ANSWER_SECONDS) * self._chance.random())

    def lose_power(self, machine: Machine, seconds: float) -> None:
        if machine.is_on:
            machine.lose_power()
            self._lose(machine, seconds)

    def lose_agent(self, machine: Machine, seconds: float, *, with_processes: bool) -> None:
        if machine.has_agent:
            machine.lose_agent()
            if with_processes:
                machine.kill_processes()
            self._lose(machine, seconds)

    def lose_messages(self, machine: Machine) -> None:
        machine.reports.lose_everything()
        self._held[machine.name].clear()
        self.doubt(machine.name)

    def carry(self, node: NodeName, term: Term, order: Order | Announcement, done_seconds: float) -> bool:
        """Whether it has a receiver."""
        machine = self.machines[node]
        if machine.has_agent:
            machine.receive((term, order, done_seconds))
            self._looked()
        return machine.has_agent

    def _lose(self, machine: Machine, seconds: float) -> None:
        self._held[machine.name].clear()
        self.timeline.after(seconds, lambda: self._restart(machine))
        self.doubt(machine.name)

    def _restart(self, machine: Machine) -> None:
        if not machine.has_agent:
            machine.start_agent()
            self.doubt(machine.name)

    def _beat(self, node: NodeName) -> None:
        self.machines[node].beat()
        self.timeline.after(BEAT_SECONDS, lambda: self._beat(node))

    def _arrive(self, node: NodeName, term: Term, report: Report) -> None:
        held = self._held[node]
        run = (term, getattr(report, "task", None), getattr(report, "fence", None))
        if isinstance(report, NodeReport):
            for late in list(held):
                self._release(node, late)
        elif run in held:
            held[run].append(report)
            return
        elif not isinstance(report, Heartbeat | Sampled):
            if self.happens():
                held[run] = [report]
                self.timeline.after(self._chance.uniform(0.1, 3.0), lambda: self._release(node, run))
                return
            if self.happens():
                self.timeline.after(self._chance.uniform(0.0, 60.0), lambda: self._tell(node, term, report))
        self._tell(node, term, report)

    def _release(self, node: NodeName, run: Any) -> None:
        for report in self._held[node].pop(run, ()):
            self._tell(node, run[0], report)

    def _tell(self, node: NodeName, term: Term, report: Report) -> None:
        for wire in self.wires:
            wire.take(node, term, report)


class Wire:
    """The executor of one process (`ports.store.Executor`): carries orders to agents and reports back."""

    def __init__(
        self, name: str, process: Guard, host: Host, clock: Clock, network: Network, chance: Random
    ) -> None:
        self._name, self._process, self._host, self._clock = name, process, host, clock
        self._network, self._chance, self._timeline = network, chance, network.timeline
        self._leader_term: LeaderTerm | None = None
        self._said: list[Report] = []
        self._arrived = asyncio.Event()
        self._talks: dict[NodeName, int] = defaultdict(int)
        """Node -> number of the newest conversation with its agent."""
        self._known: dict[NodeName, str] = {}
        """Node -> the incarnation that answered this term, and is not lost."""
        self._has_answered = False

    async def connect(self) -> None:
        """There is nothing to connect."""

    async def start(self, leader_term: LeaderTerm, lineage: Lineage) -> None:
        self._leader_term = leader_term
        self._said.clear()
        self._known.clear()
        self._has_answered = False
        self.ask(sorted(self._network.machines))

    async def stand_back(self) -> None:
        self._leader_term = None

    async def flush(self) -> None:
        """What was sent is on its way."""

    async def close(self, *, stop_cluster: bool) -> None:
        raise AssertionError("a process of a storm ends in other ways")

    def ask(self, nodes: Sequence[NodeName]) -> None:
        for node in nodes:
            self._talks[node] += 1
            self._try(node, self._talks[node], self._timeline.now(), FIRST_PAUSE_SECONDS)

    def measure(self, nodes: Sequence[NodeName]) -> None:
        for node in nodes:
            self._network.machines[node].beat()

    def announce_later(self, node: NodeName, seconds: float) -> None:
        leader_term = self._leader_term
        self._timeline.after(seconds, lambda: self.ask([node]) if self._leader_term is leader_term else None)

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        await self._process.pass_by("before send")
        for order in orders:
            if self._leader_term is not None and not self._leader_term.is_over(self._host.ticks()):
                saved = payloads[order.task].resume_state if isinstance(order, StartOrder) else None
                self._post(order, self._leader_term, float(saved) if saved is not None else 0.0)
        await self._process.pass_by("after send")

    async def reports(self) -> Sequence[Report]:
        while not self._said:
            self._arrived.clear()
            await self._arrived.wait()
        said, self._said = self._said, []
        return said

    @property
    def is_connected(self) -> bool:
        return self._has_answered

    def take(self, node: NodeName, term: Term, report: Report) -> None:
        """Hear it, if it is for this process; while that is stopped it waits."""
        if (
            self._leader_term is None
            or term != self._leader_term.term
            or not self._network.reaches(self._name, node)
        ):
            return
        if isinstance(report, NodeReport):
            self._known[node] = report.node.incarnation
            self._talks[node] += 1
            self._has_answered = True
        self._hear(report)

    def _hear(self, report: Report) -> None:
        """Reports carry their age: a machine's clock does not matter."""
        late = self._clock.now() - self._timeline.now()
        report = replace(report, at=Instant(report.at + late))  # type: ignore[union-attr]  # agents send what has a time
        if isinstance(report, Gone | Sampled):
            samples = tuple(replace(sample, at=Instant(sample.at + late)) for sample in report.samples)
            report = replace(report, samples=samples)
        self._said.append(report)
        self._process.loop.call_soon(self._arrived.set)

    def _post(self, order: Order, leader_term: LeaderTerm, done_seconds: float) -> None:
        """The driver process looks once more whether the time is over; what has left it arrives some time."""
        is_late = self._network.happens()
        seconds = self._chance.uniform(1.0, 30.0) if is_late else self._chance.uniform(0.001, 0.05)

        def leave() -> None:
            if self._host.ticks() < leader_term.until:
                self._timeline.after(seconds, arrive)

        def arrive() -> None:
            reached = self._network.reaches(self._name, order.node) and not self._network.happens()
            if not (reached and self._network.carry(order.node, leader_term.term, order, done_seconds)):
                self.announce_later(order.node, self._chance.uniform(*ANSWER_SECONDS))
            elif self._network.happens():
                self._timeline.after(self._chance.uniform(0.0, 10.0), again)

        def again() -> None:
            self._network.carry(order.node, leader_term.term, order, done_seconds)

        self._timeline.after(0.001, lambda: self._host.once_awake(leave))

    def _try(self, node: NodeName, talk: int, since: Instant, pause: float) -> None:
        """Announce the term, again and again until the agent answers; tell it lost when that takes long."""
        leader_term = self._leader_term
        if leader_term is None or self._talks[node] != talk or self._process.is_dead:
            return
        if not self._host.is_asleep and self._network.reaches(self._name, node):
            seconds = self._chance.uniform(0.002, 0.1)
            self._timeline.after(
                seconds, lambda: self._network.carry(node, leader_term.term, Announcement(), 0.0)
            )
        now = self._timeline.now()
        if now - since > AGENT_PATIENCE_SECONDS and node in self._known:
            self._hear(NodeLost(node, self._known.pop(node), now, "its agent has been away"))
        longer = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._timeline.after(0.5 + pause, lambda: self._try(node, talk, since, longer))
