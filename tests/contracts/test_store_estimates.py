"""What runs taught is kept with the decisions that end them."""

from collections.abc import Iterable

from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.estimates import Observation, Sketch, SketchKey, What
from gpubroker_server.core.domain.lease import LeaseState, mark_overused, move_lease
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Mib, Position
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import CommitVerdict, TaskStore
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_sketch, a_task
from tests.contracts.scenes import (
    a_new_lease,
    admission,
    claimed,
    end,
    log_of,
    picture,
    release,
    replayed,
    with_gpu,
)

SIZE = SketchKey("default", "resnet", "H100", What.GPU_MB)
TIME = SketchKey("default", "resnet", "", What.SECONDS)
COMMITTED, STALE = CommitVerdict.COMMITTED, CommitVerdict.STALE


def a_lesson(topic: SketchKey, values: Iterable[float]) -> Observation:
    """The last of these values, after all the others."""
    *_, last = values = list(values)
    return Observation(topic, last, a_sketch(values), Instant(NOW + len(values)))


def teaching(task: Task, *lessons: Observation, forgotten: tuple[SketchKey, ...] = ()) -> Decision:
    return replace(end(claimed(task)), lessons=lessons, forgotten=forgotten)


async def kept(store: TaskStore) -> dict[SketchKey, Sketch]:
    return dict((await store.snapshot()).estimates)


async def test_what_an_end_teaches_is_kept_with_it(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task)])
    assert await store.commit(term, [teaching(task, a_lesson(SIZE, [8192.0]), a_lesson(TIME, [5.0]))]) == [
        COMMITTED
    ]
    assert await kept(store) == {SIZE: a_sketch([8192.0]), TIME: a_sketch([5.0])}
    taught = (await log_of(store))[-1]
    assert (taught.kind, taught.key, taught.tenant) == ("estimate.learned", "resnet", "default")


async def test_the_log_names_the_values_and_holds_no_sketch(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task)])
    await store.commit(term, [teaching(task, a_lesson(TIME, [3.0, 4.0, 5.0]))])
    assert (await log_of(store))[-1].fields == {"values": [["", "seconds", 5.0]]}


async def test_two_ends_in_one_commit_both_count(store: TaskStore) -> None:
    one, two = a_task("t1"), a_task("t2")
    term = await with_gpu(store, one, two)
    await store.commit(term, [admission(one), admission(two)])
    ends = [teaching(one, a_lesson(TIME, [5.0])), teaching(two, a_lesson(TIME, [5.0, 6.0]))]
    assert await store.commit(term, ends) == [COMMITTED, COMMITTED]
    assert await kept(store) == {TIME: a_sketch([5.0, 6.0])}


async def test_a_dropped_decision_teaches_nothing(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    assert await store.commit(term, [teaching(task, a_lesson(TIME, [5.0]))]) == [STALE]
    assert await kept(store) == {}


async def test_a_forgotten_topic_is_gone_and_the_others_stay(store: TaskStore) -> None:
    one, two = a_task("t1"), a_task("t2")
    term = await with_gpu(store, one, two)
    await store.commit(term, [admission(one), admission(two)])
    await store.commit(term, [teaching(one, a_lesson(SIZE, [1.0]), a_lesson(TIME, [1.0]))])
    newer = replace(SIZE, subject="bert")
    await store.commit(term, [teaching(two, a_lesson(newer, [2.0, 2.0]), forgotten=(SIZE,))])
    assert list(await kept(store)) == [TIME, newer]


async def test_a_world_from_the_rows_knows_what_one_from_the_log_knows(store: TaskStore) -> None:
    tasks = [a_task(f"t{n}", subject="resnet") for n in range(4)]
    term = await with_gpu(store, *tasks)
    await store.commit(term, [admission(task) for task in tasks])
    for n, task in enumerate(tasks, start=1):
        lessons = (a_lesson(SIZE, range(100, 100 + n)), a_lesson(TIME, range(n)))
        await store.commit(term, [teaching(task, *lessons)])
    from_rows = World()
    fill(from_rows, await store.snapshot())
    assert picture(from_rows) == picture(replayed(await log_of(store)))


async def test_a_mark_of_overuse_is_kept_and_the_lease_goes_on(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task)])
    held = move_lease(a_new_lease(claimed(task)), LeaseState.HELD)
    marked = mark_overused(held, Mib(12 * GIB))
    for lease in (held, marked):
        assert await store.commit(term, [Decision("t1", "overuse", leases=(lease,))]) == [COMMITTED]
    assert list((await store.snapshot()).leases) == [marked]
    assert await store.commit(term, [Decision("t1", "overuse", leases=(marked,))]) == [STALE]
    events = await store.events(Position(0), 100, [task.id])
    assert [event.kind for event in events][-2:] == ["lease.held", "lease.overused"]
    from_rows = World()
    fill(from_rows, await store.snapshot())
    assert picture(from_rows) == picture(replayed(await log_of(store)))
    assert await store.commit(term, [release(marked)]) == [COMMITTED]
    assert list((await store.snapshot()).leases) == []
