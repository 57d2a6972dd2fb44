"""Models that their server has in memory though nobody has given them room there: loaded by hand, or when it
was started. What they take is in use already, and measured as that of nobody.

A holder that waits gets its leases where it is, as far as they fit: nobody is stopped for it.
"""

from service.core.device import Device
from service.core.lease import HolderKind, Lease, LeaseState
from service.core.ledger import Book
from service.core.need import context_mb, may_use_node, need_mb
from service.core.plan import Decision, withdrawn, write_move
from service.core.task import Move, Task
from service.core.units import Fence, Instant, Mib
from service.core.world import World


def adopt(world: World, task: Task, priority: int, now: Instant) -> Decision | None:
    """None while its leases would not fit: what it uses counts as foreign until then."""
    assert task.model is not None
    fence = Fence(task.fence + 1)
    kind = HolderKind.MODEL if task.model.model else HolderKind.SERVER
    leases: list[Lease] = []
    for book, mb in _rooms(world, task) if task.demand.gpus else ():
        lease = _lease(task, fence, kind, book.device, mb, priority, now)
        if len(leases) < task.demand.gpus and _fits(book, lease, task):
            leases.append(lease)
    nodes = [world.books[lease.device].device.node for lease in leases]
    if not task.demand.gpus:
        nodes = [node.name for node in world.nodes.values() if may_use_node(task.demand, node)]
    if len(leases) < task.demand.gpus or not nodes:
        return None
    begun = {"node": min(nodes), "admitted_at": now, "started_at": now, "not_before": None, "held": False}
    write = write_move(task, Move.STARTED, fence=fence, priority=priority, **begun)
    pledges = withdrawn(world.pledges.get(task.id, {}))
    return Decision(task.id, "adopted", tasks=(write,), leases=tuple(leases), pledges=pledges)


def _rooms(world: World, task: Task) -> list[tuple[Book, Mib]]:
    """The devices that it may be on, with what it takes there; those with most of nobody's use first."""
    found = [
        (book, mb)
        for book in world.books.values()
        if book.sample is not None
        and may_use_node(task.demand, world.nodes[book.device.node])
        and (mb := need_mb(task.demand, book.device)) is not None
    ]
    return sorted(found, key=lambda one: (-one[0].foreign_mb, one[0].device.key))


def _lease(
    task: Task, fence: Fence, kind: HolderKind, device: Device, mb: Mib, priority: int, now: Instant
) -> Lease:
    return Lease(
        kind,
        task.id,
        fence,
        device.key,
        mb,
        task.tenant,
        priority,
        since=now,
        state=LeaseState.HELD,
        context_mb=context_mb(task.demand, device),
    )


def _fits(book: Book, lease: Lease, task: Task) -> bool:
    """With what it uses no longer counted as foreign, and nothing taken that is kept for others."""
    after = book.copy()
    after.put(lease)
    return after.free_mb(task=task.id) >= 0 and after.leased_mb() <= book.device.allocatable_mb
