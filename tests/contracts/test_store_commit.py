"""What the leader writes: guarded decisions, the ledger's net, and terms."""

import asyncio
from collections.abc import Sequence

import pytest
from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.core.domain.decisions import Decision, Notice, PledgeWrite, Request, write_move
from gpubroker_server.core.domain.lease import LeaseState, PledgeEnd, move_lease
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, Position, TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.payload import changed_task, encode, read_task
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import CommitVerdict, StaleTerm, TaskStore
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_node, a_task
from tests.contracts.scenes import (
    GPU0,
    a_new_lease,
    a_pledge_of,
    a_submission,
    admission,
    claimed,
    end,
    log_of,
    makes,
    next_term,
    node_seen,
    picture,
    release,
    replayed,
    start,
    with_gpu,
)

COMMITTED, STALE, REFUSED = CommitVerdict.COMMITTED, CommitVerdict.STALE, CommitVerdict.REFUSED


async def test_a_committed_decision_is_in_every_row_it_names(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    assert await store.commit(term, [admission(task)]) == [COMMITTED]
    snapshot = await store.snapshot()
    assert list(snapshot.tasks) == [claimed(task)]
    assert list(snapshot.leases) == [a_new_lease(claimed(task))]
    assert list(snapshot.devices) == [a_device()]
    assert list(snapshot.nodes) == [a_node()]
    kinds = [event.kind for event in await log_of(store)]
    assert kinds == ["node.seen", "device.seen", "task.submitted", "task.admitted", "lease.reserved"]


async def test_a_notice_is_an_event_that_changes_no_row(store: TaskStore) -> None:
    term = await with_gpu(store, a_task("t1"))
    before = await store.snapshot()
    notice = Notice("memory.fragmented", "cluster", {"waiting": 3})
    said = Decision("cluster", "memory.fragmented", notices=(notice,))
    assert await store.commit(term, [said]) == [COMMITTED]
    [event] = [event for event in await log_of(store) if event.kind == "memory.fragmented"]
    assert (event.key, event.fields, event.tenant) == ("cluster", {"waiting": 3}, "")
    after = await store.snapshot()
    assert (list(after.tasks), list(after.devices)) == (list(before.tasks), list(before.devices))
    assert replayed(await log_of(store)).position == event.position, "followers pass over it"


async def test_a_decision_over_a_version_that_is_gone_changes_nothing(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task)])
    before = await store.snapshot()
    assert await store.commit(term, [admission(task, device="gpu0")]) == [STALE]
    after = await store.snapshot()
    assert replace(after, at=before.at) == before


async def test_one_stale_lease_drops_the_whole_decision(store: TaskStore) -> None:
    task, other = a_task("t1"), a_task("t2")
    term = await with_gpu(store, task, other)
    never_made = replace(a_new_lease(claimed(other)), version=3, state=LeaseState.HELD)
    both = replace(admission(task), leases=(*admission(task).leases, never_made))
    assert await store.commit(term, [both]) == [STALE]
    snapshot = await store.snapshot()
    assert {row.state for row in snapshot.tasks} == {TaskState.PENDING}
    assert snapshot.leases == []
    assert snapshot.position == 4


async def test_a_bad_decision_does_not_take_its_neighbours_with_it(store: TaskStore) -> None:
    first, second = a_task("t1"), a_task("t2")
    term = await with_gpu(store, first, second)
    unknown = admission(a_task("unknown"))
    too_much = admission(a_task("t3"), mb=81 * GIB)
    await store.submit(a_submission(a_task("t3")))
    verdicts = await store.commit(term, [admission(first), unknown, too_much, admission(second)])
    assert verdicts == [COMMITTED, STALE, REFUSED, COMMITTED]
    states = {row.id: row.state for row in (await store.snapshot()).tasks}
    assert states == {"t1": TaskState.ADMITTED, "t2": TaskState.ADMITTED, "t3": TaskState.PENDING}


