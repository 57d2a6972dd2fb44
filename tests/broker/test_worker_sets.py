"""Worker sets under a leader: what its loop makes of loads, of requests and of its own end."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker.wire.worker_sets import Scaling
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.leader_term import LeaderTerm
from gpubroker_server.core.domain.orders import Loaded
from gpubroker_server.core.domain.submission import AdmittedTask, BatchSubmission, WorkerSet
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Seconds, TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.ports.store import RunSpec, StaleTerm
from msgspec import to_builtins

from tests.broker.stage import ForgetfulStore, Hands, Stage, a_stage
from tests.builders import GIB, NOW, a_task

CALLS = Scaling("calls", 4.0, Seconds(60.0))
A = TaskId("a")
SPEC = RunSpec(kind="entrypoint", entrypoint="m:C", arguments=b'{"args":[],"kwargs":{"seconds":3600}}')


class Log:
    def __init__(self, stage: Stage) -> None:
        self.commits: list[list[Event]] = []
        stage.store.listen(lambda events: self.commits.append(list(events)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [dict(one.fields) for events in self.commits for one in events if one.kind == kind]

    def moves(self, task: str) -> list[str]:
        kinds = ("worker.", "task.started", "task.stopping", "task.requeued")
        events = (one for commit in self.commits for one in commit)
        return [one.kind for one in events if one.key == task and one.kind.startswith(kinds)]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with a_stage(tmp_path / "blobs") as stage:
        yield stage


async def ask(stage: Stage, *asked: tuple[str, dict[str, Any]]) -> None:
    """Requests that one turn of the leader finds together."""
    requests = [Request(f"r{n}", A, "default", what, fields, NOW) for n, (what, fields) in enumerate(asked)]
    await stage.store.request(*requests)
    await stage.leader.cycle()


async def formed(stage: Stage, *names: str, count: int = 1, **fields: Any) -> None:
    """As a gateway stores a set; its first workers run by then."""
    ids = tuple(map(TaskId, names))
    terms = {"least": 1, "most": len(ids), "max_concurrency": 4, "created_at": NOW, **fields}
    workers = WorkerSet(A, "default", "solvers", ids, count=count, **terms)
    form = Request("form", A, "default", "form", to_builtins(workers), NOW)
    tasks = [AdmittedTask(a_task(name, gpu_mb=GIB, held=True), SPEC) for name in names]
    await stage.store.submit_batch(BatchSubmission(tasks, requests=[form]))
    for name in names[:count]:
        await stage.leader.cycle()
        await stage.turns_until(name, TaskState.RUNNING)


def told(calls: int, task: str = "a", fence: int = 1) -> Loaded:
    return Loaded(TaskId(task), Fence(fence), NOW, calls, 0, 0.0)


def wanted(stage: Stage) -> int:
    return stage.world.worker_sets[A].count


async def test_a_load_that_a_worker_reports_brings_the_next_one(stage: Stage) -> None:
    await formed(stage, *"abc", scaling=CALLS)
    await stage.hear(told(5))
    assert wanted(stage) == 2
    await stage.turns_until("b", TaskState.RUNNING)
    await stage.hear(told(50, "b", fence=7))
    assert wanted(stage) == 2, "another attempt said so"
    await stage.hear(told(9, "b"))
    assert wanted(stage) == 3


async def test_concurrent_requests_all_count_and_their_events_carry_only_changes(
    stage: Stage,
) -> None:
    log = Log(stage)
    await formed(stage, *"ab", scaling=Scaling("signal", 10.0, Seconds(60.0)))
    await ask(stage, ("scale", {"least": 0}), ("signal", {"value": 12}), ("signal", {"value": 12.0}))
    [event] = log.of("worker_set.formed")
    assert (event["workers"], event["count"]) == (["a", "b"], 1)
    assert log.of("worker_set.changed") == [{"least": 0}, {"signal": 12.0}, {"count": 2}]


async def test_a_worker_joins_and_leaves_in_the_commits_of_its_own_moves(stage: Stage) -> None:
    log = Log(stage)
    await formed(stage, *"ab")
    assert log.of("worker.joined") == [{"set": "a", "attempt": 1, "node": "n1"}]
    await ask(stage, ("scale", {"count": 0}))
    assert log.of("worker.left") == [{"set": "a", "attempt": 1}]
    await stage.turns_until("a", TaskState.PENDING)
    assert log.moves("a") == [
        "task.started", "worker.joined", "task.stopping", "worker.left", "task.requeued",
    ]  # fmt: skip


async def test_workers_leave_a_drained_node_and_return_when_it_is_open(stage: Stage) -> None:
    await formed(stage, "a")

    async def ask_of_node(what: str) -> None:
        asked = {"by": "admin", "reason": "", "deadline_seconds": 0.0}
        await stage.store.request(Request(what, TaskId("n1"), "default", what, asked, NOW))
        await stage.leader.cycle()

    await ask_of_node("drain")
    await stage.turns_until("a", TaskState.PENDING)
    await stage.later(60.0)
    assert (await stage.row("a")).state is TaskState.PENDING
    assert not (await stage.row("a")).held, "it is wanted, and waits for a node"
    await ask_of_node("uncordon")
    await stage.turns_until("a", TaskState.RUNNING)
    assert ((await stage.row("a")).fence, wanted(stage)) == (2, 1)


async def test_next_broker_continues_a_set_and_waits_anew_before_a_worker_leaves(
    tmp_path: Path,
) -> None:
    clock = Hands()
    store = ForgetfulStore(clock)
    one, two = (Stage(tmp_path / name, store, clock) for name in ("one", "two"))
    two.executor = one.executor
    two.leader = two.new_leader(LeaderTerm(Term(0)))
    try:
        await one.lead()
        log = Log(one)
        await formed(one, *"ab", count=2, scaling=CALLS)
        await one.hear(told(0), told(0, "b"))
        await one.later(59.0)
        await two.lead()
        with pytest.raises(StaleTerm):
            await ask(one, ("scale", {"most": 2}))
        await two.later(2.0)
        await two.hear(told(0), told(0, "b"))
        assert wanted(two) == 2, "it has heard of the load only now"
        await two.later(61.0)
        assert (wanted(two), len(log.of("worker.joined"))) == (1, 2)
    finally:
        await one.executor.close(stop_cluster=True)
