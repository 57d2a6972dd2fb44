"""What the store's tests say in one line."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gpubroker_server.adapters.sql.store import SqlStore, open_store
from gpubroker_server.core.domain.decisions import Decision, Outcome, PledgeWrite, write_move
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.lease import HolderKind, Lease, Pledge, Proof
from gpubroker_server.core.domain.lease import release as released
from gpubroker_server.core.domain.orders import Checkpointed, Failure
from gpubroker_server.core.domain.task import Move, Task
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, Position, Seconds, TaskId, Term
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import AdmittedTask, RunSpec, TaskStore
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_node, a_task, key

GPU0 = key("gpu0")


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[SqlStore]:
    store = await open_store(url, **options)
    try:
        yield store
    finally:
        await store.close()


def a_submission(
    task: Task | str = "task", key: str | None = None, body: str = "body", **spec: Any
) -> AdmittedTask:
    """An entrypoint; a name stands for a task of 10 GiB."""
    row = a_task(task, gpu_mb=10 * GIB) if isinstance(task, str) else task
    facts = {"entrypoint": "jobs:train", "arguments": b'{"args": [], "kwargs": {}}', **spec}
    return AdmittedTask(row, RunSpec("entrypoint", **facts), key, body)


def node_seen(*devices: Device, node: Node | None = None) -> Decision:
    """A node of `a_node` with these devices, or with one of 80 GiB."""
    return Decision("n1", "node_seen", nodes=(node or a_node(),), devices=devices or (a_device(),))


def a_new_lease(task: Task, mb: int = 10 * GIB, device: str = "gpu0") -> Lease:
    return Lease(
        HolderKind.RUN,
        task.id,
        task.fence,
        key(device),
        Mib(mb),
        task.tenant,
        task.priority,
        Instant(NOW),
        context_mb=Mib(100),
    )


def claimed(task: Task) -> Task:
    """The task after its admission, for what comes next."""
    return admission(task).tasks[0].task


def admission(task: Task, mb: int = 10 * GIB, device: str = "gpu0") -> Decision:
    write = write_move(
        task, Move.ADMITTED, fence=Fence(task.fence + 1), node=NodeName("n1"), admitted_at=Instant(NOW)
    )
    return Decision(task.id, "admit", tasks=(write,), leases=(a_new_lease(write.task, mb, device),))


def start(task: Task) -> Decision:
    """Of a task as `claimed` leaves it."""
    return Decision(task.id, "started", tasks=(write_move(task, Move.STARTED, started_at=Instant(NOW)),))


def end(task: Task, result: bytes | None = b"42", failure: Failure | None = None, **outcome: Any) -> Decision:
    """Success, or failure without another try."""
    what = Move.SUCCEEDED if failure is None else Move.FAILED
    left = Outcome(task.id, task.fence, str(what), Instant(NOW), result, failure=failure, **outcome)
    write = write_move(task, what, finished_at=Instant(NOW))
    return Decision(task.id, "ended", tasks=(write,), outcome=left)


def release(lease: Lease) -> Decision:
    return Decision(lease.holder, "gone", leases=(released(lease, Proof.PROCESS_ABSENT),))


def a_checkpoint(task: Task, sequence: int) -> Decision:
    """Saves state; of a claimed task that already has `sequence - 1` of them."""
    at = Instant(NOW + sequence)
    row = replace(task, version=task.version + sequence - 1)
    saved = Checkpointed(task.id, task.fence, at, sequence, f"digest-{sequence}", b"x" * sequence, None)
    write = write_move(row, Move.CHANGED, checkpoint_at=at)
    return Decision(task.id, "checkpoint", tasks=(write,), checkpoint=saved)


def a_pledge_of(preemptor: str, mb: int = 10 * GIB) -> Pledge:
    return Pledge(TaskId(preemptor), GPU0, Mib(mb), 80, "default", Instant(NOW), Instant(NOW + 30.0))


def makes(pledge: Pledge) -> Decision:
    return Decision(pledge.preemptor, "preempt", pledges=(PledgeWrite(pledge),))


async def next_term(store: TaskStore, holder: str = "leader", ttl_seconds: float = 3600.0) -> Term:
    """Take it from whoever leads, as one who has found that leader's lease past does."""
    term = await store.take_term(holder, Seconds(ttl_seconds), instead_of=await store.leader())
    assert term is not None
    return term


async def with_gpu(store: TaskStore, *tasks: Task) -> Term:
    """A term, a node with one device of 80 GiB, and these tasks submitted."""
    term = await next_term(store)
    await store.commit(term, [node_seen()])
    for task in tasks:
        await store.submit(a_submission(task))
    return term


async def log_of(store: TaskStore) -> Sequence[Event]:
    return await store.events(Position(0), 10_000)


def replayed(events: Sequence[Event]) -> World:
    world = World()
    world.apply(events)
    return world


def picture(world: World) -> dict[str, Any]:
    """Everything of a World that a store keeps."""
    return {
        "position": world.position,
        "tasks": world.tasks,
        "leases": world.leases,
        "pledges": world.pledges,
        "devices": {key: ledger.device for key, ledger in world.ledgers.items()},
        "holdings": {key: ledger.holdings for key, ledger in world.ledgers.items()},
        "nodes": world.nodes,
        "requests": world.requests,
        "pauses": world.queue.pauses,
        "streams": world.streams,
        "finished": dict(world.finished),
        "estimates": world.learned.sketches,
        "usage": world.accounts.rows(),
        "held": {tenant: world.accounts.held_mb(tenant) for tenant in world.accounts},
        "use": {node: (use.cpu, use.memory_mb, use.runs) for node, use in world.use.items()},
    }
