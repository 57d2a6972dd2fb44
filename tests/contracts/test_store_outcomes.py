"""What runs leave behind in a store: results, failures and checkpoints."""

from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.task import Move
from gpubroker_server.ports.store import CommitVerdict, TaskStore
from msgspec.structs import replace

from tests.builders import NOW, a_device, a_task
from tests.contracts.scenes import a_checkpoint, admission, claimed, end, node_seen, start, with_gpu

LATE = Failure("exception", "late")


async def test_a_result_is_kept_byte_by_byte(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    assert await store.result(task.id) is None
    left = end(claimed(task), b"\x80\x00\xff", result_format="cloudpickle", log_tail=b"\xffline")
    await store.commit(term, [admission(task), left])
    result = await store.result(task.id)
    assert result is not None
    assert (result.data, result.digest) == (b"\x80\x00\xff", None)
    assert (result.ending, result.format, result.log_tail) == ("succeeded", "cloudpickle", b"\xffline")
    record = await store.record(task.id)
    assert record is not None
    assert record.failure is None


async def test_a_result_elsewhere_is_known_by_its_digest(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task), end(claimed(task), None, result_digest="ab" * 32)])
    result = await store.result(task.id)
    assert result is not None
    assert (result.data, result.digest) == (None, "ab" * 32)


async def test_a_failure_says_why(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    why = Failure("exception", "ValueError: é", 'File "x"\n')
    await store.commit(term, [admission(task), end(claimed(task), None, why)])
    expected = {"kind": "exception", "message": "ValueError: é", "traceback": 'File "x"\n'}
    result, record = await store.result(task.id), await store.record(task.id)
    assert result is not None
    assert record is not None
    assert (result.failure, record.failure) == (expected, expected)


async def test_the_outcome_of_the_newest_run_counts(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    failed = end(claimed(task), None, Failure("exception", "first try"))
    again = write_move(claimed(task), Move.REQUEUED, failures=1, node=None)
    await store.commit(term, [admission(task), replace(failed, tasks=(again,))])
    record = await store.record(task.id)
    assert record is not None
    assert record.failure is not None
    assert record.failure["message"] == "first try"
    await store.commit(term, [admission(again.task), end(claimed(again.task), b"2")])
    result, record = await store.result(task.id), await store.record(task.id)
    assert result is not None
    assert record is not None
    assert (result.data, record.failure) == (b"2", None)


async def test_the_newest_three_checkpoints_are_kept_newest_first(store: TaskStore) -> None:
    task, other = a_task("t1"), a_task("t2")
    term = await with_gpu(store, task, other)
    await store.commit(term, [admission(task), admission(other)])
    await store.commit(term, [a_checkpoint(claimed(other), 1)])
    for sequence in range(1, 6):
        await store.commit(term, [a_checkpoint(claimed(task), sequence)])
    kept = await store.checkpoints(task.id)
    assert [(saved.sequence, saved.digest, saved.size_bytes) for saved in kept] == [
        (5, "digest-5", 5), (4, "digest-4", 4), (3, "digest-3", 3),
    ]  # fmt: skip
    assert [saved.at for saved in kept] == [NOW + 5, NOW + 4, NOW + 3]
    assert len(await store.checkpoints(other.id)) == 1


async def test_many_checkpoints_at_once_are_kept_the_same_way(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task)])
    await store.commit(term, [a_checkpoint(claimed(task), sequence) for sequence in range(1, 8)])
    assert [saved.sequence for saved in await store.checkpoints(task.id)] == [7, 6, 5]


async def test_an_outcome_of_an_outdated_claim_is_not_kept(store: TaskStore) -> None:
    """Its start, its checkpoint, its end with result and log: made of a row that is no longer there."""
    task = a_task("t1")
    term = await with_gpu(store, task)
    first = claimed(task)
    back = Decision("t1", "lost", tasks=(write_move(first, Move.REQUEUED, node=None),))
    second = admission(back.tasks[0].task, device="gpu1")
    await store.commit(term, [node_seen(a_device("gpu0"), a_device("gpu1"))])
    assert await store.commit(term, [admission(task), back, second]) == [CommitVerdict.COMMITTED] * 3
    head = await store.head()
    late = [
        start(first),
        a_checkpoint(first, 1),
        end(first, b"late", log_tail=b"late"),
        end(first, None, LATE),
    ]
    assert await store.commit(term, late) == [CommitVerdict.STALE] * 4
    assert (await store.head(), await store.result(task.id), await store.checkpoints(task.id)) == (
        head,
        None,
        [],
    )
    record = await store.record(task.id)
    assert record is not None
    assert record.task == second.tasks[0].task
    assert record.task.fence == 2
