"""The leader's loop: nothing acts before its commit, nothing heard is lost, bad bytes stop one run only."""

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.orders import Checkpointed, Ended, Ending, Progressed, StartOrder, StopOrder
from gpubroker_server.core.domain.task import Dependency, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, TaskId
from gpubroker_server.ports.store import StaleTerm, StoreUnavailable
from msgspec.structs import replace

from tests.broker.stage import Stage, a_stage
from tests.builders import GIB, NOW
from tests.contracts.scenes import next_term

HOUR = 3600.0


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with a_stage(tmp_path / "blobs") as stage:
        yield stage


async def running(stage: Stage, id: str, **fields: object) -> None:
    """Submit a task that works for an hour, and hear that it has begun."""
    await stage.submit(id, seconds=HOUR, **fields)  # type: ignore[arg-type]
    await stage.leader.cycle()
    await stage.turn()
    await stage.later(1.0)


def saved(task: str, sequence: int, data: bytes, digest: str = "") -> Checkpointed:
    digest = digest or sha256(data).hexdigest()
    return Checkpointed(TaskId(task), Fence(1), Instant(NOW), sequence, digest, data, None)


async def test_an_order_to_start_leaves_only_after_its_admission_is_durable(stage: Stage) -> None:
    await stage.submit("one", gpu_mb=GIB)
    await stage.leader.cycle()
    [(order, row)] = stage.executor.sent
    assert isinstance(order, StartOrder)
    assert (row.state, row.fence, order.fence) == (TaskState.ADMITTED, 1, 1)


async def test_a_notice_leaves_only_after_the_victims_stop_is_durable(stage: Stage) -> None:
    await running(stage, "low", priority=10, gpus=2)
    stage.executor.sent.clear()
    await stage.submit("high", priority=95, gpu_mb=20 * GIB)
    await stage.leader.cycle()
    [(order, row)] = stage.executor.sent
    assert isinstance(order, StopOrder)
    assert (row.id, row.state, row.freeing_for) == ("low", TaskState.STOPPING, "high")


async def test_preemptor_runs_once_its_victim_is_gone_and_the_victim_returns(
    stage: Stage,
) -> None:
    await running(stage, "low", priority=10, gpus=2)
    await stage.submit("high", priority=95, gpu_mb=20 * GIB)
    await stage.leader.cycle()
    await stage.turns_until("high", TaskState.SUCCEEDED)
    await stage.turns_until("low", TaskState.RUNNING)
    low = await stage.row("low")
    assert (low.preemptions, low.failures) == (1, 0)


async def test_while_the_database_is_away_nothing_is_dispatched_and_nothing_lost(
    stage: Stage,
) -> None:
    await stage.submit("one", gpu_mb=GIB)
    stage.forgetful.away = True
    with pytest.raises(StoreUnavailable):
        await stage.leader.cycle()
    assert stage.executor.sent == []
    stage.forgetful.come_back()
    await stage.leader.cycle()
    assert [order.task for order, _ in stage.executor.sent] == ["one"]


async def test_a_report_heard_while_the_database_is_away_counts_afterwards(stage: Stage) -> None:
    await stage.submit("one", gpu_mb=GIB)
    await stage.leader.cycle()
    stage.forgetful.away = True
    with pytest.raises(StoreUnavailable):
        await stage.turn()
    assert (await stage.row("one")).state is TaskState.ADMITTED
    stage.forgetful.come_back()
    await stage.turn()
    assert (await stage.row("one")).state is TaskState.SUCCEEDED


async def test_a_leader_whose_term_is_over_writes_nothing_and_starts_nothing(stage: Stage) -> None:
    await next_term(stage.store, "another")
    await stage.submit("one", gpu_mb=GIB)
    with pytest.raises(StaleTerm):
        await stage.leader.cycle()
    assert (await stage.row("one")).state is TaskState.PENDING
    assert stage.executor.sent == []


