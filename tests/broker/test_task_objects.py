"""The leader sends nodes the objects that runs open, and makes objects of large results."""

import asyncio
import hashlib
import json

import pytest
from gpubroker_server.broker import task_objects
from gpubroker_server.broker.task_objects import TaskObjects
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.stored_objects import Quota, StoredObject
from gpubroker_server.core.domain.submission import BatchSubmission, WorkerSet
from gpubroker_server.core.domain.units import Fence, Instant, Seconds, TaskId
from gpubroker_server.core.world.worker_sets import WorkerSets
from gpubroker_server.ports.store import StoreUnavailable
from gpubroker_server.ports.task_objects import (
    ObjectAnswer,
    ObjectPart,
    ObjectWanted,
    PartAnswer,
    WantedAnswer,
)
from structlog.testing import capture_logs

from tests.builders import NOW, a_task, a_world, holding
from tests.contracts.scenes import a_submission
from tests.gateway.harness import ManualClock
from tests.memory_blobs import Blobs
from tests.patience import PATIENCE_SECONDS
from tests.stores import SqliteStore

BYTES = b"0123456789"
ID = hashlib.sha256(BYTES).hexdigest()
DAY = Seconds(86400.0)
ROOM = Quota(10**6, 10)


class Stage:
    """Implements the part of `Executor` that is used."""

    def __init__(self, quota: Quota = ROOM, blobs: Blobs | None = None) -> None:
        self.sent: list[ObjectAnswer] = []
        self._told = asyncio.Semaphore(0)
        self.clock = ManualClock()
        self.store = SqliteStore(self.clock)
        self.blobs = blobs or Blobs()
        tasks = (a_task(id, tenant="acme") for id in ("t1", "t2"))
        self.world = a_world(*(holding(task, node="n1") for task in tasks))
        about = self.world, self.store, self.blobs, self, self.clock
        self.objects = TaskObjects(*about, DAY, quota, 10_000)  # type: ignore[arg-type]

    def answer(self, answer: ObjectAnswer) -> None:
        self.sent.append(answer)
        self._told.release()

    async def told(self, number: int) -> None:
        """Until there are so many answers."""
        while len(self.sent) < number:
            await self._told.acquire()

    async def upload(self, tenant: str = "acme", id: str = ID) -> None:
        await self.blobs.put(BYTES, owner=tenant)
        until = Instant(self.clock.now() + DAY)
        await self.store.keep_object(StoredObject(tenant, id, len(BYTES), self.clock.now(), until), ROOM)

    async def wanted(self, first_byte: int, task: str = "t1", fence: int = 1) -> tuple[int, bytes, str]:
        """Size, what follows the first byte, failure."""
        self.sent.clear()
        await self.objects.answer(ObjectWanted(TaskId(task), Fence(fence), NOW, ID, first_byte))
        [order] = self.sent
        assert isinstance(order, WantedAnswer)
        assert order.node == "n1"
        return order.size_bytes, order.data, order.failure

    async def part(self, first_byte: int, data: bytes, id: str = ID, size: int = 10) -> tuple[int, str]:
        """How much is stored, and the failure."""
        self.sent.clear()
        await self.objects.answer(ObjectPart(TaskId("t1"), Fence(1), NOW, id, size, first_byte, data))
        [order] = self.sent
        assert isinstance(order, PartAnswer)
        return order.stored_bytes, order.failure


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_a_worker_set_uses_its_objects_until_it_is_over(stage: Stage) -> None:
    """One that is restarted, or comes later, opens them too."""
    await stage.upload()
    workers = a_set("t1", tenant="acme")
    first = a_submission(a_task("t1", tenant="acme"))
    await stage.store.submit_batch(BatchSubmission([first], answer=json.dumps({"objects": [ID, "0" * 64]})))
    await stage.store.submit_batch(BatchSubmission([a_submission(a_task("other"))]))
    stage.world.worker_sets = WorkerSets([workers, a_set("other")])
    for _ in range(3):
        stage.clock.advance(0.9 * DAY)
        await stage.objects.extend()
    assert await stage.wanted(0) == (10, BYTES, "")
    stage.world.worker_sets = WorkerSets()
    stage.clock.advance(1.1 * DAY)
    await stage.objects.extend()
    assert "has no object" in (await stage.wanted(0))[2]


async def test_a_task_and_an_array_use_their_objects_until_they_are_over(stage: Stage) -> None:
    """However long they wait, are preempted or run."""
    other = "0" * 63 + "1"
    for id in (ID, other):
        await stage.upload(id=id)
    task, worker = a_task("t1", tenant="acme"), a_task("t2", tenant="acme", holder=WorkerSeat(TaskId("t2")))
    await stage.store.submit(a_submission(task, objects=(ID,)))
    await stage.store.submit_batch(
        BatchSubmission([a_submission(worker)], answer=json.dumps({"objects": [other]}))
    )
    stage.world = stage.objects.world = a_world(task, worker)
    for _ in range(3):
        stage.clock.advance(0.9 * DAY)
        await stage.objects.extend()
    kept = [await stage.store.find_object("acme", id, stage.clock.now()) for id in (ID, other)]
    assert None not in kept


def a_set(id: str, tenant: str = "default") -> WorkerSet:
    return WorkerSet(TaskId(id), tenant, "", (TaskId(id),), 1, 1, 1, 1, NOW)


async def test_an_object_is_sent_part_by_part_to_the_node_of_the_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_objects, "PART_BYTES", 6)
    await stage.upload()
    assert await stage.wanted(0) == (10, b"012345", "")
    assert await stage.wanted(6) == (10, b"6789", "")
    assert await stage.wanted(10) == (10, b"", "")


