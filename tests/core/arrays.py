"""A leader and the workers of an array, without a store."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gpubroker_server.core.domain.decisions import Decision, ItemPage, write_move
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    Failure,
    Gone,
    ItemRange,
    ItemResult,
    ItemsOrder,
    ItemsReported,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.submission import ArrayTerms
from gpubroker_server.core.domain.task import Move, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Fence, NodeName, TaskId
from gpubroker_server.core.lifecycle.array_items import ArrayWork
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.lifecycle.stopping import requeued_fields
from gpubroker_server.core.world.world import World

from tests.builders import NOW, a_task, a_world, commit

POLICY = Policy()
WORKERS = ("w0", "w1", "w2")


def terms(total: int = 100, **fields: Any) -> ArrayTerms:
    facts: dict[str, Any] = {
        "id": TaskId("w0"),
        "tenant": "default",
        "name": "",
        "workers": tuple(map(TaskId, WORKERS)),
        "numbers": ((0, total),),
        "chunk": None,
        "item_retries": 0,
        "item_timeout_seconds": None,
        "result_format": "json",
        "submitted_at": NOW,
    }
    return ArrayTerms(**{**facts, **fields})


def a_worker(id: str, state: TaskState = TaskState.RUNNING, **fields: Any) -> Task:
    on_node = {"node": NodeName("n1"), "admitted_at": NOW, "started_at": NOW, "fence": Fence(1), "version": 3}
    facts = {"cpu": 1.0, "state": state, "holder": WorkerSeat(TaskId("w0")), "max_retries": 10, **fields}
    return a_task(id, **facts, **(on_node if state is TaskState.RUNNING else {}))


def result(number: int, failure: Failure | None = None) -> ItemResult:
    return ItemResult(number, 0.01, 1, None if failure else b"%d" % number, failure)


def numbers_in(ranges: Iterable[ItemRange]) -> list[int]:
    return [number for first, behind in ranges for number in range(first, behind)]


@dataclass
class Stage:
    """A leader and what it has committed."""

    work: ArrayWork
    world: World = field(default_factory=lambda: a_world(*map(a_worker, WORKERS)))
    pages: list[ItemPage] = field(default_factory=list)
    policy: Policy = POLICY

    def tell(self, *reports: Any, is_committed: bool = True) -> list[ItemsOrder]:
        """The answers; none if the commit failed."""
        draft = self.work.copy()
        drafts = {draft.terms.id: draft}
        decisions = apply_reports(self.world, reports, NOW, self.policy, drafts)
        if not is_committed:
            self.lose_leader()
            return []
        commit(self.world, decisions)
        self.work = draft
        self.pages += [page for decision in decisions for page in decision.items]
        return [order for d in decisions for order in d.orders if isinstance(order, ItemsOrder)]

    def lose_leader(self) -> None:
        done = [(page.first, page.first + page.count) for page in self.pages]
        self.work = ArrayWork(self.work.terms, done, max((page.page for page in self.pages), default=0))

    def restart(self, worker: str, *, crashed: bool) -> None:
        """It lost its place, or its process, and runs again."""
        task = self.world.tasks[TaskId(worker)]
        self._move(worker, Move.REQUEUED, **requeued_fields(task, failures=task.failures + crashed))
        self.start(worker)

    def start(self, worker: str) -> None:
        fence = Fence(self.world.tasks[TaskId(worker)].fence + 1)
        self._move(worker, Move.ADMITTED, fence=fence, node=NodeName("n1"), admitted_at=NOW)
        self._move(worker, Move.STARTED)

    def stop(self, worker: str, reason: StopReason) -> None:
        self._move(worker, Move.STOPPING, stop_reason=reason, stop_deadline_at=NOW)

    def fail(self, worker: str, failure: Failure | None) -> None:
        """Its process ended, with or without a report."""
        task = self.world.tasks[TaskId(worker)]
        end = Ended(task.id, task.fence, NOW, Ending.FAILED, failure=failure)
        self.tell(*([] if failure is None else [end]), Gone(task.id, task.fence, NOW, Proof.PROCESS_ABSENT))

    def _move(self, worker: str, what: Move, **changes: Any) -> None:
        write = write_move(self.world.tasks[TaskId(worker)], what, **changes)
        commit(self.world, Decision(worker, "test", tasks=(write,)))

    def lines(self) -> list[dict[str, Any]]:
        pages = sorted(self.pages, key=lambda page: page.first)
        return [json.loads(line) for page in pages for line in page.lines.splitlines()]


def reported(worker: str, wanted: int, *results: ItemResult, number: int = 1, **fields: Any) -> ItemsReported:
    facts = {"fence": Fence(1), "held": (), **fields}
    held = facts.pop("held")
    return ItemsReported(TaskId(worker), facts["fence"], NOW, number, results, held, wanted)
