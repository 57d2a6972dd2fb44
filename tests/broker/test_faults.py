"""What goes wrong around the leader: a database that is away, a full disk, values that nobody can keep."""

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest
from gpubroker_server.adapters.sql.store import open_store
from gpubroker_server.broker.commit import TRIES, PictureDiverged
from gpubroker_server.broker.dispatch import Dispatcher
from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Checkpointed, Ended, Ending, Failure, Gone, StartOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Mib, TaskId
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.ports.store import StoredResult, StoreUnavailable
from msgspec.structs import replace

from tests.broker.stage import Stage, a_stage
from tests.builders import GIB, NOW
from tests.contracts.scenes import log_of, replayed
from tests.full_disk import file_size_limit

HOUR = 3600.0
LARGE_ARGUMENTS = b'{"kwargs": {"seconds": 0}, "args": ["' + b"x" * 2000 + b'"]}'


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with a_stage(tmp_path / "blobs") as stage:
        yield stage


@pytest.fixture
async def postgres_stage(tmp_path: Path, postgres_url: str) -> AsyncIterator[Stage]:
    store = await open_store(postgres_url)
    async with a_stage(tmp_path / "blobs", store) as stage:
        yield stage
    await store.close()


async def running(stage: Stage, *ids: str, **fields: object) -> None:
    """Submit tasks that work for an hour, and hear that they have begun."""
    for id in ids:
        await stage.submit(id, seconds=HOUR, gpu_mb=GIB, **fields)  # type: ignore[arg-type]
    await stage.leader.cycle()
    for id in ids:
        await stage.turns_until(id, TaskState.RUNNING)


def ended(id: str, ending: Ending = Ending.SUCCEEDED, **left: object) -> Ended:
    return Ended(TaskId(id), Fence(1), Instant(NOW), ending, **left)  # type: ignore[arg-type]


def saved(id: str, sequence: int, data: bytes | None, uri: str | None = None) -> Checkpointed:
    digest = sha256(data or b"").hexdigest()
    return Checkpointed(TaskId(id), Fence(1), Instant(NOW), sequence, digest, data, uri)


async def result_of(stage: Stage, id: str) -> StoredResult:
    result = await stage.store.result(TaskId(id))
    assert result is not None
    return result


def started(stage: Stage) -> list[str]:
    return [order.task for order, _ in stage.executor.sent if isinstance(order, StartOrder)]


async def test_what_a_commit_wrote_before_it_was_cut_is_dispatched_all_the_same(stage: Stage) -> None:
    for id in ("a", "b", "c"):
        await stage.submit(id, gpu_mb=GIB)
    stage.forgetful.until_away = 1
    with pytest.raises(StoreUnavailable):
        await stage.leader.cycle()
    assert started(stage) == ["a"]
    stage.forgetful.come_back()
    await stage.leader.cycle()
    assert started(stage) == ["a", "b", "c"]


async def test_a_start_is_sent_though_the_picture_has_not_heard_of_its_claim(stage: Stage) -> None:
    await stage.submit("one", gpu_mb=GIB)
    behind = replayed(await log_of(stage.store))
    [admission] = plan_cycle(stage.world, Policy(), stage.clock.now()).decisions
    await stage.store.commit(stage.leader.leader_term.term, [admission])
    dispatcher = Dispatcher(stage.store, stage.blobs, stage.executor, behind, stage.clock, ("m:*",))
    assert list(await dispatcher.send([admission])) == []
    assert started(stage) == ["one"]
    assert stage.executor.payloads[TaskId("one")].attempt == 1


async def test_a_start_whose_task_has_ended_meanwhile_is_not_sent(stage: Stage) -> None:
    await stage.submit("one", gpu_mb=GIB)
    [admission] = plan_cycle(stage.world, Policy(), stage.clock.now()).decisions
    await stage.store.commit(stage.leader.leader_term.term, [admission])
    await stage.hear(ended("one"), Gone(TaskId("one"), Fence(1), Instant(NOW), Proof.PROCESS_ABSENT))
    dispatcher = Dispatcher(stage.store, stage.blobs, stage.executor, stage.world, stage.clock, ("m:*",))
    assert list(await dispatcher.send([admission])) == []
    assert started(stage) == []


async def test_result_on_a_full_disk_is_kept_in_hand_until_there_is_room(
    stage: Stage,
) -> None:
    await running(stage, "one")
    large = b'"' + b"x" * 5000 + b'"'
    with file_size_limit(1000), pytest.raises(StoreUnavailable, match="make room"):
        await stage.hear(ended("one", result=large))
    assert (await stage.row("one")).state is TaskState.RUNNING
    await stage.leader.cycle()
    assert (await stage.row("one")).state is TaskState.SUCCEEDED
    digest = (await result_of(stage, "one")).digest
    assert digest is not None
    assert await stage.blobs.get(digest) == large


async def test_a_result_larger_than_what_is_kept_fails_its_run_alone(stage: Stage) -> None:
    await running(stage, "large", "small")
    await stage.hear(ended("large", result=b"x" * 10_001), ended("small", result=b"1"))
    assert (await stage.row("large")).state is TaskState.FAILED
    assert (await stage.row("small")).state is TaskState.SUCCEEDED
    failure = (await result_of(stage, "large")).failure
    assert failure is not None
    assert failure["kind"] == "result_too_large"
    assert "at most 10000 bytes" in failure["message"]