async def test_deleted_expired_or_foreign_object_is_not_sent(
    stage: Stage,
) -> None:
    """A foreign object is one of another tenant."""
    await stage.upload("zeta")
    assert (await stage.wanted(0))[:2] == (0, b"")
    assert 'tenant "acme" has no object' in (await stage.wanted(0))[2]
    await stage.upload()
    stage.clock.advance(DAY + 1)
    assert "not used for 86400 seconds" in (await stage.wanted(10))[2]
    await stage.upload()
    await stage.store.drop_object("acme", ID)
    assert "was deleted" in (await stage.wanted(10))[2]
    await stage.upload()
    await stage.blobs.delete(ID)
    assert "bytes" in (await stage.wanted(0))[2]


async def test_to_open_an_object_is_a_use_of_it(stage: Stage) -> None:
    await stage.upload()
    stage.clock.advance(DAY / 2)
    await stage.wanted(10)
    kept = await stage.store.stored_object("acme", ID)
    assert kept is not None
    assert kept.expires_at == stage.clock.now() + DAY


@pytest.mark.parametrize(("task", "fence"), [("t1", 2), ("t3", 1)])
async def test_a_run_that_is_not_the_current_one_of_its_task_gets_no_answer(
    stage: Stage, task: str, fence: int
) -> None:
    await stage.upload()
    await stage.objects.answer(ObjectWanted(TaskId(task), Fence(fence), NOW, ID, 0))
    assert stage.sent == []


async def test_a_large_result_becomes_an_object_of_the_tenant(stage: Stage) -> None:
    assert await stage.part(0, BYTES[:4]) == (4, "")
    assert await stage.part(0, BYTES[:4]) == (4, ""), "the answer was lost"
    assert await stage.part(4, BYTES[4:]) == (10, "")
    assert await stage.part(4, BYTES[4:]) == (10, "")
    assert stage.blobs.objects == {ID: BYTES}
    kept = await stage.store.stored_object("acme", ID)
    assert kept is not None
    assert kept.size_bytes == 10
    assert await stage.wanted(0) == (10, BYTES, "")


async def test_a_large_result_counts_in_the_quota_of_its_tenant() -> None:
    full = Stage(Quota(0, 10))
    assert "may have" in (await full.part(0, BYTES))[1]
    assert full.blobs.objects == {}


async def test_a_result_beyond_the_size_of_objects_is_refused_at_its_first_part(stage: Stage) -> None:
    assert "limits.object_bytes" in (await stage.part(0, BYTES, size=10_001))[1]


async def test_a_result_that_arrives_damaged_becomes_no_object(stage: Stage) -> None:
    assert "did not arrive" in (await stage.part(0, b"9876543210"))[1]
    assert await stage.store.stored_object("acme", ID) is None


@pytest.mark.parametrize(("id", "size"), [("../../../etc/x", 10), ("A" * 64, 10), (ID, 5)])
async def test_a_part_that_user_code_has_forged_writes_nothing(stage: Stage, id: str, size: int) -> None:
    assert "is none" in (await stage.part(0, BYTES, id, size))[1]
    assert (stage.blobs.uploads, stage.blobs.objects) == ({}, {})


async def test_an_object_whose_file_was_cut_short_is_told_to_be_damaged(stage: Stage) -> None:
    await stage.upload()
    stage.blobs.objects[ID] = BYTES[:4]
    assert await stage.wanted(0) == (10, BYTES[:4], "")
    assert "damaged" in (await stage.wanted(4))[2], "it would be asked for without end"


async def test_parts_of_results_count_together_and_go_when_their_run_is_over() -> None:
    stage = Stage(Quota(10_000, 10))
    large = hashlib.sha256(b"x" * 6000).hexdigest()

    async def part_of(task: str, fence: int = 1) -> str:
        stage.sent.clear()
        question = ObjectPart(TaskId(task), Fence(fence), NOW, large, 6000, 0, b"x" * 3000)
        await stage.objects.answer(question)
        return getattr(stage.sent[0], "failure", "") if stage.sent else "no answer"

    assert await part_of("t1") == ""
    assert "may have" in await part_of("t2"), "what is under way fills the disk too"
    assert len(stage.blobs.uploads) == 1
    del stage.world.tasks[TaskId("t1")]
    assert await part_of("t2") == ""
    assert list(stage.blobs.uploads) == ["t2-1-0"]


class OneUnreadable(Blobs):
    """A disk that cannot read one of its files."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0

    async def read(self, digest: str, first_byte: int, most_bytes: int) -> bytes:
        if digest != ID:
            return await super().read(digest, first_byte, most_bytes)
        self.tries += 1
        raise StoreUnavailable("an object cannot be read: Input/output error")


async def test_unreadable_file_delays_no_other_object_and_ends_in_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blobs = OneUnreadable()
    stage = Stage(blobs=blobs)
    await stage.upload()
    other = await blobs.put(b"other", owner="acme")
    until = Instant(stage.clock.now() + DAY)
    await stage.store.keep_object(StoredObject("acme", other, 5, stage.clock.now(), until), ROOM)
    bad, good = (ObjectWanted(TaskId("t1"), Fence(1), NOW, id, 0) for id in (ID, other))
    with capture_logs() as logs:
        serving = asyncio.create_task(stage.objects.serve())
        try:
            stage.objects.hear([bad, good])
            async with asyncio.timeout(PATIENCE_SECONDS):
                await stage.told(1)
                assert (stage.sent[0].asked, blobs.tries) == (good, 1), "it does not wait for the bad one"
                monkeypatch.setattr(task_objects, "AGAIN_SECONDS", 0.0)
                await stage.told(2)
        finally:
            serving.cancel()
    assert stage.sent[1].asked == bad
    assert "cannot be read" in stage.sent[1].failure
    assert [entry["log_level"] for entry in logs] == ["warning"]
