"""Records of the files that runs have left: the same in every store."""

from gpubroker_server.core.domain.units import Fence, TaskId
from gpubroker_server.ports.run_outputs import RunOutput
from gpubroker_server.ports.store import TaskStore
from msgspec.structs import replace

from tests.builders import NOW
from tests.contracts.scenes import with_gpu
from tests.contracts.test_store_retention import NEVER, cutoffs, ended, pruned

OUTPUT = RunOutput(TaskId("t1"), Fence(2), 0, NOW, 3, "ab" * 32, 2**33, "")


async def test_outputs_come_back_by_attempt_and_rank(store: TaskStore) -> None:
    first, other = replace(OUTPUT, fence=Fence(1), digest=None), replace(OUTPUT, rank=1, message="left out")
    for one in (other, OUTPUT, first, replace(OUTPUT, task=TaskId("t2"))):
        await store.keep_output(one)
    assert await store.outputs_of(TaskId("t1")) == [first, OUTPUT, other]
    assert await store.outputs_of(TaskId("t3")) == []


async def test_later_report_of_a_run_replaces_the_earlier_one(store: TaskStore) -> None:
    await store.keep_output(OUTPUT)
    await store.keep_output(replace(OUTPUT, files=4))
    assert await store.outputs_of(TaskId("t1")) == [replace(OUTPUT, files=4)]


async def test_outputs_are_pruned_with_their_task(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1")
    await store.keep_output(OUTPUT)
    await pruned(store, term, cutoffs(finished=NEVER))
    assert await store.outputs_of(TaskId("t1")) == [OUTPUT]
    await pruned(store, term, cutoffs())
    assert await store.outputs_of(TaskId("t1")) == []
