"""Results of the items of arrays in a store."""

from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.sql.reads import counts_of
from gpubroker_server.adapters.sql.store import migrate
from gpubroker_server.adapters.sql.system_tables import SCHEMA
from gpubroker_server.core.domain.decisions import Decision, ItemPage, write_move
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.submission import WORKER_LABELS, BatchSubmission
from gpubroker_server.core.domain.task import Move, Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.ports.arrays import ItemCounts, PageFilter
from gpubroker_server.ports.store import CommitVerdict, TaskStore
from msgspec.structs import replace
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from tests.builders import NOW, a_task
from tests.contracts.scenes import a_submission, admission, claimed, end, release, with_gpu
from tests.contracts.test_store_retention import cutoffs, pruned

ARRAY = TaskId("t1")


def a_page(first: int, page: int, count: int = 2, **fields: Any) -> ItemPage:
    facts = {"failed": 0, "at": Instant(NOW + page), "lines": b"{}\n" * count, "size_bytes": count, **fields}
    return ItemPage(ARRAY, first, page, "default", count, **facts)


def stored(task: Task, *pages: ItemPage) -> Decision:
    write = write_move(task, Move.CHANGED, checkpoint_at=NOW)
    return Decision(task.id, "items", tasks=(write,), items=pages)


async def test_pages_are_read_by_number_and_by_commit(store: TaskStore) -> None:
    task = a_task(ARRAY, holder=WorkerSeat(ARRAY))
    term = await with_gpu(store, task)
    assert [row.holder for row in (await store.snapshot()).tasks] == [WorkerSeat(ARRAY)]
    assert await store.item_counts(ARRAY) == ItemCounts()
    last, first = a_page(5, 1, failed=1), a_page(0, 2, lines=b"\x00\xff", digest="ab" * 32)
    middle = a_page(2, 3, count=3, failed=3)
    assert set(await store.commit(term, [admission(task), stored(claimed(task), last, first, middle)])) == {
        CommitVerdict.COMMITTED
    }
    assert await store.item_counts(ARRAY) == ItemCounts(7, 4, 3, Instant(NOW + 1), Instant(NOW + 3), 7)
    assert sorted(await store.items_done(ARRAY)) == [(0, 2), (2, 5), (5, 7)]

    async def read(**wanted: Any) -> list[ItemPage]:
        return list(await store.item_pages(PageFilter(ARRAY, **wanted)))

    assert await read() == [first, middle, last]
    assert await read(after=3) == [middle, last], "a page with a later item"
    assert await read(after=4) == [last]
    assert await read(by_commit=True) == [last, first, middle]
    assert await read(by_commit=True, after=1, limit=1) == [first]
    assert await read(failed=True) == [middle, last]
    assert await read(failed=False) == [first, last]
    assert await store.referenced(["ab" * 32, "cd" * 32]) == {"ab" * 32}


async def test_an_item_is_stored_once_and_nothing_else_of_that_decision(store: TaskStore) -> None:
    task = a_task(ARRAY)
    term = await with_gpu(store, task)
    run = stored(claimed(task), a_page(0, 1)).tasks[0].task
    await store.commit(term, [admission(task), stored(claimed(task), a_page(0, 1))])
    assert await store.commit(term, [stored(run, a_page(4, 2), a_page(0, 3))]) == [CommitVerdict.STALE]
    assert await store.items_done(ARRAY) == [(0, 2)]


async def test_a_hundred_thousand_items_are_a_few_pages_and_one_hot_row(store: TaskStore) -> None:
    task = a_task(ARRAY)
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task)])
    run, head = claimed(task), await store.head()
    for ten in range(10):
        decision = stored(run, *(a_page(10_000 * ten + 1000 * n, 10 * ten + n + 1, 1000) for n in range(10)))
        assert await store.commit(term, [decision]) == [CommitVerdict.COMMITTED]
        run = decision.tasks[0].task
    snapshot = await store.snapshot()
    assert [row.id for row in snapshot.tasks] == [ARRAY]
    assert await store.head() - head == 10, "one event for each report"
    assert (await store.item_counts(ARRAY)).done == 100_000
    assert len(await store.item_pages(PageFilter(ARRAY, limit=1000))) == 100


def test_the_counts_of_an_array_read_no_page(tmp_path: Path) -> None:
    """With items of half a second, 100,000 of them are as many pages, and `map` asks twice a second."""
    url = f"sqlite:///{tmp_path / 'gpubroker.db'}"
    migrate(url, f"{SCHEMA:04}")
    wanted = str(counts_of(ARRAY).compile(compile_kwargs={"literal_binds": True}))
    with create_engine(url, poolclass=NullPool).connect() as connection:
        [step] = connection.execute(text(f"EXPLAIN QUERY PLAN {wanted}"))
    assert "USING COVERING INDEX ix_item_page_counts" in step.detail


async def test_results_go_with_the_first_worker(store: TaskStore) -> None:
    task = a_task(ARRAY)
    term = await with_gpu(store, task)
    run = stored(claimed(task), a_page(0, 1))
    await store.commit(term, [admission(task), run, end(run.tasks[0].task, b"null")])
    lease = admission(task).leases
    assert lease
    await store.commit(term, [release(lease[0])])
    await pruned(store, term, cutoffs())
    assert await store.record(ARRAY) is None
    assert await store.item_counts(ARRAY) == ItemCounts()


@pytest.mark.parametrize("label", WORKER_LABELS)
async def test_the_first_worker_stays_as_long_as_another_has_not_ended(store: TaskStore, label: str) -> None:
    """It keeps the terms of the array or the set, and the array's results."""
    task, other = a_task(ARRAY), a_task("t2")
    term = await with_gpu(store)
    first = a_submission(task, labels={label: ARRAY})
    others = replace(first, task=other, like=first)
    await store.submit_batch(BatchSubmission([first, others], answer="the terms"))
    for worker, is_kept in ((task, True), (other, False)):
        write = write_move(worker, Move.CANCELLED, finished_at=NOW)
        await store.commit(term, [Decision(worker.id, "cancel", tasks=(write,))])
        await pruned(store, term, cutoffs())
        assert bool(await store.batch_answer(ARRAY)) is is_kept


async def test_the_terms_are_kept_without_a_key(store: TaskStore) -> None:
    await with_gpu(store)
    first = a_submission(a_task("a1"))
    others = replace(first, task=a_task("a2"), like=first)
    await store.submit_batch(BatchSubmission([first, others], answer="the terms"))
    assert await store.batch_answer(TaskId("a1")) == "the terms"
    await store.submit_batch(BatchSubmission([a_submission(a_task("b1"))]))
    assert await store.batch_answer(TaskId("b1")) == ""
