"""Leases of external holders: released by their own request, or by proof that their process is gone."""

from dataclasses import replace
from typing import Any

from gpubroker_server.core.domain.decisions import (
    AuditNote,
    Decision,
    Outcome,
    Request,
    write_move,
)
from gpubroker_server.core.domain.lease import HolderKind, Lease, Proof
from gpubroker_server.core.domain.lease import release as leave
from gpubroker_server.core.domain.orders import Ending, Failure, ForgetOrder, Gone, WatchOrder
from gpubroker_server.core.domain.task import Move, Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.lifecycle.stopping import cancel_pending
from gpubroker_server.core.lifecycle.task_update import TaskUpdate
from gpubroker_server.core.world.world import World

_PROOFS = frozenset({Proof.PROCESS_ABSENT, Proof.BOOT_CHANGED, Proof.NOT_YOUR_PROCESS})
"""That an agent does not know a holder proves nothing."""


def begun(task: Task, now: Instant) -> dict[str, Any]:
    """What its admission changes besides its claim: it starts at once, and its whole time counts from
    then."""
    assert task.external is not None
    return {"started_at": now, "deadline_at": Instant(now + task.external.ttl_seconds)}


def watch_orders(world: World, task: Task, leases: list[Lease]) -> tuple[WatchOrder, ...]:
    if task.external is None or task.external.pid is None or task.node is None:
        return ()
    devices = tuple((lease.device, lease.mb) for lease in leases)
    incarnation = world.nodes[task.node].incarnation
    return (WatchOrder(task.id, task.fence, task.node, incarnation, task.external.pid, devices),)


def holders_on(world: World, node: NodeName) -> list[Task]:
    """Holders with memory there, also those that should have left; ordered by id."""
    leases = (h.lease for key in world.by_node.get(node, ()) for h in world.ledgers[key].holdings.values())
    names = {lease.holder for lease in leases if lease.holder_kind is HolderKind.EXTERNAL}
    return [world.tasks[TaskId(name)] for name in sorted(names)]


def gone(update: TaskUpdate, world: World, report: Gone, now: Instant) -> None:
    """Its process is gone, and so is what it held. If it was asked to leave, it has left."""
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
    """One that is asked to leave, or has ended, is not renewed."""
    if task.external is None or task.state not in (TaskState.PENDING, TaskState.RUNNING):
        return done
    ttl_seconds = request.fields.get("ttl_seconds", task.external.ttl_seconds)
    write = write_move(task, Move.CHANGED, deadline_at=Instant(now + ttl_seconds))
    return replace(done, tasks=(write,))


def release(world: World, task: Task, request: Request, now: Instant, done: Decision) -> Decision:
    """The holder says that it has left, whatever was asked of it before and also after its end. The audit log
    names who said so of leases in quarantine."""
    if task.external is None:
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
    """The outcome of a holder that was asked to leave and did not release its lease."""
    message = (
        f"it was asked to leave ({task.stop_reason}) and was not released; its memory counts as used until "
        "it is, or until its process is known to be gone: release it when the memory is free"
    )
    return Outcome(task.id, task.fence, Ending.LOST, now, failure=Failure("not_released", message))


def _given_back(task: Task, now: Instant) -> Outcome:
    """Replaces the outcome written when it was asked to leave."""
    return Outcome(task.id, task.fence, Ending.SUCCEEDED, now)


def _failure(task: Task, proof: Proof) -> Failure:
    pid = None if task.external is None else task.external.pid
    if proof == Proof.NOT_YOUR_PROCESS:
        message = (
            f"process {pid} belongs to a run, to another lease or to the broker, or is a parent or child of "
            "such a process; name the process of your own program, or none"
        )
        return Failure("not_your_process", message)
    what = "its node was rebooted" if pid is None else f"its process {pid} no longer exists"
    return Failure("process_gone", f"{what}; the lease ended with it and was not released")


def _forget(world: World, task: Task) -> tuple[ForgetOrder, ...]:
    """Its agent need not watch it any longer."""
    if task.external is None or task.external.pid is None or task.node is None:
        return ()
    incarnation = world.nodes[task.node].incarnation
    return (ForgetOrder(task.id, task.fence, task.node, incarnation),)
