"""Tasks that run after others: the index of their dependencies, the priorities that dependencies inherit, and
the decisions once a dependency has ended."""

from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any, NamedTuple

from gpubroker.wire.tasks import Inherited

from gpubroker_server.core.domain.decisions import Decision, Outcome, write_move
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.task import Move, OnFailure, Task, TaskState
from gpubroker_server.core.domain.units import Instant, TaskId

NO_PRIORITY = -1
"""The priority that a held task passes on, which is below all others."""

MAX_DECISIONS = 1000
"""The most decisions per call of `settle_dependencies`, since a task may have any number of dependents."""


class PriorityInheritance:
    """The highest priority among the direct and indirect dependents of each dependency. Each dependent is
    counted with the priority that it passes on, so the cost of a change is proportional to the number of
    tasks whose place in the queue changes."""

    def __init__(
        self,
        remaining: Mapping[TaskId, Collection[TaskId]],
        dependents: Mapping[TaskId, Collection[TaskId]],
        workers: Mapping[TaskId, Collection[TaskId]],
    ) -> None:
        """`remaining` maps a dependent to its dependencies, and `dependents` a dependency to its dependents.
        `workers` maps an array to its workers, which inherit the priority of the array."""
        self.priorities: dict[TaskId, int] = {}
        self.changed: set[TaskId] = set()
        """The tasks with a changed inherited priority that the queue has not repositioned yet."""
        self._remaining = remaining
        self._dependents = dependents
        self._workers = workers
        self._own: dict[TaskId, int] = {}
        self._passed: dict[TaskId, int] = {}
        """Maps a dependent to the priority that it passes on."""
        self._counts: dict[TaskId, Counter[int]] = {}
        """Maps a dependency to the number of dependents that pass on each priority."""

    def update(self, dependent: Task) -> None:
        self._own[dependent.id] = NO_PRIORITY if dependent.held else dependent.priority
        self._propagate(dependent.id)

    def leave(self, dependent: TaskId) -> None:
        """Remove a dependent that no longer waits. Call this while the dependent is still in `remaining`."""
        self._own[dependent] = NO_PRIORITY
        self._propagate(dependent)
        del self._own[dependent], self._passed[dependent]

    def ended(self, task: TaskId) -> None:
        self._counts.pop(task, None)
        self.priorities.pop(task, None)

    def of(self, task: Task) -> Inherited | None:
        """Return the priority that the task has in the queue, and from which dependent, if it is
        inherited."""
        first = task.holder.array if isinstance(task.holder, WorkerSeat) else task.id
        highest = self.priorities.get(first, NO_PRIORITY)
        if highest <= task.priority:
            return None
        name = first
        while name == first or self._own[name] != highest:
            name = min(other for other in self._dependents[name] if self._passed[other] == highest)
        return Inherited(highest, name)

    def _propagate(self, first: TaskId) -> None:
        agenda = [first]
        while agenda:
            name = agenda.pop()
            own_priority, before = self._own[name], self._passed.get(name, NO_PRIORITY)
            after = (
                NO_PRIORITY
                if own_priority == NO_PRIORITY
                else max(own_priority, self.priorities.get(name, NO_PRIORITY))
            )
            self._passed[name] = after
            if after != before:
                changed = [task for task in self._remaining[name] if self._recount(task, before, after)]
                agenda += (task for task in changed if task in self._own)

    def _recount(self, task: TaskId, before: int, after: int) -> bool:
        """Count `after` instead of `before` for one dependent. Return True if the task now inherits another
        priority."""
        counts = self._counts.setdefault(task, Counter())
        if before != NO_PRIORITY:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
        if after != NO_PRIORITY:
            counts[after] += 1
        highest = max(counts, default=NO_PRIORITY)
        if highest == self.priorities.get(task, NO_PRIORITY):
            return False
        self.priorities[task] = highest
        if highest == NO_PRIORITY:
            del self.priorities[task], self._counts[task]
        self.changed.update(self._workers.get(task) or (task,))
        return True


class TaskEnd(NamedTuple):
    state: TaskState | None
    """The state in which the task ended; None if its record is gone."""
    failed_by: TaskId | None = None
    """The first failed task of the chain of dependencies, if the task failed because of another task."""


