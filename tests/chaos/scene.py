"""A store, the leader's World over it, and reports from machines, step by step: there is no loop."""

import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Checkpointed,
    Ended,
    Ending,
    Failure,
    Gone,
    NodeReport,
    Ready,
    Report,
    ReportedDevice,
    Started,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.submission import (
    AdmittedTask,
    BatchSubmission,
    SubmitOutcome,
    SubmitVerdict,
)
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, TaskId, Term
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, reconcile
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import CommitVerdict, TaskStore

from tests.builders import GIB, a_node, a_sample, a_task
from tests.contracts.scenes import a_submission

DEVICES = tuple(ReportedDevice(f"gpu{i}", "H100", i, Mib(80 * GIB), True) for i in range(2))
NODE = NodeName("n1")
RULES = InventoryRules("test")
MAX_ROUNDS = 20
"""More rounds than a task needs to end."""


class Scene:
    def __init__(self, store: TaskStore, term: Term) -> None:
        self.store, self.term = store, term
        self.policy = Policy()
        self.world = World()
        self.accepted: set[str] = set()
        """Tasks whose submit was answered with ACCEPTED."""
        self._later_seconds = 0.0

    @classmethod
    async def on(cls, store: TaskStore, term: Term, world: World | None = None) -> "Scene":
        """With a World read from the rows, unless one is given."""
        scene = cls(store, term)
        if world is None:
            fill(scene.world, await store.snapshot())
        else:
            scene.world = world
        store.listen(scene.world.apply)
        return scene

    @property
    def now(self) -> Instant:
        return Instant(time.time() + self._later_seconds)

    def task(self, id: str) -> Task:
        return self.world.tasks[TaskId(id)]

    # Clients

    async def submit(self, id: str, key: str | None = None, **fields: Any) -> SubmitOutcome:
        """A task of 10 GiB, unless `fields` say otherwise."""
        outcome = await self.store.submit(self._submission(id, key, **fields))
        if outcome.verdict is SubmitVerdict.ACCEPTED:
            self.accepted.add(id)
        return outcome

    async def submit_batch(self, *ids: str) -> SubmitOutcome:
        batch = BatchSubmission([self._submission(id) for id in ids], f"key {ids[0]}", "body", '["answer"]')
        outcome = await self.store.submit_batch(batch)
        if outcome.verdict is SubmitVerdict.ACCEPTED:
            self.accepted |= set(ids)
        return outcome

    def _submission(self, id: str, key: str | None = None, **fields: Any) -> AdmittedTask:
        if not fields.keys() & {"bundles", "gpu_mb"}:
            fields["gpu_mb"] = 10 * GIB
        task = a_task(id, **{"submitted_at": self.now, **fields})
        return a_submission(task, key, labels={"kind": "chaos"})

    async def ask(self, id: str, what: str, **fields: Any) -> None:
        await self.store.request(Request(f"r-{id}-{what}", TaskId(id), "default", what, fields, self.now))

    # The leader

    async def commit(self, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        written = [decision for decision in decisions if not decision.is_empty()]
        assert written, "every step changes something"
        return await self.store.commit(self.term, written)

    def plan(self, seconds: float = 0.0) -> Sequence[Decision]:
        """Plan, `seconds` from now."""
        now = Instant(self.now + seconds)
        self.world.enter_due(now)
        self.world.measure(a_sample(device, now) for device in self.world.ledgers)
        return plan_cycle(self.world, self.policy, now).decisions

    def apply_reports(self, *reports: Report) -> Sequence[Decision]:
        return apply_reports(self.world, reports, self.now, self.policy)

    def settle_requests(self) -> Sequence[Decision]:
        return [
            carry_out(self.world, self.world.requests[id], self.now, self.policy)
            for id in sorted(self.world.requests)
        ]

    def due_in(self, seconds: float = 0.0) -> Sequence[Decision]:
        """What is due `seconds` from now, for a leader that has kept watch all the time."""
        now = Instant(self.now + seconds)
        return due(self.world, now, self.policy, ObservationWindow(Instant(0.0), now))

    def node_answers(self) -> Sequence[Decision]:
        """The agent answers, and knows of no run."""
        seen = NodeReport(a_node(), DEVICES, (), self.now)
        return reconcile(self.world, seen, self.now, self.policy, RULES)

    # Reports of machines

    def starts(self, id: str) -> list[Report]:
        run = self._run(id)
        return [Started(*run, self.now, pid=1, rank=rank) for rank in self._ranks(id)]

    def gets_ready(self, id: str) -> list[Report]:
        run = self._run(id)
        return [Ready(*run, self.now, "127.0.0.1:9", rank=rank) for rank in self._ranks(id)]

    def checkpoint(self, id: str, sequence: int = 1) -> Report:
        data = b"state"
        return Checkpointed(*self._run(id), self.now, sequence, sha256(data).hexdigest(), data, None)

    def ends(self, id: str, ending: Ending = Ending.SUCCEEDED) -> list[Report]:
        run = self._run(id)
        failed = Failure("exception", "as written") if ending is Ending.FAILED else None
        return [
            Ended(*run, self.now, ending, result=b"1", failure=failed, rank=rank) for rank in self._ranks(id)
        ]

    def gone(self, id: str, proof: Proof = Proof.PROCESS_ABSENT) -> list[Report]:
        """A report for each process of the task that still holds memory."""
        runs = {
            (lease.fence, lease.rank)
            for claim in self.world.leases.values()
            for lease in claim.values()
            if lease.holder == id
        }
        return [Gone(TaskId(id), Fence(fence), self.now, proof, rank=rank) for fence, rank in sorted(runs)]

    def _run(self, id: str) -> tuple[TaskId, Fence]:
        return TaskId(id), self.task(id).fence

    def _ranks(self, id: str) -> range:
        return range(max(1, len(members_of(self.task(id)))))

    # To an end

    async def begin(self, id: str, **fields: Any) -> None:
        """Submit a task and let it run."""
        await self.submit(id, **fields)
        await self.commit(self.plan())
        await self.commit(self.apply_reports(*self.starts(id)))

    async def finish(self) -> None:
        """Bring every task to its end and release all memory."""
        for _ in range(MAX_ROUNDS):
            if not (self.world.tasks or self.world.leases or self.world.requests):
                self._later_seconds = 0.0
                return
            self._later_seconds += 1000.0
            for decide in (self.due_in, self._find_node, self.settle_requests, self._report_ends, self.plan):
                decisions = decide()
                if any(not decision.is_empty() for decision in decisions):
                    verdicts = await self.commit(decisions)
                    assert set(verdicts) == {CommitVerdict.COMMITTED}, (decisions, verdicts)
        raise AssertionError(f"not ended: {self.world.tasks} {self.world.leases}")

    def _find_node(self) -> Sequence[Decision]:
        return () if self.world.nodes[NODE].ready else self.node_answers()

    def _report_ends(self) -> Sequence[Decision]:
        reports: list[Report] = []
        for id, task in self.world.tasks.items():
            if members_of(task) and task.state is TaskState.ADMITTED:
                reports += self.gets_ready(id)
            elif task.state in (TaskState.ADMITTED, TaskState.RUNNING):
                reports += [*self.starts(id), *self.ends(id), *self.gone(id)]
            else:
                reports += self.gone(id)
        holders = {holder for holder, _ in self.world.leases if holder not in self.world.tasks}
        reports += [report for holder in sorted(holders) for report in self.gone(holder)]
        return self.apply_reports(*reports)