async def test_two_requests_about_one_task_are_both_carried_out(stage: Stage) -> None:
    task = await stage.submit("one", gpu_mb=100 * GIB)
    asked: tuple[dict[str, Any], ...] = ({"held": True}, {"priority": 70})
    for number, fields in enumerate(asked):
        await stage.store.request(Request(f"r{number}", task.id, "default", "change", fields, Instant(NOW)))
    for _ in range(2):
        await stage.leader.cycle()
    row = await stage.row("one")
    assert (row.held, row.priority) == (True, 70)
    assert not stage.world.requests


async def test_a_run_resumes_from_its_newest_checkpoint(stage: Stage) -> None:
    await running(stage, "one", gpu_mb=GIB, max_retries=1)
    await stage.hear(saved("one", 1, b"first"), saved("one", 2, b"second"))
    await stage.hear(Ended(TaskId("one"), Fence(1), Instant(NOW), Ending.FAILED))
    await stage.later(10.0)
    assert stage.executor.payloads[TaskId("one")].resume_state == b"second"


async def test_corrupt_checkpoint_is_passed_over_for_the_one_before_it(
    stage: Stage,
) -> None:
    await running(stage, "one", gpu_mb=GIB, max_retries=1)
    await stage.hear(saved("one", 1, b"first"))
    await stage.hear(saved("one", 2, b"second"))
    digest = sha256(b"second").hexdigest()
    [blob] = [path for path in stage.blobs_folder.rglob("*") if path.is_file() and digest in str(path)]
    blob.write_bytes(b"rotten")
    await stage.hear(Ended(TaskId("one"), Fence(1), Instant(NOW), Ending.FAILED))
    await stage.later(10.0)
    assert stage.executor.payloads[TaskId("one")].resume_state == b"first"


async def test_a_checkpoint_with_wrong_bytes_keeps_the_one_before(
    stage: Stage,
) -> None:
    await running(stage, "one", gpu_mb=GIB, max_retries=1)
    await stage.hear(saved("one", 1, b"first"))
    at = (await stage.row("one")).checkpoint_at
    stage.clock.time = Instant(stage.clock.time + 60.0)
    await stage.hear(saved("one", 2, b"garbled", digest=sha256(b"second").hexdigest()))
    assert [kept.sequence for kept in await stage.store.checkpoints(TaskId("one"))] == [1]
    assert (await stage.row("one")).checkpoint_at == at


async def test_a_run_with_missing_arguments_fails_with_the_reason(stage: Stage) -> None:
    await stage.submit("one", gpu_mb=GIB, spec={"arguments": b"", "arguments_digest": "0" * 64})
    await stage.leader.cycle()
    await stage.leader.cycle()
    result = await stage.store.result(TaskId("one"))
    assert (await stage.row("one")).state is TaskState.FAILED
    assert result is not None
    assert result.failure is not None
    assert result.failure["kind"] == "corrupt_order"
    assert "submit the task again" in result.failure["message"]
    assert all(not isinstance(order, StartOrder) for order, _ in stage.executor.sent)
    assert stage.world.ledgers[stage.world.by_node["n1"][0]].free_mb() == 24 * GIB  # type: ignore[index]


async def test_entrypoint_withdrawn_while_its_task_waited_is_not_started(stage: Stage) -> None:
    await stage.submit("one", gpu_mb=GIB, max_retries=3)
    stage.entrypoints = ("jobs:train", "team.*:*")
    await stage.lead()
    await stage.leader.cycle()
    result = await stage.store.result(TaskId("one"))
    row = await stage.row("one")
    assert (row.state, row.max_retries) == (TaskState.FAILED, 3)
    assert result is not None
    assert result.failure is not None
    assert result.failure["kind"] == "entrypoint_not_allowed"
    for part in ('"m:f"', "jobs:train, team.*:*", "Have the operator allow it"):
        assert part in result.failure["message"]
    assert all(not isinstance(order, StartOrder) for order, _ in stage.executor.sent)
    assert stage.world.ledgers[stage.world.by_node["n1"][0]].free_mb() == 24 * GIB  # type: ignore[index]


