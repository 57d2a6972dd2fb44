"""The leader takes out what is over, and nobody else does."""

from gpubroker_server.broker.background import Pruner
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.policy import Retention
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import Instant, Position, Seconds, TaskId, Term

from tests.builders import NOW, a_task
from tests.contracts.scenes import a_submission, next_term
from tests.stores import SqliteStore

RETENTION = Retention(Seconds(100.0), Seconds(10.0), Seconds(1000.0))
FIRST = Position(1)


class Standing:
    def __init__(self, at: Instant) -> None:
        self.at = at

    def now(self) -> Instant:
        return self.at


async def with_an_end() -> tuple[SqliteStore, Term]:
    """A task that ended at NOW."""
    store = SqliteStore(Standing(NOW))
    term = await next_term(store)
    task = a_task("t1")
    await store.submit(a_submission(task))
    over = write_move(task, Move.CANCELLED, finished_at=NOW)
    await store.commit(term, [Decision(task.id, "cancelled", tasks=(over,))])
    return store, term


async def test_what_ended_long_enough_ago_is_taken_out() -> None:
    store, term = await with_an_end()
    clock = Standing(Instant(NOW + 99))
    pruner = Pruner(store, clock, RETENTION, lambda: term, lambda: FIRST, lambda: True)
    await pruner.prune()
    assert await store.record(TaskId("t1")) is not None
    clock.at = Instant(NOW + 101)
    await pruner.prune()
    assert await store.record(TaskId("t1")) is None
    assert await store.oldest() == FIRST + 1


async def test_a_process_that_does_not_lead_does_not_prune() -> None:
    store, _ = await with_an_end()
    await Pruner(
        store, Standing(Instant(NOW + 101)), RETENTION, lambda: None, lambda: FIRST, lambda: True
    ).prune()
    assert await store.record(TaskId("t1")) is not None


async def test_nothing_is_taken_out_by_a_clock_that_does_not_count() -> None:
    store, term = await with_an_end()
    clock, counts = Standing(Instant(NOW + 10**6)), False
    pruner = Pruner(store, clock, RETENTION, lambda: term, lambda: FIRST, lambda: counts)
    await pruner.prune()
    assert await store.record(TaskId("t1")) is not None
    counts = True
    await pruner.prune()
    assert await store.record(TaskId("t1")) is None
