"""The executor of the simulated cluster: it carries orders and reports, and notices what broke."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    Gone,
    NodeLost,
    NodeReport,
    Order,
    Report,
    StartOrder,
)
from gpubroker_server.core.domain.units import Lineage, NodeName, TaskId, Term
from gpubroker_server.ports.executor import RunPayload

from tests.simulation.machine import Announcement, Machine
from tests.simulation.timeline import Timeline

LOST_AFTER_SECONDS = 10.0
"""A node that cannot be reached for so long is reported lost."""


class LeaderDied(Exception):
    """The leader's process ended between its commit and its orders."""


class Cluster:
    """The half of `ports.Executor` that a leader's cycle needs; reports go to the leader."""

    def __init__(self, timeline: Timeline, chance: Random, hear: Callable[[Report], None]) -> None:
        self.machines: dict[NodeName, Machine] = {}
        self.dies_before: type[Order] | None = None
        """The leader's process ends when it is about to send an order of this kind."""
        self._timeline = timeline
        self._chance = chance
        self._hear = hear
        self._term = Term(0)
        self._lost: set[str] = set()
        self._unreachable: set[NodeName] = set()

    async def start(self, leader_term: LeaderTerm, lineage: Lineage) -> None:
        """Announce the term. What was on its way to the leader before is lost with it."""
        self._term = leader_term.term
        self._lost.clear()
        for machine in self.machines.values():
            self._announce(machine)

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        if self.dies_before is not None and any(isinstance(order, self.dies_before) for order in orders):
            self.dies_before = None
            raise LeaderDied
        for order in orders:
            machine = self.machines[order.node]
            if machine.has_agent:
                saved = payloads[order.task].resume_state if isinstance(order, StartOrder) else None
                done_seconds = float(saved) if saved is not None else 0.0
                machine.orders.send((self._term, order, done_seconds))
            elif isinstance(order, StartOrder):
                self._return_to_sender(order)

    def ask(self, nodes: Sequence[NodeName]) -> None:
        for name in nodes:
            self._announce(self.machines[name])

    def measure(self, nodes: Sequence[NodeName]) -> None:
        for name in nodes:
            self.machines[name].beat()

    is_connected = True

    def deliver(self, message: tuple[Term, Report]) -> None:
        """From an agent's line. Some reports about runs come a second time, much later."""
        term, report = message
        if term != self._term:
            return
        self._hear(report)
        if self._chance.random() < 0.02 and not isinstance(report, NodeReport):
            late = self._chance.uniform(0.0, 600.0)
            self._timeline.after(late, lambda: self._hear_again(term, report))

    def cut(self, machine: Machine, seconds: float) -> None:
        """No message passes either way; what is under way waits."""
        machine.orders.cut()
        machine.reports.cut()
        self._unreachable.add(machine.name)
        self._watch(machine)
        self._timeline.after(seconds, lambda: self._mend(machine))

    def lose_power(self, machine: Machine, seconds: float) -> None:
        if machine.is_on:
            self._watch(machine)
            machine.lose_power()
            self._timeline.after(seconds, lambda: self._restart(machine))

    def lose_agent(self, machine: Machine, seconds: float, *, with_processes: bool) -> None:
        if machine.has_agent:
            self._watch(machine)
            machine.lose_agent()
            if with_processes:
                machine.kill_processes()
            self._timeline.after(seconds, lambda: self._restart(machine))

    def _restart(self, machine: Machine) -> None:
        if not machine.has_agent:
            machine.start_agent()
            self._announce(machine)

    def _mend(self, machine: Machine) -> None:
        self._unreachable.discard(machine.name)
        machine.orders.mend()
        machine.reports.mend()
        if machine.incarnation in self._lost:
            self._lost.discard(machine.incarnation)
            self._announce(machine)

    def _announce(self, machine: Machine) -> None:
        """Behind every order that was sent before: the answer says what became of those."""
        if machine.has_agent:
            machine.orders.send((self._term, Announcement(), 0.0))

    def _watch(self, machine: Machine) -> None:
        incarnation = machine.incarnation
        self._timeline.after(LOST_AFTER_SECONDS, lambda: self._find_lost(machine, incarnation))

    def _find_lost(self, machine: Machine, incarnation: str) -> None:
        silent = machine.name in self._unreachable or not machine.has_agent
        if silent and machine.incarnation == incarnation and incarnation not in self._lost:
            self._lost.add(incarnation)
            self._hear(NodeLost(machine.name, incarnation, self._timeline.now(), "no heartbeat"))

    def _return_to_sender(self, order: StartOrder) -> None:
        now = self._timeline.now()
        self._hear(Ended(order.task, order.fence, now, Ending.NEVER_STARTED))
        self._hear(Gone(order.task, order.fence, now, Proof.NEVER_STARTED))

    def _hear_again(self, term: Term, report: Report) -> None:
        if term == self._term:
            self._hear(report)