async def test_two_decisions_over_one_task_follow_each_other(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    assert await store.commit(term, [admission(task), start(claimed(task))]) == [COMMITTED, COMMITTED]
    [row] = (await store.snapshot()).tasks
    assert (row.state, row.version) == (TaskState.RUNNING, 3)


async def test_nothing_to_commit_is_committed(store: TaskStore) -> None:
    assert list(await store.commit(Term(0), [])) == []


@pytest.mark.parametrize("mb", [80 * GIB + 1, 10_000 * GIB])
async def test_no_device_is_leased_beyond_what_it_has(store: TaskStore, mb: int) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    assert await store.commit(term, [admission(task, mb=mb)]) == [REFUSED]
    assert (await store.snapshot()).leases == []


async def test_leases_of_many_runs_add_up_on_their_device(store: TaskStore) -> None:
    tasks = [a_task(f"t{n}") for n in range(5)]
    term = await with_gpu(store, *tasks)
    verdicts = await store.commit(term, [admission(task, mb=20 * GIB) for task in tasks])
    assert verdicts == [COMMITTED] * 4 + [REFUSED]


async def test_a_lease_on_an_unknown_device_is_refused(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    assert await store.commit(term, [admission(task, device="gpu9")]) == [REFUSED]


async def test_a_device_cannot_become_smaller_than_its_leases(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task, mb=60 * GIB)])
    assert await store.commit(term, [node_seen(a_device(mb=40 * GIB))]) == [REFUSED]
    assert await store.commit(term, [node_seen(a_device(mb=60 * GIB))]) == [COMMITTED]


async def test_memory_returns_when_its_lease_is_released_and_only_once(store: TaskStore) -> None:
    first, second = a_task("t1"), a_task("t2")
    term = await with_gpu(store, first, second)
    await store.commit(term, [admission(first, mb=60 * GIB)])
    lease = a_new_lease(claimed(first), mb=60 * GIB)
    assert await store.commit(term, [release(lease), release(lease)]) == [COMMITTED, STALE]
    assert await store.commit(term, [admission(second, mb=80 * GIB)]) == [COMMITTED]


async def test_a_second_release_is_stale_however_much_is_written_with_it(store: TaskStore) -> None:
    """So much that a server has time to complain of the memory before it has heard all."""
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task)])
    lease = a_new_lease(claimed(task))
    await store.commit(term, [release(lease)])
    again = replace(end(claimed(task), result=b"x" * 2**23), leases=release(lease).leases)
    assert await store.commit(term, [again]) == [STALE]


async def test_a_released_lease_is_never_granted_again(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.commit(term, [admission(task)])
    lease = a_new_lease(claimed(task))
    await store.commit(term, [release(lease)])
    assert await store.commit(term, [Decision("t1", "admit", leases=(lease,))]) == [STALE]


async def test_a_new_term_ends_every_older_one(store: TaskStore) -> None:
    task = a_task("t1")
    old = await with_gpu(store, task)
    new = await next_term(store, "second")
    assert new == old + 1
    with pytest.raises(StaleTerm, match="second leads term 2"):
        await store.commit(old, [admission(task)])
    assert (await store.snapshot()).tasks == [task]
    assert await store.commit(new, [admission(task)]) == [COMMITTED]


async def test_an_old_leader_does_not_disturb_submits(store: TaskStore) -> None:
    task = a_task("t1")
    old = await with_gpu(store, task)
    await next_term(store, "second")
    outcomes = await asyncio.gather(
        store.submit(a_submission("t2")),
        store.commit(old, [admission(task)]),
        store.submit(a_submission("t3")),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], StaleTerm)
    assert {row.id for row in (await store.snapshot()).tasks} == {"t1", "t2", "t3"}


async def test_a_pledge_comes_to_its_end_once(store: TaskStore) -> None:
    term = await with_gpu(store, a_task("t1"))
    pledge = a_pledge_of("t1")
    await store.commit(term, [makes(pledge)])
    assert list((await store.snapshot()).pledges) == [pledge]
    ends = Decision("t1", "withdraw", pledges=(PledgeWrite(pledge, PledgeEnd.WITHDRAWN),))
    assert await store.commit(term, [ends, ends]) == [COMMITTED, STALE]
    assert (await store.snapshot()).pledges == []
    assert [event.kind for event in await log_of(store)][-2:] == ["pledge.made", "pledge.withdrawn"]


