"""A gang is kept whole: its demand, its ranks, and for which of them memory is being freed."""

from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.holders import Gang, Member, MemberState
from gpubroker_server.core.domain.lease import HolderKind
from gpubroker_server.core.domain.task import Move, members_of
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, TaskId
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import TaskStore
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_task
from tests.contracts.scenes import a_new_lease, a_pledge_of, log_of, makes, picture, replayed, with_gpu
from tests.core.gangs import a_gang, bundles


async def test_ranks_leases_and_pledges_of_a_gang_are_kept(store: TaskStore) -> None:
    gang = a_gang("gang", *bundles(1, gpu_mb=10 * GIB), *bundles(1, cpu=2.0), strategy="spread", min_ranks=1)
    term = await with_gpu(store, gang, a_task("t1", priority=80))
    members = (
        Member(0, NodeName("n1"), MemberState.READY, address="10.0.0.1:4000"),
        Member(1, NodeName("n1"), MemberState.SUCCEEDED, gone=True),
    )
    place = {"fence": Fence(1), "node": NodeName("n1"), "admitted_at": Instant(NOW), "holder": Gang(members)}
    write = write_move(gang, Move.ADMITTED, **place)
    leases = tuple(
        replace(a_new_lease(write.task), holder_kind=HolderKind.GANG_MEMBER, rank=rank) for rank in (0, 1)
    )
    pledge = replace(a_pledge_of("t1"), ranks=(0, 3))
    admitted = Decision("gang", "admit", tasks=(write,), leases=leases)
    await store.commit(term, [admitted, makes(pledge)])
    snapshot = await store.snapshot()
    assert {task.id: task for task in snapshot.tasks}[TaskId("gang")] == write.task
    assert sorted(lease.rank for lease in snapshot.leases) == [0, 1]
    assert snapshot.pledges == [pledge]
    world = World()
    fill(world, snapshot)
    assert picture(world) == picture(replayed(await log_of(store)))


async def test_ranks_that_leave_are_kept_with_the_task_they_make_room_for(store: TaskStore) -> None:
    gang = a_gang("gang", *bundles(2, gpu_mb=10 * GIB), min_ranks=1)
    term = await with_gpu(store, gang, a_task("t1", priority=80))
    ranks = tuple(Member(rank, NodeName("n1"), MemberState.READY) for rank in (0, 1))
    place = {"fence": Fence(1), "node": NodeName("n1"), "admitted_at": Instant(NOW)}
    admitted = write_move(gang, Move.ADMITTED, **place, holder=Gang(ranks))
    begun = write_move(admitted.task, Move.STARTED, started_at=Instant(NOW))
    leases = tuple(
        replace(a_new_lease(admitted.task), holder_kind=HolderKind.GANG_MEMBER, rank=rank) for rank in (0, 1)
    )
    notice = {"freeing_for": TaskId("t1"), "stop_deadline_at": Instant(NOW + 30.0)}
    leaving = (ranks[0], replace(ranks[1], state=MemberState.LEAVING, **notice))
    shrunk = write_move(begun.task, Move.CHANGED, holder=Gang(leaving))
    await store.commit(term, [Decision("gang", "admit", tasks=(admitted,), leases=leases)])
    await store.commit(term, [Decision("gang", "started", tasks=(begun,))])
    pledge = makes(a_pledge_of("t1"))
    await store.commit(term, [replace(pledge, tasks=(shrunk,), subject="t1", why="preempt")])
    snapshot = await store.snapshot()
    assert {task.id: task for task in snapshot.tasks}[TaskId("gang")] == shrunk.task
    world = World()
    fill(world, snapshot)
    assert picture(world) == picture(replayed(await log_of(store)))
    [device] = world.ledgers.values()
    assert [held.freeing_for for held in sorted(device.holdings.values(), key=lambda h: h.lease.rank)] == [
        None,
        "t1",
    ]


async def test_a_gang_that_goes_back_to_the_queue_has_no_ranks(store: TaskStore) -> None:
    gang = a_gang("gang", *bundles(2, cpu=1.0))
    term = await with_gpu(store, gang)
    ranks = tuple(Member(rank, NodeName("n1")) for rank in (0, 1))
    admitted = write_move(gang, Move.ADMITTED, fence=Fence(1), node=NodeName("n1"), holder=Gang(ranks))
    back = write_move(admitted.task, Move.REQUEUED, node=None, holder=Gang(()))
    await store.commit(term, [Decision("gang", "admit", tasks=(admitted,))])
    await store.commit(term, [Decision("gang", "rank_lost", tasks=(back,))])
    [task] = (await store.snapshot()).tasks
    assert task == back.task
    assert members_of(task) == ()


async def test_ranks_that_join_a_running_gang_are_kept_with_their_bundles(store: TaskStore) -> None:
    gang = a_gang("gang", *bundles(3, gpu_mb=10 * GIB), min_ranks=1)
    term = await with_gpu(store, gang)
    first = Member(0, NodeName("n1"), MemberState.READY)
    place = {"fence": Fence(1), "node": NodeName("n1"), "admitted_at": Instant(NOW)}
    admitted = write_move(gang, Move.ADMITTED, **place, holder=Gang((first,)))
    begun = write_move(admitted.task, Move.STARTED, started_at=Instant(NOW))
    joining = Member(1, NodeName("n1"), stop_deadline_at=Instant(NOW + 300.0), bundle=2)
    grown = write_move(begun.task, Move.CHANGED, holder=Gang((first, joining)))
    lease = replace(a_new_lease(grown.task), holder_kind=HolderKind.GANG_MEMBER, rank=1)
    await store.commit(term, [Decision("gang", "admit", tasks=(admitted,))])
    await store.commit(term, [Decision("gang", "started", tasks=(begun,))])
    await store.commit(term, [Decision("gang", "grow", tasks=(grown,), leases=(lease,))])
    snapshot = await store.snapshot()
    assert {task.id: task for task in snapshot.tasks}[TaskId("gang")] == grown.task
    assert [kept.rank for kept in snapshot.leases] == [1]
    world = World()
    fill(world, snapshot)
    assert picture(world) == picture(replayed(await log_of(store)))
    assert world.growable == set()  # one is joining already
