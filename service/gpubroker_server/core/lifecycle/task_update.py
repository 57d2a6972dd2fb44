"""The changes that a batch of reports makes to one task, gathered into one decision."""

from typing import Any

from gpubroker_server.core.domain.decisions import Decision, ItemPage, Outcome, TaskWrite, write_move
from gpubroker_server.core.domain.holders import Gang
from gpubroker_server.core.domain.lease import (
    NEXT_STATES,
    Lease,
    LeaseState,
    Proof,
    move_lease,
    quarantine,
    release,
)
from gpubroker_server.core.domain.orders import Checkpointed, Order
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Move, Task, move
from gpubroker_server.core.domain.units import Fence, Instant, TaskId
from gpubroker_server.core.lifecycle.stopping import after_failure, after_stop
from gpubroker_server.core.world.world import World


class TaskUpdate:
    """One task with the leases of all its claims, after the reports read so far.

    The store guards each row by its version, so a decision writes a row once: the last move that changed the
    state wins, changed fields add up, and a lease goes to its final state in one step.
    """

    def __init__(self, world: World, task: TaskId, now: Instant) -> None:
        self._id = task
        self._now = now
        self._world = world
        self._before = world.tasks.get(task)
        self._what: Move | None = None
        self._changes: dict[str, Any] = {}
        self._leases: dict[str, tuple[Lease, LeaseState, Proof | None]] = {}
        self.task: Task | None = self._before
        """The task after the reports read so far; None if the World does not know it."""
        self.why = ""
        self.outcome: Outcome | None = None
        self.checkpoint: Checkpointed | None = None
        self.items: list[ItemPage] = []
        self.orders: list[Order] = []

    def live(self, fence: Fence, rank: int = 0) -> Task | None:
        """Return the task if it is active and its newest claim has this fence and this rank; None if the
        report is stale."""
        task = self.task
        if task is None or not task.is_active or task.fence != fence:
            return None
        match task.holder:
            case Gang(members):
                return task if rank < len(members) else None
            case _:
                return None if rank else task

    @property
    def known(self) -> Task:
        """The task, if the report is about a task that the World knows."""
        assert self.task is not None
        return self.task

    def move(self, transition: Move, why: str, **changes: Any) -> None:
        self.task = move(self.known, transition, **changes)
        if transition is not Move.CHANGED or self._what is None:
            self._what = transition
        self._changes |= changes
        self.why = why

    def stopped(self, why: str, policy: Policy) -> None:
        """Move the task on once its runs are gone or given up after a stop notice."""
        next_move, changes = after_stop(self.known, self._now, policy)
        self.move(next_move, why, **changes)

    def failed(self, task: Task, at: Instant, policy: Policy) -> None:
        """Move the task on after a failed run. `task` is the task with the retries that this kind of failure
        allows."""
        next_move, changes = after_failure(task, at, self._now, policy)
        self.move(next_move, "ended" if next_move is Move.FAILED else "retry", **changes)

    def move_leases(self, fence: Fence, rank: int, state: LeaseState, proof: Proof | None = None) -> None:
        """Bring the leases of one run forward to `state`. A lease that has reached this state or a later one
        stays."""
        for lease in self._world.leases.get((self._id, fence), {}).values():
            if lease.rank != rank:
                continue
            _, reached, _ = self._leases.get(lease.key, (lease, lease.state, None))
            if state in NEXT_STATES[reached]:
                self._leases[lease.key] = (lease, state, proof)

    def release_leases(self, fence: Fence, rank: int, proof: Proof) -> None:
        self.move_leases(fence, rank, LeaseState.RELEASED, proof)

    def clear_freeing_for(self, fence: Fence) -> None:
        """Clear the preemptor of a claim that ended in this batch, since its memory is free in this batch
        too."""
        task = self.task
        if self._what is not None and task is not None and task.fence == fence and task.freeing_for:
            self._changes["freeing_for"] = None

    def decision(self) -> Decision | None:
        """Return the decision; None if the reports changed nothing and need no order."""
        leases = tuple(self._moved(*self._leases[key]) for key in sorted(self._leases))
        tasks: tuple[TaskWrite, ...] = ()
        if self._before is not None and self._what is not None:
            tasks = (write_move(self._before, self._what, **self._changes),)
        if not tasks and not leases and not self.orders:
            return None
        return Decision(
            subject=self._id,
            why=self.why or "lease",
            tasks=tasks,
            leases=leases,
            outcome=self.outcome,
            checkpoint=self.checkpoint,
            items=tuple(self.items),
            orders=tuple(self.orders),
        )

    def _moved(self, lease: Lease, state: LeaseState, proof: Proof | None) -> Lease:
        if proof is not None:
            return release(lease, proof)
        if state is LeaseState.QUARANTINED:
            return quarantine(lease, self._now)
        return move_lease(lease, state)


class TaskUpdates(dict[TaskId, TaskUpdate]):
    """The updates of one batch, in order of first mention. A missing update is created on access."""

    def __init__(self, world: World, now: Instant) -> None:
        super().__init__()
        self._world = world
        self._now = now

    def __missing__(self, task: TaskId) -> TaskUpdate:
        update = self[task] = TaskUpdate(self._world, task, self._now)
        return update

    def decisions(self) -> list[Decision]:
        return [decision for update in self.values() if (decision := update.decision()) is not None]