async def test_run_gets_the_secret_of_its_start_and_the_row_only_its_name(stage: Stage) -> None:
    await stage.secrets.put("default", "WANDB", "old")
    await stage.submit("one", gpu_mb=GIB, spec={"env": {"WANDB_KEY": "secret:WANDB", "SEED": "1"}})
    await stage.secrets.put("default", "WANDB", "rotated")
    await stage.leader.cycle()
    assert stage.executor.payloads[TaskId("one")].spec.env == {"WANDB_KEY": "rotated", "SEED": "1"}
    stored = (await stage.store.specs([TaskId("one")]))[TaskId("one")]
    assert stored.env == {"WANDB_KEY": "secret:WANDB", "SEED": "1"}


async def test_task_whose_secret_was_deleted_fails_at_its_start_without_a_retry(
    stage: Stage,
) -> None:
    await stage.secrets.put("other-tenant", "WANDB", "not yours")
    await stage.submit("one", gpu_mb=GIB, max_retries=3, spec={"env": {"WANDB_KEY": "secret:WANDB"}})
    await stage.leader.cycle()
    await stage.leader.cycle()
    result = await stage.store.result(TaskId("one"))
    assert (await stage.row("one")).state is TaskState.FAILED
    assert result is not None
    assert result.failure is not None
    assert result.failure["kind"] == "secret_missing"
    assert "gpubroker secrets set WANDB" in result.failure["message"]
    assert all(not isinstance(order, StartOrder) for order, _ in stage.executor.sent)


async def test_what_is_no_entrypoint_starts_whatever_is_allowed(stage: Stage) -> None:
    for kind in ("command", "function"):
        await stage.submit(kind, gpu_mb=GIB, spec={"kind": kind})
    stage.entrypoints = ()
    await stage.lead()
    await stage.leader.cycle()
    assert {order.task for order, _ in stage.executor.sent} == {"command", "function"}


async def test_a_large_result_becomes_a_blob_before_its_row(stage: Stage) -> None:
    await running(stage, "one", gpu_mb=GIB)
    large = b'"' + b"x" * 5000 + b'"'
    await stage.hear(Ended(TaskId("one"), Fence(1), Instant(NOW), Ending.SUCCEEDED, result=large))
    stored = await stage.store.result(TaskId("one"))
    assert stored is not None
    assert stored.data is None
    assert stored.digest is not None
    assert await stage.blobs.get(stored.digest) == large


async def test_progress_is_kept_in_memory_and_is_no_event(stage: Stage) -> None:
    await running(stage, "one", gpu_mb=GIB)
    before = await stage.store.head()
    await stage.hear(Progressed(TaskId("one"), Fence(1), Instant(NOW), 0.5, "half"))
    assert stage.progress[TaskId("one")].fraction == 0.5
    assert await stage.store.head() == before


async def test_the_rate_of_progress_counts_from_the_first_fraction_of_a_run(stage: Stage) -> None:
    """A run that resumes begins above 0; one whose fraction falls below its first has begun anew."""
    await running(stage, "one", gpu_mb=GIB)
    rates: list[float | None] = []
    ends: list[float | None] = []
    for seconds, fraction in (
        (0, None),
        (1, 0.5),
        (1, 0.75),
        (3, 0.75),
        (4, None),
        (5, 1.0),
        (6, 0.25),
        (8, 0.5),
    ):
        await stage.hear(Progressed(TaskId("one"), Fence(1), Instant(NOW + seconds), fraction, ""))
        newest = stage.progress[TaskId("one")]
        rates.append(newest.rate_per_second)
        ends.append(newest.eta_at and newest.eta_at - NOW)
    assert rates == [None, None, None, 0.125, None, 0.125, None, 0.125]
    assert ends == [None, None, None, 5.0, None, 5.0, None, 12.0]
    await stage.hear(Progressed(TaskId("one"), Fence(1), Instant(NOW + 9), 0.25 + 1e-12, ""))
    assert stage.progress[TaskId("one")].eta_at is None, "in thousands of years"


async def test_progress_is_forgotten_with_its_run(stage: Stage) -> None:
    for id in ("ends", "retried"):
        await running(stage, id, gpu_mb=GIB, max_retries=1)
        await stage.hear(Progressed(TaskId(id), Fence(1), Instant(NOW), 0.5, "half"))
    await stage.hear(
        Ended(TaskId("ends"), Fence(1), Instant(NOW), Ending.SUCCEEDED, result=b"1"),
        Ended(TaskId("retried"), Fence(1), Instant(NOW), Ending.FAILED),
    )
    assert stage.progress == {}


