"""A gang is kept whole: its demand, its ranks, and for which of them memory is being freed."""

from dataclasses import replace

from service.bootstrap.compose import fill
from service.core.lease import HolderKind
from service.core.member import Member, MemberState
from service.core.plan import Decision, write_move
from service.core.task import Move
from service.core.units import Fence, Instant, NodeName
from service.core.world import World
from service.ports import TaskStore
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
    place = {"fence": Fence(1), "node": NodeName("n1"), "admitted_at": Instant(NOW), "members": members}
    write = write_move(gang, Move.ADMITTED, **place)
    leases = tuple(
        replace(a_new_lease(write.task), holder_kind=HolderKind.GANG_MEMBER, rank=rank) for rank in (0, 1)
    )
    pledge = replace(a_pledge_of("t1"), ranks=(0, 3))
    admitted = Decision("gang", "admit", tasks=(write,), leases=leases)
    await store.commit(term, [admitted, makes(pledge)])
    snapshot = await store.snapshot()
    assert {task.id: task for task in snapshot.tasks}["gang"] == write.task
    assert sorted(lease.rank for lease in snapshot.leases) == [0, 1]
    assert snapshot.pledges == [pledge]
    world = World()
    fill(world, snapshot)
    assert picture(world) == picture(replayed(await log_of(store)))


async def test_a_gang_that_goes_back_to_the_queue_has_no_ranks(store: TaskStore) -> None:
    gang = a_gang("gang", *bundles(2, cpu=1.0))
    term = await with_gpu(store, gang)
    ranks = tuple(Member(rank, NodeName("n1")) for rank in (0, 1))
    admitted = write_move(gang, Move.ADMITTED, fence=Fence(1), node=NodeName("n1"), members=ranks)
    back = write_move(admitted.task, Move.REQUEUED, node=None, members=())
    await store.commit(term, [Decision("gang", "admit", tasks=(admitted,))])
    await store.commit(term, [Decision("gang", "rank_lost", tasks=(back,))])
    [task] = (await store.snapshot()).tasks
    assert task == back.task
    assert task.members == ()
