"""A leader that is stopped between the commit of a start and its order, and wakes when another one leads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.leader_term import NEVER, LeaderTerm, LeaderTermRules
from gpubroker_server.core.domain.orders import Ended, Ending, Order, Report, StartOrder
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Lineage, NodeName, TaskId, Term
from gpubroker_server.ports.executor import RunPayload
from gpubroker_server.ports.store import StaleTerm

from tests.broker.stage import ForgetfulStore, Hands, Stage, WitnessedExecutor
from tests.builders import GIB, NOW
from tests.chaos.history import violations
from tests.contracts.scenes import log_of, next_term

HOUR = 3600.0
RULES = LeaderTermRules()


class Node:
    """Its agent hears several leaders, and answers the one of the highest term it has heard of."""

    def __init__(self, agent: WitnessedExecutor) -> None:
        self.agent = agent
        self.term = Term(0)
        self.refused: list[StartOrder] = []

    async def announce(self, leader_term: LeaderTerm) -> None:
        assert leader_term.term > self.term
        self.term = leader_term.term
        await self.agent.start(LeaderTerm(leader_term.term), Lineage(0))

    async def carry_out(
        self, term: Term, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]
    ) -> None:
        if term < self.term:
            self.refused += [order for order in orders if isinstance(order, StartOrder)]
        else:
            await self.agent.send(orders, payloads)


class Line(WitnessedExecutor):
    """The way from one leader to the node that all share. While its leader is stopped, nothing passes."""

    def __init__(self, store: ForgetfulStore, clock: Hands, node: Node) -> None:
        super().__init__(store, clock)
        self._far = node
        self._hands = clock
        self._of = LeaderTerm(Term(0))
        self._waiting: list[tuple[Sequence[Order], Mapping[TaskId, RunPayload]]] = []
        self.is_stopped = False

    async def start(self, leader_term: LeaderTerm, lineage: Lineage) -> None:
        self._of = leader_term
        await self._far.announce(leader_term)

    async def send(self, orders: Sequence[Order], payloads: Mapping[TaskId, RunPayload]) -> None:
        if self.is_stopped:
            self._waiting.append((orders, payloads))
        elif not self._of.is_over(self._hands.ticks()):
            await self._far.carry_out(self._of.term, orders, payloads)

    async def reports(self) -> Sequence[Report]:
        return await self._far.agent.reports()

    def measure(self, nodes: Sequence[NodeName]) -> None:
        self._far.agent.measure(nodes)

    def sample(self) -> None:
        self._far.agent.sample()

    async def wake(self) -> None:
        self.is_stopped = False
        waiting, self._waiting = self._waiting, []
        for orders, payloads in waiting:
            await self.send(orders, payloads)


class Schedule:
    """Two leaders on one database and one node, whose two GPUs each task wants whole."""

    def __init__(self, folder: Path) -> None:
        self.clock = Hands()
        self.store = ForgetfulStore(self.clock)
        self.node = Node(WitnessedExecutor(self.store, self.clock))
        self.old, self.old_line = self._leader(folder / "old")
        self.new, self.new_line = self._leader(folder / "new")

    def _leader(self, folder: Path) -> tuple[Stage, Line]:
        stage = Stage(folder, self.store, self.clock)
        line = Line(self.store, self.clock, self.node)
        stage.executor = line
        return stage, line

    async def submit(self, id: str, **fields: Any) -> None:
        await self.new.submit(id, seconds=HOUR, gpus=2, gpu_mb=20 * GIB, **fields)


@pytest.mark.parametrize("its_clock", ["goes on", "stands still"])
async def test_stopped_leader_that_wakes_sends_and_commits_without_effect(
    tmp_path: Path, its_clock: str
) -> None:
    stage = Schedule(tmp_path)
    old, new, node = stage.old, stage.new, stage.node
    trusted = RULES.trusted_until(stage.clock.ticks()) if its_clock == "goes on" else NEVER
    await old.lead(LeaderTerm(await next_term(stage.store, "old"), trusted))
    await stage.submit("first")
    stage.old_line.is_stopped = True
    await old.leader.cycle()
    assert ((await new.row("first")).state, node.agent.begun) == (TaskState.ADMITTED, set())

    await stage.submit("second", priority=90)
    stage.clock.time = Instant(stage.clock.time + RULES.ttl_seconds)
    await new.lead(LeaderTerm(await next_term(stage.store, "new")))
    await new.later(1.0)
    await new.turns_until("second", TaskState.RUNNING)
    assert (await new.row("first")).state is TaskState.PENDING

    await stage.old_line.wake()
    late = [("first", 1)] if its_clock == "stands still" else []
    assert [(order.task, order.fence) for order in node.refused] == late
    with pytest.raises(StaleTerm):
        await old.hear(Ended(TaskId("second"), Fence(1), Instant(NOW), Ending.FAILED))
    assert node.agent.begun == {"second"}
    assert (await new.row("second")).state is TaskState.RUNNING

    await stage.store.request(Request("r1", TaskId("second"), "default", "cancel", {}, Instant(NOW)))
    await new.leader.cycle()
    await new.turns_until("second", TaskState.CANCELLED)
    await new.turns_until("first", TaskState.RUNNING)
    assert (await new.row("first")).fence == 2
    assert violations(await log_of(stage.store)) == []