async def test_checkpoint_over_the_size_limit_leaves_the_one_before_in_force(
    stage: Stage,
) -> None:
    await running(stage, "one")
    await stage.hear(saved("one", 1, b"first"), saved("one", 2, b"x" * 10_001))
    assert [kept.sequence for kept in await stage.store.checkpoints(TaskId("one"))] == [1]
    assert (await stage.row("one")).checkpoint_at == NOW


async def test_only_checkpoints_that_are_refused_save_nothing(stage: Stage) -> None:
    await running(stage, "one")
    await stage.hear(saved("one", 1, b"x" * 10_001))
    assert (await stage.row("one")).checkpoint_at is None


async def test_arguments_that_cannot_be_read_now_hold_up_their_own_task_only(stage: Stage) -> None:
    digest = await stage.blobs.put(LARGE_ARGUMENTS, owner="one")
    path = stage.blobs_folder / digest[:2] / digest[2:4] / digest
    path.unlink()
    path.mkdir()  # the disk says an error, not that there is no such object
    await stage.submit("one", gpu_mb=GIB, spec={"arguments": b"", "arguments_digest": digest})
    await stage.submit("two", gpu_mb=GIB)
    await stage.leader.cycle()
    await stage.leader.cycle()
    assert started(stage) == ["two"]
    row = await stage.row("one")
    assert (row.state, row.failures) == (TaskState.PENDING, 0)
    path.rmdir()
    await stage.blobs.put(LARGE_ARGUMENTS, owner="one")
    stage.executor.sent.clear()
    await stage.later(10.0)
    assert started(stage) == ["one"]


@pytest.mark.parametrize("what", ["\0", "\ud800"], ids=["nul", "half a pair"])
async def test_a_checkpoint_that_no_row_can_hold_is_left_out_and_its_run_goes_on(
    postgres_stage: Stage, what: str
) -> None:
    await running(postgres_stage, "one", "two")
    await postgres_stage.hear(
        saved("one", 1, b"first"),
        saved("one", 2, None, uri=f"s3://bucket/{what}"),
        ended("two", result=b"1"),
    )
    assert (await postgres_stage.row("one")).state is TaskState.RUNNING
    assert (await postgres_stage.row("two")).state is TaskState.SUCCEEDED
    await postgres_stage.hear(ended("one", result=b"1"))
    assert (await postgres_stage.row("one")).state is TaskState.SUCCEEDED


async def test_an_end_that_no_row_can_hold_fails_its_run_and_no_other(postgres_stage: Stage) -> None:
    await running(postgres_stage, "one", "two")
    unspeakable = Failure("exception", "half a pair: \ud800")
    await postgres_stage.hear(
        ended("one", Ending.FAILED, failure=unspeakable),
        Gone(TaskId("one"), Fence(1), Instant(NOW), Proof.PROCESS_ABSENT),
        ended("two", result=b"1"),
    )
    assert (await postgres_stage.row("one")).state is TaskState.FAILED
    assert (await postgres_stage.row("two")).state is TaskState.SUCCEEDED
    failure = (await result_of(postgres_stage, "one")).failure
    assert failure is not None
    assert failure["kind"] == "unstorable"
    leases = (await postgres_stage.store.snapshot()).leases
    assert {lease.holder for lease in leases} == {"two"}


async def test_a_request_that_no_row_can_hold_is_settled_without_it(postgres_stage: Stage) -> None:
    task = await postgres_stage.submit("one", gpu_mb=100 * GIB)
    beyond = Request("r1", task.id, "default", "change", {"priority": 2**40}, Instant(NOW))
    await postgres_stage.store.request(beyond)
    await postgres_stage.leader.cycle()
    assert not postgres_stage.world.requests
    row = await postgres_stage.row("one")
    assert (row.priority, row.version) == (task.priority, 1)


async def test_a_plan_that_the_database_refuses_for_ever_ends_the_leader(stage: Stage) -> None:
    [device, _] = [stage.world.ledgers[key].device for key in stage.world.by_node["n1"]]  # type: ignore[index]
    stage.world.add_device(replace(device, physical_mb=Mib(device.physical_mb * 4)))  # what no row says
    await stage.submit("one", gpu_mb=50 * GIB)
    for _ in range(TRIES - 1):
        await stage.leader.cycle()
    with pytest.raises(PictureDiverged, match="the leader's decisions about one; restart"):
        await stage.leader.cycle()
    assert started(stage) == []


async def test_requests_that_take_turns_on_one_row_do_not_mean_a_wrong_picture(stage: Stage) -> None:
    task = await stage.submit("one", gpu_mb=100 * GIB)
    for n in range(TRIES + 5):
        fields = {"priority": n + 1}
        await stage.store.request(Request(f"r{n:02}", task.id, "default", "change", fields, Instant(NOW)))
    for _ in range(TRIES + 5):
        await stage.leader.cycle()
    assert not stage.world.requests
    assert (await stage.row("one")).priority == TRIES + 5
