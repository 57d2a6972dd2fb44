"""What is over goes, with all that belongs to it; what is not stays, and so do counts."""

import time
from typing import Any

import pytest
from gpubroker_server.adapters.sql.tables import metadata
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.core.domain.task import Dependency, Move, TaskState
from gpubroker_server.core.domain.units import Instant, Position, TaskId, Term
from gpubroker_server.ports.store import StaleTerm, SubmitVerdict, TaskFilter, TaskStore
from sqlalchemy import create_engine, text

from tests.builders import NOW, a_task
from tests.contracts.scenes import (
    a_checkpoint,
    a_new_lease,
    a_submission,
    admission,
    claimed,
    end,
    next_term,
    opened,
    release,
    replayed,
    start,
    with_gpu,
)
from tests.contracts.test_store_batch import a_batch

FOREVER = Instant(time.time() + 10**9)
NEVER = Instant(0.0)
ALL = Position(10**9)


def cutoffs(
    finished: Instant = FOREVER,
    keyed: Instant = FOREVER,
    audited: Instant = NEVER,
    expired: Instant = NEVER,
    heard: Position = ALL,
) -> Cutoffs:
    return Cutoffs(finished, keyed, audited, expired, heard)


async def pruned(store: TaskStore, term: Term, before: Cutoffs) -> int:
    steps = 0
    while await store.prune(term, before):
        steps += 1
    return steps


async def ended(
    store: TaskStore, term: Term, name: str, *, freed: bool = True, key: str | None = None
) -> None:
    """Submit, run and end a task; `freed`: its memory is confirmed free."""
    task = a_task(name, gpu_mb=1024)
    await store.submit(a_submission(task, key=key, labels={"team": "vision", "run": name}))
    mine = claimed(task)
    await store.commit(term, [admission(task, 1024)])
    await store.commit(term, [start(mine)])
    row = (await store.record(task.id)).task  # type: ignore[union-attr]
    await store.commit(term, [a_checkpoint(row, 1)])
    row = (await store.record(task.id)).task  # type: ignore[union-attr]
    await store.commit(term, [end(row)])
    if freed:
        await store.commit(term, [release(a_new_lease(mine, 1024))])


async def test_a_task_that_is_over_stays_as_long_as_one_waits_that_runs_after_it(store: TaskStore) -> None:
    """Who leads next must still find how it ended, or the dependent fails because nobody knows."""
    term = await with_gpu(store)
    for name in ("first", "other"):
        await ended(store, term, name)
    runs_after = (Dependency(TaskId("first")), Dependency(TaskId("longer")))
    waits = a_task("waits", after=runs_after, awaits=True)
    await store.submit(a_submission(a_task("longer")))
    await store.submit(a_submission(waits))
    await pruned(store, term, cutoffs())
    assert await store.record(TaskId("other")) is None
    assert await store.record(TaskId("first")) is not None
    over = write_move(waits, Move.CANCELLED, finished_at=NOW)
    await store.commit(term, [Decision(waits.id, "cancelled", tasks=(over,))])
    await pruned(store, term, cutoffs())
    assert await store.record(TaskId("first")) is None