class DependencyIndex:
    """The index of the tasks that wait for others. A task leaves it when no dependency remains, and when the
    task ends.

    A dependency may have ended before the World read its row or that of the dependent. It is then `unknown`,
    and the store says how it ended. Therefore rows may arrive in any order, and no end is missed.

    The id of an array or of a worker set is that of its first worker, and here means the whole. The array or
    set ends with its last worker. How an array ended depends on its items, which the store knows.
    """

    def __init__(self, sets: Container[TaskId] = ()) -> None:
        """`sets` has the worker sets that have not ended."""
        self.sets = sets
        self.workers: dict[TaskId, set[TaskId]] = {}
        """Maps an array to its workers that have not ended."""
        self.dependents: dict[TaskId, dict[TaskId, OnFailure]] = {}
        """Maps a dependency to its dependents, and to what its failure does to each."""
        self.remaining: dict[TaskId, set[TaskId]] = {}
        """Maps a dependent to its dependencies that have not ended."""
        self.ready: set[TaskId] = set()
        """The dependents with no dependency left to wait for."""
        self.unsatisfiable: dict[TaskId, tuple[TaskId, TaskEnd]] = {}
        """Maps a dependent that cannot run to the dependency that prevents it, and the end of that."""
        self.unknown: set[TaskId] = set()
        """The dependencies that the World does not know."""
        self.inheritance = PriorityInheritance(self.remaining, self.dependents, self.workers)

    def enter(self, task: Task, known: Mapping[TaskId, Task]) -> None:
        """Enter a task that is new to the World, as a dependent and as a dependency. `known` has the tasks of
        the World."""
        match task.holder:
            case WorkerSeat(array) if not task.is_terminal:
                self.workers.setdefault(array, set()).add(task.id)
                self.unknown.discard(array)
            case _:
                pass
        if task.id in self.dependents:
            self.unknown.discard(task.id)
            self.update(task)
        if not task.awaits or task.is_terminal:
            return
        self.remaining[task.id] = {dependency.task for dependency in task.after}
        for dependency in task.after:
            self.dependents.setdefault(dependency.task, {})[task.id] = dependency.on_failure
            row = known.get(dependency.task)
            if row is not None:
                self.update(row)
            elif dependency.task not in self.workers and dependency.task not in self.sets:
                self.unknown.add(dependency.task)
        self.inheritance.update(task)

    def update(self, task: Task) -> None:
        if task.is_terminal:
            end = TaskEnd(task.state, task.failed_by)
            match task.holder:
                case WorkerSeat(array):
                    self._worker_ended(array, task.id)
                    if array != task.id:
                        self.ended(task.id, end)
                case _ if task.id not in self.sets:
                    self.ended(task.id, end)
                case _:
                    pass
        if task.id in self.remaining:
            if task.is_terminal or not task.awaits:
                self._leave(task.id)
            else:
                self.inheritance.update(task)

    def _worker_ended(self, array: TaskId, worker: TaskId) -> None:
        left = self.workers.get(array)
        if left is not None:
            left.discard(worker)
            if not left:
                del self.workers[array]
        if array in self.dependents and array not in self.workers:
            self.unknown.add(array)

    def set_is_over(self, id: TaskId) -> None:
        """Record that a worker set is over. Its dependents learn from the store how its first worker
        ended."""
        if id in self.dependents:
            self.unknown.add(id)

    def ended(self, task: TaskId, end: TaskEnd) -> None:
        self.unknown.discard(task)
        self.inheritance.ended(task)
        for dependent, on_failure in self.dependents.pop(task, {}).items():
            remaining = self.remaining[dependent]
            remaining.discard(task)
            if end.state is not TaskState.SUCCEEDED and on_failure is OnFailure.FAIL:
                self.unsatisfiable.setdefault(dependent, (task, end))
            elif not remaining:
                self.ready.add(dependent)

    def learn(self, asked: Iterable[TaskId], ends: Mapping[TaskId, TaskEnd]) -> None:
        """Enter the store's answer about unknown dependencies. A dependency without a record ended long
        ago."""
        for task in asked:
            end = ends.get(task, TaskEnd(None))
            if task in self.unknown and (end.state is None or end.state.is_terminal):
                self.ended(task, end)

    def _leave(self, dependent: TaskId) -> None:
        self.inheritance.leave(dependent)
        for task in self.remaining.pop(dependent):
            others = self.dependents[task]
            del others[dependent]
            if not others:
                del self.dependents[task]
                self.unknown.discard(task)
        self.ready.discard(dependent)
        self.unsatisfiable.pop(dependent, None)


def settle_dependencies(
    awaited: DependencyIndex, tasks: Mapping[TaskId, Task], now: Instant
) -> list[Decision]:
    """Return decisions that fail tasks after a failed dependency, and their dependents in turn, and that
    queue tasks which are ready. There are at most MAX_DECISIONS: repeat the call until it returns none."""
    decisions = list(_cascade(awaited, tasks, now))
    failed = {decision.subject for decision in decisions}
    ready = sorted(awaited.ready - failed - awaited.unsatisfiable.keys())[: MAX_DECISIONS - len(decisions)]
    return decisions + [_enqueue(tasks[name], now) for name in ready]


def _cascade(awaited: DependencyIndex, tasks: Mapping[TaskId, Task], now: Instant) -> list[Decision]:
    """Return the failures in breadth-first order. A task beyond the limit fails at the next call."""
    agenda = deque((name, *awaited.unsatisfiable[name]) for name in sorted(awaited.unsatisfiable))
    decisions: dict[TaskId, Decision] = {}
    while agenda and len(decisions) < MAX_DECISIONS:
        name, failed, end = agenda.popleft()
        if name in decisions:
            continue
        first = end.failed_by or failed
        decisions[name] = _fail(tasks[name], failed, end, first, now)
        for dependent, on_failure in sorted(awaited.dependents.get(name, {}).items()):
            if on_failure is OnFailure.FAIL:
                agenda.append((dependent, name, TaskEnd(TaskState.FAILED, first)))
    return list(decisions.values())


def _fail(task: Task, failed: TaskId, end: TaskEnd, first: TaskId, now: Instant) -> Decision:
    failure = Failure("dependency", f"it runs after {failed}, which {_how(end)}")
    return Decision(
        task.id,
        "dependency",
        tasks=(write_move(task, Move.FAILED, failed_by=first, finished_at=now),),
        outcome=Outcome(task.id, task.fence, TaskState.FAILED, now, failure=failure),
    )


def _how(end: TaskEnd) -> str:
    match end.state:
        case None:
            return "ended long ago, and its record is gone"
        case TaskState.FAILED if end.failed_by is not None:
            return f"could not run because {end.failed_by} did not succeed"
        case TaskState.CANCELLED:
            return "was cancelled"
        case _:
            return f"has {end.state}"


def _enqueue(task: Task, now: Instant) -> Decision:
    """Return the decision by which the task enters the queue and its time limit to wait begins."""
    changes: dict[str, Any] = {"awaits": False}
    if task.queue_ttl_seconds is not None:
        earliest = max(now, task.not_before or now)
        changes["expires_at"] = Instant(earliest + task.queue_ttl_seconds)
    return Decision(task.id, "awaited", tasks=(write_move(task, Move.CHANGED, **changes),))