async def test_a_pledge_can_be_ended_and_made_again_in_one_decision(store: TaskStore) -> None:
    term = await with_gpu(store, a_task("t1"))
    small, large = a_pledge_of("t1"), a_pledge_of("t1", mb=20 * GIB)
    await store.commit(term, [makes(small)])
    anew = Decision("t1", "preempt", pledges=(PledgeWrite(small, PledgeEnd.DISSOLVED), PledgeWrite(large)))
    assert await store.commit(term, [anew]) == [COMMITTED]
    assert list((await store.snapshot()).pledges) == [large]


async def test_a_request_that_was_carried_out_is_gone_from_the_snapshot(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    await store.request(Request("r1", task.id, "default", "change", {"priority": 9}, Instant(NOW)))
    write = write_move(task, Move.CHANGED, priority=9)
    await store.commit(term, [Decision("t1", "change", tasks=(write,), requests_done=("r1",))])
    snapshot = await store.snapshot()
    assert snapshot.requests == []
    assert [row.priority for row in snapshot.tasks] == [9]


async def test_every_hot_field_of_a_task_is_kept(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    admitted = claimed(task)
    await store.commit(term, [admission(task), start(admitted)])
    [running] = (await store.snapshot()).tasks
    stopping = write_move(
        running, Move.STOPPING, stop_reason="preempt", stop_deadline_at=Instant(NOW + 5), preemptions=2,
        failures=1, awaits=True, failed_by=TaskId("t0"), expires_at=Instant(NOW + 9),
        not_before=Instant(NOW + 1), held=True, freeing_for=TaskId("t9"),
        checkpoint_at=Instant(NOW), started_at=Instant(NOW + 2), priority=3, fence=Fence(4),
        node=NodeName("n2"),
    )  # fmt: skip
    await store.commit(term, [Decision("t1", "preempt", tasks=(stopping,))])
    assert (await store.snapshot()).tasks == [stopping.task]


async def test_a_task_that_ended_stays_in_the_snapshot_until_its_memory_is_free(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    lease = a_new_lease(claimed(task))
    await store.commit(term, [admission(task), end(claimed(task))])
    assert [row.state for row in (await store.snapshot()).tasks] == [TaskState.SUCCEEDED]
    await store.commit(term, [release(lease)])
    snapshot = await store.snapshot()
    assert (snapshot.tasks, snapshot.leases) == ([], [])
    assert snapshot.finished == {("default", TaskState.SUCCEEDED): 1}


async def test_removed_device_stays_in_the_snapshot_until_it_is_free(
    store: TaskStore,
) -> None:
    task = a_task("t1")
    term = await with_gpu(store, task)
    lease = a_new_lease(claimed(task))
    [device] = (await store.snapshot()).devices
    gone = replace(device, present=False, version=device.version + 1)
    await store.commit(term, [admission(task), Decision("n1", "node_seen", devices=(gone,))])
    assert (await store.snapshot()).devices == [gone]
    await store.commit(term, [end(claimed(task)), release(lease)])
    assert (await store.snapshot()).devices == []


async def test_finished_tasks_are_counted_by_tenant_and_end(store: TaskStore) -> None:
    tasks = [a_task(f"t{n}", tenant="lab" if n < 3 else "web") for n in range(5)]
    term = await with_gpu(store, *tasks)
    await store.commit(term, [admission(task) for task in tasks])
    crash = Failure("exception", "boom", "Traceback …")
    ends = [end(claimed(task), failure=crash if task.id == "t0" else None) for task in tasks]
    await store.commit(term, ends[:2])
    await store.commit(term, ends[2:])
    assert (await store.snapshot()).finished == {
        ("lab", TaskState.FAILED): 1,
        ("lab", TaskState.SUCCEEDED): 2,
        ("web", TaskState.SUCCEEDED): 2,
    }


async def test_the_history_of_a_task_holds_its_leases_pledges_and_requests(store: TaskStore) -> None:
    task = a_task("t1")
    term = await with_gpu(store, a_task("t0"), task, a_task("t2"))
    await store.commit(term, [admission(a_task("t0")), makes(a_pledge_of("t1")), admission(task)])
    await store.request(Request("r1", task.id, "default", "cancel", {}, Instant(NOW)))
    await store.commit(term, [Decision("t1", "cancel", requests_done=("r1",))])
    kinds = [event.kind for event in await store.events(Position(0), 100, [task.id])]
    assert kinds == [
        "task.submitted", "pledge.made", "task.admitted", "lease.reserved", "request.made", "request.done",
    ]  # fmt: skip


async def test_a_listener_that_fails_stops_all_writing(store: TaskStore) -> None:
    def fails(_events: Sequence[Event]) -> None:
        raise RuntimeError("lost the thread")

    task = a_task("t1")
    term = await with_gpu(store)
    before = await store.head()
    store.listen(fails)
    with pytest.raises(RuntimeError, match="lost the thread"):
        await store.submit(a_submission(task))
    with pytest.raises(RuntimeError, match="lost the thread"):
        await store.commit(term, [admission(task)])
    with pytest.raises(RuntimeError, match="lost the thread"):
        await next_term(store, "another")
    assert await store.head() == before + 1


async def a_busy_day(store: TaskStore) -> Sequence[Event]:
    """Submissions, admissions, ends, a pledge and a request; what a listener heard of it."""
    heard: list[Event] = []
    store.listen(heard.extend)
    tasks = [a_task(f"t{n}", tenant="lab" if n % 2 else "web", cpu=1.0) for n in range(8)]
    term = await with_gpu(store, *tasks)
    await store.commit(term, [admission(task, mb=8 * GIB) for task in tasks[:6]])
    await asyncio.gather(
        store.commit(term, [start(claimed(task)) for task in tasks[:4]]),
        store.submit(a_submission(a_task("late", priority=90))),
        store.request(Request("r1", tasks[0].id, "web", "cancel", {}, Instant(NOW))),
    )
    held = [move_lease(a_new_lease(claimed(task), 8 * GIB), LeaseState.HELD) for task in tasks[:6]]
    await store.commit(term, [Decision("n1", "held", leases=tuple(held))])
    ended = [end(start(claimed(task)).tasks[0].task) for task in tasks[:2]]
    await store.commit(term, [*ended, release(held[0]), makes(a_pledge_of("late", mb=4 * GIB))])
    return heard


async def test_a_world_from_a_snapshot_is_the_world_from_the_whole_log(store: TaskStore) -> None:
    heard = await a_busy_day(store)
    snapshot = await store.snapshot()
    world = World()
    fill(world, snapshot)
    log = await log_of(store)
    assert heard == log
    assert picture(world) == picture(replayed(log))
    assert world.position == await store.head()


async def test_the_task_in_an_event_is_what_its_fields_make_of_it(store: TaskStore) -> None:
    tasks: dict[str, Task] = {}
    for event in await a_busy_day(store):
        if event.kind == "task.submitted":
            tasks[event.key] = read_task(encode(event.payload))
        elif event.kind.startswith("task."):
            tasks[event.key] = changed_task(tasks[event.key], encode(event.payload), event.version)
        if event.kind.startswith("task."):
            assert event.task == tasks[event.key]
    assert len(tasks) > 1


async def test_the_log_read_back_says_what_listeners_heard(store: TaskStore) -> None:
    heard = await a_busy_day(store)
    assert picture(replayed(heard)) == picture(replayed(await log_of(store)))


async def test_times_of_events_are_the_databases_and_do_not_go_back(store: TaskStore) -> None:
    before = await store.database_time()
    await a_busy_day(store)
    times = [event.at for event in await log_of(store)]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= await store.database_time()


async def test_leased_memory_counts_for_every_kind_of_holder(store: TaskStore) -> None:
    term = await with_gpu(store, a_task("t1"))
    model = replace(a_new_lease(claimed(a_task("t1"))), holder="llama", mb=Mib(75 * GIB), device=GPU0)
    await store.commit(term, [Decision("n1", "load", leases=(model,))])
    assert await store.commit(term, [admission(a_task("t1"))]) == [REFUSED]