async def test_a_task_that_is_over_goes_with_all_that_is_its(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1")
    await store.submit(a_submission("waits"))
    assert await pruned(store, term, cutoffs()) >= 1
    assert await store.record(TaskId("t1")) is None
    assert await store.result(TaskId("t1")) is None
    assert await store.checkpoints(TaskId("t1")) == []
    assert await store.specs([TaskId("t1")]) == {}
    assert [r.task.id for r in await store.records(TaskFilter("default"))] == ["waits"]
    assert await store.records(TaskFilter("default", labels={"team": "vision"})) == []
    assert await store.referenced(["digest-1"]) == frozenset()


async def test_nothing_of_it_is_left_in_any_table(url: str) -> None:
    async with opened(url) as store:
        term = await with_gpu(store)
        await ended(store, term, "t1", key="k")
        await store.submit_batch(a_batch("b", 2, "kb"))
        await pruned(store, term, cutoffs())
    left = {"task": 2, "task_spec": 2, "batch": 1}
    gone = ("task_label", "outcome", "checkpoint", "lease", "event", "request", "pledge")
    counts = counted(url)
    assert {name: counts[name] for name in (*left, *gone)} == left | dict.fromkeys(gone, 0)


def counted(url: str) -> dict[str, int]:
    with create_engine(url.replace("postgresql://", "postgresql+psycopg://")).connect() as connection:
        return {
            name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one()
            for name in metadata.tables
        }


async def test_counts_of_finished_tasks_stay(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1")
    await pruned(store, term, cutoffs())
    assert dict((await store.snapshot()).finished) == {("default", TaskState.SUCCEEDED): 1}


async def test_what_ended_later_stays(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1")
    assert await pruned(store, term, cutoffs(finished=Instant(NOW - 1))) == 0
    assert await store.record(TaskId("t1")) is not None


async def test_a_task_whose_memory_is_not_confirmed_free_stays(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1", freed=False)
    await pruned(store, term, cutoffs())
    snapshot = await store.snapshot()
    assert [task.id for task in snapshot.tasks] == ["t1"]
    assert [lease.holder for lease in snapshot.leases] == ["t1"]


async def test_a_key_is_known_for_its_time_and_then_makes_a_new_task(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1", key="k")
    await pruned(store, term, cutoffs(keyed=Instant(NOW - 1)))
    again = await store.submit(a_submission("t2", key="k"))
    assert (again.verdict, again.task) == (SubmitVerdict.DUPLICATE, "t1")
    await pruned(store, term, cutoffs(keyed=Instant(NOW + 1)))
    anew = await store.submit(a_submission("t2", key="k"))
    assert (anew.verdict, anew.task) == (SubmitVerdict.ACCEPTED, "t2")


async def test_the_log_loses_its_beginning_and_has_no_gap(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1")
    assert await store.oldest() == 1
    head = await store.head()
    await pruned(store, term, cutoffs())
    assert (await store.oldest(), await store.head()) == (head + 1, head)
    await store.submit(a_submission("t2"))
    [event] = await store.events(Position(0), 100)
    assert (event.position, await store.oldest()) == (head + 1, head + 1)


async def test_a_picture_from_the_rows_goes_on_with_what_is_left_of_the_log(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1")
    await store.submit(a_submission("t2"))
    await pruned(store, term, cutoffs())
    world = replayed([])
    world.position = (await store.snapshot()).position
    await store.submit(a_submission("t3"))
    world.apply(await store.events(world.position, 100))
    assert set(world.tasks) == {"t3"}


async def test_events_that_the_leader_has_yet_to_hear_stay_however_old_they_are(store: TaskStore) -> None:
    term = await with_gpu(store)
    heard = await store.head()
    await store.submit(a_submission("t1"))
    await pruned(store, term, cutoffs(heard=heard))
    assert await store.oldest() == heard + 1
    assert [event.key for event in await store.events(heard, 100)] == ["t1"]


async def test_an_old_leader_does_not_prune(store: TaskStore) -> None:
    term = await with_gpu(store)
    await ended(store, term, "t1")
    await next_term(store)
    with pytest.raises(StaleTerm):
        await store.prune(term, cutoffs())
    assert await store.record(TaskId("t1")) is not None
    assert await store.oldest() == 1


async def test_audit_notes_have_a_retention_of_their_own(url: str) -> None:
    async with opened(url) as store:
        term = await with_gpu(store)
        await pruned(store, term, cutoffs())
        kept = counted_rows(url)
        await pruned(store, term, cutoffs(audited=FOREVER))
        assert (kept, counted_rows(url)) == (1, 0)


def counted_rows(url: str) -> Any:
    with create_engine(url.replace("postgresql://", "postgresql+psycopg://")).connect() as connection:
        return connection.execute(text("SELECT count(*) FROM audit")).scalar_one()


async def test_many_go_in_small_steps(url: str) -> None:
    async with opened(url) as store:
        term = await with_gpu(store)
        await store.submit_batch(a_batch("b", 2500))
        assert await pruned(store, term, cutoffs()) == 2
        assert await store.oldest() == await store.head() + 1