async def test_progress_of_an_older_attempt_is_not_shown(stage: Stage) -> None:
    await running(stage, "one", gpu_mb=GIB)
    stale = Progressed(TaskId("one"), Fence(0), Instant(NOW), 0.9, "from the past")
    await stage.hear(stale, replace(stale, task=TaskId("unknown")))
    assert stage.progress == {}


async def test_task_whose_dependency_ended_before_it_came_starts_next_cycle(
    stage: Stage,
) -> None:
    await stage.submit("first")
    await stage.leader.cycle()
    while TaskId("first") in stage.world.tasks:
        await stage.turn()
    stage.executor.sent.clear()
    after = (Dependency(TaskId("first")),)
    await stage.submit("second", after=after, awaits=True)
    assert stage.world.awaited.unknown == {"first"}
    await stage.leader.cycle()
    assert [order.task for order, _ in stage.executor.sent] == ["second"]


async def test_unsettled_dependent_is_settled_when_the_database_is_back(
    stage: Stage,
) -> None:
    await stage.submit("first", seconds=HOUR)
    await stage.submit("second", after=(Dependency(TaskId("first")),), awaits=True)
    await stage.store.request(Request("r1", TaskId("first"), "default", "cancel", {}, Instant(NOW)))
    stage.forgetful.until_away = 1
    with pytest.raises(StoreUnavailable):
        await stage.leader.cycle()
    stage.forgetful.come_back()
    await stage.leader.cycle()
    assert [task for task in ("first", "second") if TaskId(task) in stage.world.tasks] == []
    record = await stage.store.record(TaskId("second"))
    assert record is not None
    assert (record.task.state, record.task.failed_by) == (TaskState.FAILED, "first")


async def test_a_leader_that_winds_up_commits_its_reports_and_plans_nothing_more(stage: Stage) -> None:
    await running(stage, "one")
    await stage.submit("two", gpu_mb=GIB)
    stage.leader.hear([saved("one", 1, b"state")])
    leading = asyncio.create_task(stage.leader.run())
    await stage.leader.wind_up()
    leading.cancel()
    await asyncio.wait([leading])
    assert [checkpoint.sequence for checkpoint in await stage.store.checkpoints(TaskId("one"))] == [1]
    assert (await stage.row("two")).state is TaskState.PENDING


async def test_leader_that_winds_up_in_the_middle_of_a_cycle_plans_nothing_in_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await running(stage, "one")
    await stage.submit("two", gpu_mb=GIB)
    stage.leader.hear([saved("one", 1, b"state")])
    committing, go_on = asyncio.Event(), asyncio.Event()
    commit = stage.store.commit

    async def slow(*given: Any) -> Any:
        committing.set()
        await go_on.wait()
        return await commit(*given)

    monkeypatch.setattr(stage.store, "commit", slow)
    leading = asyncio.create_task(stage.leader._lead())
    await committing.wait()
    winding_up = asyncio.create_task(stage.leader.wind_up())
    await asyncio.sleep(0)
    go_on.set()
    await winding_up
    leading.cancel()
    await asyncio.wait([leading])
    assert [checkpoint.sequence for checkpoint in await stage.store.checkpoints(TaskId("one"))] == [1]
    assert (await stage.row("two")).state is TaskState.PENDING


async def test_a_leader_that_winds_up_sends_what_is_committed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the start needs could not be read for a moment, so its order has yet to leave."""

    async def away(_tasks: object) -> Any:
        raise StoreUnavailable("cut by the test")

    await stage.submit("one", gpu_mb=GIB)
    with monkeypatch.context() as cut:
        cut.setattr(stage.store, "specs", away)
        with pytest.raises(StoreUnavailable):
            await stage.leader.cycle()
    assert (await stage.row("one")).state is TaskState.ADMITTED
    assert stage.executor.begun == set()

    leading = asyncio.create_task(stage.leader._lead())
    await stage.leader.wind_up()
    assert stage.executor.begun == {"one"}
    leading.cancel()
    await asyncio.wait([leading])
