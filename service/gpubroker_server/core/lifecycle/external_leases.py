"""Leases of external holders, which end by the holder's request or by proof that its process is gone."""

from typing import Any

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import (
    AuditNote,
    Decision,
    Outcome,
    Request,
    write_move,
)
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.lease import HolderKind, Lease, Proof
from gpubroker_server.core.domain.lease import release as leave
from gpubroker_server.core.domain.orders import Ending, Failure, ForgetOrder, Gone, WatchOrder
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle.stopping import cancel_pending
from gpubroker_server.core.lifecycle.task_update import TaskUpdate
from gpubroker_server.core.world.world import World

_PROOFS = frozenset({Proof.PROCESS_ABSENT, Proof.BOOT_CHANGED, Proof.NOT_YOUR_PROCESS})
"""The proofs of an agent that end an external lease. An agent that does not know the holder proves nothing,
because it did not start the holder's process."""


def begun(external: External, now: Instant) -> dict[str, Any]:
    """Return what the admission changes besides the claim. The lease starts at once, and its whole time
    counts from the admission."""
    return {"started_at": now, "deadline_at": Instant(now + external.ttl_seconds)}


def watch_orders(world: World, task: Task, leases: list[Lease]) -> tuple[WatchOrder, ...]:
    """Return the order to watch the holder's process; nothing if the holder named no process."""
    pid = pid_of(task)
    if pid is None or task.node is None:
        return ()
    devices = tuple((lease.device, lease.mb) for lease in leases)
    incarnation = world.nodes[task.node].incarnation
    return (WatchOrder(task.id, task.fence, task.node, incarnation, pid, devices),)


def pid_of(task: Task | None) -> int | None:
    """Return the process of an external holder, if it named one."""
    match task:
        case Task(holder=External(pid=pid)):
            return pid
        case _:
            return None


def holders_on(world: World, node: NodeName) -> list[Task]:
    """Return the external holders with memory on the node by id, including those that should have left."""
    leases = (h.lease for key in world.by_node.get(node, ()) for h in world.ledgers[key].holdings.values())
    names = {lease.holder for lease in leases if lease.holder_kind is HolderKind.EXTERNAL}
    return [world.tasks[TaskId(name)] for name in sorted(names)]


def gone(update: TaskUpdate, world: World, report: Gone, now: Instant) -> None:
    """Release the lease of a process that is proven gone. A holder that was asked to leave has then
    succeeded; any other has failed."""
    if report.proof not in _PROOFS:
        return
    update.release_leases(report.fence, report.rank, report.proof)
    task = update.live(report.fence)
    if task is None:
        update.clear_freeing_for(report.fence)
    elif task.state is TaskState.STOPPING:
        update.outcome = _given_back(task, now)
        update.move(Move.SUCCEEDED, "process_gone", finished_at=now, freeing_for=None)
    else:
        update.outcome = Outcome(task.id, task.fence, Ending.LOST, now, failure=_failure(task, report.proof))
        update.move(Move.FAILED, "process_gone", finished_at=now)
    update.orders += _forget(world, update.known)


def renew(task: Task, request: Request, now: Instant, done: Decision) -> Decision:
    """Move the end of a lease. A lease whose holder is asked to leave, or that has ended, is not renewed."""
    match task.holder:
        case External(usual_seconds) if task.state in (TaskState.PENDING, TaskState.RUNNING):
            ttl_seconds = request.fields.get("ttl_seconds", usual_seconds)
            write = write_move(task, Move.CHANGED, deadline_at=Instant(now + ttl_seconds))
            return replace(done, tasks=(write,))
        case _:
            return done


def release(world: World, task: Task, request: Request, now: Instant, done: Decision) -> Decision:
    """Release the leases of a holder that says that it has left, in whatever state its task is. For leases in
    quarantine the audit log names who said so."""
    if not isinstance(task.holder, External):
        return done
    if task.state is TaskState.PENDING:
        return cancel_pending(world, task, now, done)
    leases = tuple(leave(lease, Proof.HOLDER) for lease in world.leases_of(task))
    notes = tuple(
        AuditNote(now, task.tenant, str(request.fields.get("by", "")), "lease.release", lease.key, "")
        for lease in leases
        if lease.quarantined_at is not None
    )
    given_back = replace(done, leases=leases, orders=_forget(world, task), audit=notes)
    if task.is_terminal:
        return given_back
    write = write_move(task, Move.SUCCEEDED, finished_at=now, freeing_for=None)
    return replace(given_back, tasks=(write,), outcome=_given_back(task, now))


def not_released(task: Task, now: Instant) -> Outcome:
    """Return the outcome of a holder that was asked to leave and did not release its lease."""
    message = (
        f"it was asked to leave ({task.stop_cause or task.stop_reason}) and was not released; its memory "
        "counts as used until it is, or until its process is known to be gone: release it when the memory is "
        "free"
    )
    return Outcome(task.id, task.fence, Ending.LOST, now, failure=Failure("not_released", message))


def _given_back(task: Task, now: Instant) -> Outcome:
    """Return the outcome of a lease that was released. It replaces the outcome written when the holder was
    asked to leave."""
    return Outcome(task.id, task.fence, Ending.SUCCEEDED, now)


def _failure(task: Task, proof: Proof) -> Failure:
    pid = pid_of(task)
    if proof == Proof.NOT_YOUR_PROCESS:
        message = (
            f"process {pid} belongs to a run, to another lease or to the broker, or is a parent or child of "
            "such a process; name the process of your own program, or none"
        )
        return Failure("not_your_process", message)
    cause = "its node was rebooted" if pid is None else f"its process {pid} no longer exists"
    return Failure("process_gone", f"{cause}; the lease ended with it and was not released")


def _forget(world: World, task: Task) -> tuple[ForgetOrder, ...]:
    """Return the order that ends the agent's watch on the holder's process."""
    if pid_of(task) is None or task.node is None:
        return ()
    incarnation = world.nodes[task.node].incarnation
    return (ForgetOrder(task.id, task.fence, task.node, incarnation),)
