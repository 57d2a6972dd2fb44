"""What is true on the nodes, and the leader's core beside it: every step of both in one's own hands.

No clock, no store and no loop: whoever tells the story decides what happens next, and when the leader has
its turn. Decisions are checked as they are made, rows and processes after every step.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from gpubroker_server.broker.inbox import next_batch
from gpubroker_server.core.admission.feasibility import check, check_priority
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    Failure,
    ForgetOrder,
    Gone,
    GoOrder,
    NodeLost,
    NodeReport,
    Ready,
    Report,
    RunId,
    Started,
    StartOrder,
    StopOrder,
)
from gpubroker_server.core.domain.policy import Policy, band_of
from gpubroker_server.core.domain.ranks import nodes_of
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, TaskId, node_of
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due, extend_window
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, reconcile, take_over
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.lifecycle.silent_nodes import nodes_without_answer
from gpubroker_server.core.planning.consolidation import Consolidation
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.dependencies import TaskEnd, settle_dependencies
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import NOW, a_world, check_ledger, commit, submit
from tests.core.naive import Naive
from tests.core.planning.test_plan_properties import check_pledges, step_of
from tests.simulation.agents import Agent, Process, agent_of
from tests.simulation.fairness import Passing, check_gang, passings, standings
from tests.simulation.promises import is_true

SLICE = 7
"""Looks per slice of a plan: few, so that most cycles take several."""


class Ground:
    def __init__(self, world: World, policy: Policy, now: float) -> None:
        self.world, self.policy, self.now = world, policy, now
        self.agents = {name: agent_of(world, name) for name in sorted(world.nodes)}
        self.ends: dict[str, TaskEnd] = {}
        self.submitted: list[str] = []
        self.orders_get_lost = False
        """The leader dies between its next commit and the orders of it."""
        self._cache = PlanCache()
        self._consolidation = Consolidation()
        self._forecasts: Sequence[Forecast] = ()
        self._watch: ObservationWindow | None = None
        self._said: deque[Report] = deque()
        self._open: set[tuple[str, DeviceKey]] = set()
        self._asked = 0

    # What people do

    def submit(self, task: Task) -> bool:
        """Whether it was accepted."""
        devices = [ledger.device for ledger in self.world.ledgers.values()]
        nodes = self.world.nodes.values()
        refused = check(task.demand, devices, nodes, self.policy) or check_priority(
            task.demand, task.priority, self.policy
        )
        accepted = refused is None and self._could_run(task)
        if accepted:
            self.submitted.append(task.id)
            submit(self.world, task)
        return accepted

    def _could_run(self, task: Task) -> bool:
        """Whether an empty cluster has room for all ranks of a gang, and for all that a quota would allow."""
        if not task.demand.bundles and self.policy.tenant(task.tenant).guaranteed_mb is None:
            return True
        agents = self.agents.values()
        devices = [ledger.device for ledger in self.world.ledgers.values()]
        empty = a_world(*(replace(agent.node, ready=True) for agent in agents), *devices)
        submit(empty, replace(task, after=(), awaits=False, not_before=None))
        return bool(plan_cycle(empty, self.policy, NOW).decisions)

    def ask(self, task: Task, what: str, **fields: Any) -> None:
        self._asked += 1
        now = Instant(self.now)
        request = Request(f"r{self._asked}", task.id, task.tenant, what, fields, now)
        self._carry([carry_out(self.world, request, now, Policy())])

    # What happens on the nodes

    def processes(self) -> list[tuple[Agent, Process]]:
        return [
            (agent, agent.processes[run]) for agent in self.agents.values() for run in sorted(agent.processes)
        ]

    def begin(self, agent: Agent, process: Process) -> None:
        process.has_begun = True
        process.goes = not process.order.barrier
        self._say(agent, process.id, Started(*process.id[:2], self._instant, 1, process.id[2]))

    def get_ready(self, agent: Agent, process: Process) -> None:
        """It waits at its barrier."""
        process.is_ready = True
        task, fence, rank = process.id
        self._say(agent, process.id, Ready(task, fence, self._instant, "10.0.0.1:4000", rank))

    def save(self, agent: Agent, process: Process) -> None:
        process.checkpoints += 1
        task, fence, rank = process.id
        self._say(
            agent,
            process.id,
            Checkpointed(task, fence, self._instant, process.checkpoints, "d", None, None, rank),
        )

    def end(self, agent: Agent, process: Process, ending: Ending) -> None:
        process.has_ended = True
        task, fence, rank = process.id
        failure = Failure("exception", "as told") if ending is Ending.FAILED else None
        self._say(agent, process.id, Ended(task, fence, self._instant, ending, failure=failure, rank=rank))

    def vanish(self, agent: Agent, process: Process) -> None:
        """The process is gone, and its memory with it."""
        del agent.processes[process.id]
        task, fence, rank = process.id
        gone = Gone(task, fence, self._instant, Proof.PROCESS_ABSENT, agent.samples(self._instant), rank)
        self._say(agent, process.id, gone)
        if process.id in agent.forgotten:
            agent.told.pop(process.id, None)

    def lose(self, agent: Agent, how: str) -> None:
        """`cut`: nothing is heard of it; `agent`: its agent is gone; `power`: and so are its processes."""
        if not agent.is_heard:
            return
        self._said.append(NodeLost(agent.node.name, agent.node.incarnation, self._instant, how))
        agent.is_heard = False
        if how == "cut":
            return
        agent.started.clear()
        agent.forgotten.clear()
        if how == "power":
            agent.processes.clear()
        agent.told = {run: [] for run in agent.processes}
        agent.forgotten = {run for run, process in agent.processes.items() if process.has_ended}
        number = int(agent.node.incarnation.rpartition("-")[2]) + 1
        incarnation = f"{agent.node.name}-{number}"
        boot = f"{agent.node.boot_id}'" if how == "power" else agent.node.boot_id
        agent.node = replace(agent.node, incarnation=incarnation, boot_id=boot)

    def find(self, agent: Agent) -> None:
        if not agent.is_heard:
            agent.is_heard = True
            self._announce(agent)

    def change_leader(self) -> None:
        """A new one: it knows the rows, and what it hears from now on."""
        self._cache, self._watch, self._forecasts = PlanCache(), None, ()
        self._said.clear()
        decision = take_over(self.world)
        self._carry([decision] if decision else [])
        for agent in self.agents.values():
            if agent.is_heard:
                self._announce(agent)

    # The leader

    def turn(self) -> None:
        now = self._instant
        for agent in self.agents.values():
            self._kill_due(agent)
            if agent.is_heard:
                self.world.measure(agent.samples(now))
        self._hear()
        since = extend_window(self._watch, now).since
        lost = apply_reports(self.world, nodes_without_answer(self.world, since, now), now, self.policy)
        self._carry(lost or due(self.world, now, self.policy, self._watch))
        self._watch = extend_window(self._watch, now)
        self._settle()
        self._plan()
        self._move()

    def _hear(self) -> None:
        while self._said:
            batch = next_batch(self._said)
            for _ in batch:
                self._said.popleft()
            if isinstance(batch[0], NodeReport):
                rules = InventoryRules("test", node_custom=self.world.nodes[batch[0].node.name].custom)
                self._carry(reconcile(self.world, batch[0], self._instant, self.policy, rules))
                continue
            for report in batch:
                if isinstance(report, Gone):
                    self.world.measure(report.samples)
            self._carry(apply_reports(self.world, batch, self._instant, self.policy))

    def _settle(self) -> None:
        awaited = self.world.awaited
        asked = sorted(awaited.unknown)
        awaited.learn(asked, {task: self.ends[task] for task in asked if task in self.ends})
        while decisions := settle_dependencies(self.world.awaited, self.world.tasks, self._instant):
            self._carry(decisions)

    def _plan(self) -> None:
        """In slices, with a memory; what comes of it is what the naive planner does in one go."""
        now = self._instant
        done: list[Decision] = []
        *_, self._forecasts = make_forecasts(self.world, self.policy, now, self._forecasts)
        naive = Naive(self.world, self.policy, self.now, self._forecasts)
        before = naive
        ahead = standings(self.world, self.policy, self.now)
        cursor, passed = None, list[Passing]()
        freed = set[NodeName]()
        """Devices with pledges that ended in this cycle: that room was not there for earlier tasks."""
        while True:
            plan = plan_cycle(
                self.world, self.policy, now, cursor, SLICE, self._cache, forecasts=self._forecasts
            )
            done += plan.decisions
            for decision in plan.decisions:
                naive = Naive(self.world, self.policy, self.now, self._forecasts)
                if decision.why == "admit" and not freed & nodes_of(decision.tasks[0].task):
                    passed += passings(self.world, naive, decision, ahead)
                freed |= {node_of(w.pledge.device) for w in decision.pledges if w.end}
                self._check_victims(naive, decision)
                self._carry([decision])
            cursor = plan.cursor
            if cursor is None or self.orders_were_lost(done):
                break
        steps = [step_of(decision) for decision in done]
        expected = before.plan(steps)
        assert steps == expected[: len(steps)]
        assert cursor is not None or steps == expected
        for passing in passed:
            kept = TaskId(passing.passed) in self.world.queue
            assert passing.was_allowed or not kept, f"{passing.name} passed {passing.passed}"

    def _move(self) -> None:
        decision = self._consolidation.next_move(self.world, self.policy, self._instant, self._forecasts)
        if decision is not None:
            self._carry([decision])
            self._consolidation.count(decision, self._instant)

    def orders_were_lost(self, done: Sequence[Decision]) -> bool:
        return self.orders_get_lost and any(decision.orders for decision in done)

    def _carry(self, decisions: Iterable[Decision]) -> None:
        """Commit, look at everything, then obey."""
        for decision in list(decisions):
            self._count_pledges(decision)
            commit(self.world, decision, self.now)
            for write in decision.tasks:
                if write.task.is_terminal:
                    self.ends[write.task.id] = TaskEnd(write.task.state, write.task.failed_by)
            self.check()
            if not self.orders_get_lost:
                for order in decision.orders:
                    self._obey(order)

    def after_turn(self) -> None:
        if self.orders_get_lost:
            self.orders_get_lost = False
            self.change_leader()

    # The agents

    def _obey(self, order: Any) -> None:
        agent = self.agents[order.node]
        run = (order.task, order.fence, order.rank)
        if not agent.is_heard:
            return
        match order:
            case StartOrder() if order.incarnation != agent.node.incarnation:
                self._refuse(agent, run)
            case StartOrder() if run not in agent.started:
                agent.started.add(run)
                agent.told[run] = []
                agent.processes[run] = Process(order)
            case StopOrder() if order.incarnation == agent.node.incarnation:
                self._stop(agent, run, order.grace_seconds)
            case GoOrder() if run in agent.processes:
                agent.processes[run].goes = True
            case ForgetOrder():
                agent.forgotten.add(run)
                if run not in agent.processes:
                    agent.told.pop(run, None)
            case _:
                pass

    def _stop(self, agent: Agent, run: RunId, grace_seconds: float) -> None:
        process = agent.processes.get(run)
        if process is not None:
            at = self.now + grace_seconds
            process.stop_at = at if process.stop_at is None else min(at, process.stop_at)
        elif run not in agent.started:
            agent.started.add(run)
            self._refuse(agent, run)

    def _refuse(self, agent: Agent, run: RunId) -> None:
        task, fence, rank = run
        self._say(agent, run, Ended(task, fence, self._instant, Ending.NEVER_STARTED, rank=rank))
        self._say(agent, run, Gone(task, fence, self._instant, Proof.NEVER_STARTED, rank=rank))

    def _kill_due(self, agent: Agent) -> None:
        for process in list(agent.processes.values()):
            if process.stop_at is not None and process.stop_at <= self.now and not process.is_stuck:
                if not process.has_ended:
                    self.end(agent, process, Ending.LOST)
                self.vanish(agent, process)

    def _say(self, agent: Agent, run: RunId, report: Report) -> None:
        if run in agent.told:
            agent.told[run].append(report)
        if agent.is_heard:
            self._said.append(report)

    def _announce(self, agent: Agent) -> None:
        self._said.append(NodeReport(agent.node, agent.devices, tuple(sorted(agent.told)), self._instant))
        self._said += [report for run in sorted(agent.told) for report in agent.told[run]]

    # What must hold

    def check(self) -> None:
        check_ledger(self.world)
        check_pledges(self.world)
        assert self._open == {(p, d) for p, mine in self.world.pledges.items() for d in mine}
        for name, use in self.world.use.items():
            node = self.world.nodes[name]
            assert use.cpu <= node.cpu
            assert use.memory_mb <= node.memory_mb
            assert use.runs <= node.max_runs
        for agent, process in self.processes():
            held = {
                (lease.device, lease.mb)
                for lease in self.world.leases.get(process.id[:2], {}).values()
                if lease.rank == process.id[2] and lease.state is not LeaseState.RELEASED
            }
            assert set(process.order.devices) <= held, (
                f"{process.id} of {agent.node.name} has lost its memory"
            )
        for id in self.world.active:
            check_gang(self.world, self.world.tasks[id])
        for agent in self.agents.values():
            for device, holders in agent.used_mb().items():
                has = self.world.ledgers[device].device
                assert sum(holders.values()) <= has.physical_mb - has.reserve_mb

    def _count_pledges(self, decision: Decision) -> None:
        """A pledge is made once, and ends once, by one of its four ends."""
        for write in decision.pledges:
            key = (write.pledge.preemptor, write.pledge.device)
            if write.end is None:
                assert key not in self._open
                self._open.add(key)
            else:
                self._open.remove(key)
                was_so = is_true(write.pledge, write.end, decision, self.world, self.policy, self.now)
                assert was_so, f"{key} was not {write.end}"

    def _check_victims(self, naive: Naive, decision: Decision) -> None:
        """Victims have no shield that counts, and strictly lower priority; or they borrow, in the same band
        at most, and keep their guarantee."""
        stopped = [w.task.id for w in decision.tasks if w.task.state is TaskState.STOPPING]
        victims = [self.world.tasks[name] for name in stopped]
        if not victims:
            return
        preemptor = self.world.tasks[decision.subject]  # type: ignore[index]
        assert all(naive.ignores_shields(it, preemptor) or not naive.is_shielded(it) for it in victims)
        turns = [victim for victim in victims if naive.has_turn_protection(victim, preemptor.priority)]
        if any(v.priority >= preemptor.priority or (v in turns and preemptor.priority < 90) for v in victims):
            surplus = naive.surplus_for(preemptor)
            assert {victim.tenant for victim in victims} <= surplus.keys()
            assert naive.leaves_guarantees(victims, surplus)
            assert all(band_of(victim.priority)[2] <= band_of(preemptor.priority)[2] for victim in victims)

    @property
    def _instant(self) -> Instant:
        return Instant(self.now)
