"""Who waits for whose end: an index over the tasks that run after others, kept by the World."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from gpubroker_server.core.domain.decisions import Decision, Outcome, write_move
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.task import Move, OnFailure, Task, TaskState
from gpubroker_server.core.domain.units import Instant, TaskId

NO_PRIORITY = -1
"""Passed on by tasks that are held: nobody need hurry for them."""


class Inherited(NamedTuple):
    priority: int
    task: TaskId
    """Whose it is."""


class PriorityInheritance:
    """Per awaited task, the highest priority among all that wait for it, directly or through others.

    Kept by counting what each dependent passes on, so that a change costs as much as there are tasks whose
    place it changes, however many wait for them.
    """

    def __init__(
        self, left: Mapping[TaskId, Collection[TaskId]], dependents: Mapping[TaskId, Collection[TaskId]]
    ) -> None:
        """`left`: dependent -> whom it waits for. `dependents`: the same the other way round."""
        self.priorities: dict[TaskId, int] = {}
        self.changed: set[TaskId] = set()
        """Whose has changed, until somebody takes notice."""
        self._left = left
        self._dependents = dependents
        self._own: dict[TaskId, int] = {}
        self._passes: dict[TaskId, int] = {}
        """Dependent -> what those inherit whom it waits for."""
        self._told: dict[TaskId, Counter[int]] = {}
        """DependencyIndex task -> priority -> how many of its dependents pass that on."""

    def hear(self, dependent: Task) -> None:
        """One that waits, as it has become."""
        self._own[dependent.id] = NO_PRIORITY if dependent.held else dependent.priority
        self._pass_on(dependent.id)

    def leave(self, dependent: TaskId) -> None:
        """It waits no more; still to be called while it stands in `left`."""
        self._own[dependent] = NO_PRIORITY
        self._pass_on(dependent)
        del self._own[dependent], self._passes[dependent]

    def ended(self, task: TaskId) -> None:
        """Nobody waits for it any more."""
        self._told.pop(task, None)
        self.priorities.pop(task, None)

    def of(self, task: Task) -> Inherited | None:
        """By whose priority it stands in the queue; None if by its own."""
        highest = self.priorities.get(task.id, NO_PRIORITY)
        if highest <= task.priority:
            return None
        name = task.id
        while name == task.id or self._own[name] != highest:
            name = min(other for other in self._dependents[name] if self._passes[other] == highest)
        return Inherited(highest, name)

    def _pass_on(self, first: TaskId) -> None:
        agenda = [first]
        while agenda:
            name = agenda.pop()
            own, before = self._own[name], self._passes.get(name, NO_PRIORITY)
            after = NO_PRIORITY if own == NO_PRIORITY else max(own, self.priorities.get(name, NO_PRIORITY))
            self._passes[name] = after
            if after != before:
                changed = [task for task in self._left[name] if self._tell(task, before, after)]
                agenda += (task for task in changed if task in self._own)

    def _tell(self, task: TaskId, before: int, after: int) -> bool:
        """Whether what the task inherits is another now."""
        told = self._told.setdefault(task, Counter())
        if before != NO_PRIORITY:
            told[before] -= 1
            if not told[before]:
                del told[before]
        if after != NO_PRIORITY:
            told[after] += 1
        highest = max(told, default=NO_PRIORITY)
        if highest == self.priorities.get(task, NO_PRIORITY):
            return False
        self.priorities[task] = highest
        if highest == NO_PRIORITY:
            del self.priorities[task], self._told[task]
        self.changed.add(task)
        return True


class TaskEnd(NamedTuple):
    """How a task ended, as those hear it who wait for it."""

    state: TaskState | None
    """None if nobody knows: its record is gone."""
    failed_by: TaskId | None = None
    """Of a task that failed because of another: the first of that chain."""


class DependencyIndex:
    """Dependents leave it when they await nothing any more, and when they end.

    What a dependent awaits may have ended before the World heard of either: such tasks are `unknown`, and
    how they ended is for the store to say. So the order in which rows come in does not matter, and no end
    is missed.
    """

    def __init__(self) -> None:
        self.dependents: dict[TaskId, dict[TaskId, OnFailure]] = {}
        """DependencyIndex task -> those who wait for its end, and what its failure does to them."""
        self.left: dict[TaskId, set[TaskId]] = {}
        """Dependent -> the tasks whose end it still waits for."""
        self.ripe: set[TaskId] = set()
        """Dependents that have nothing left to wait for."""
        self.doomed: dict[TaskId, tuple[TaskId, TaskEnd]] = {}
        """Dependents that cannot run, and the end because of which."""
        self.unknown: set[TaskId] = set()
        """DependencyIndex tasks that the World has not met."""
        self.inheritance = PriorityInheritance(self.left, self.dependents)

    def enter(self, task: Task, met: Mapping[TaskId, Task]) -> None:
        """A task that is new to the World: as one that waits, and as one that others wait for."""
        if task.id in self.dependents:
            self.unknown.discard(task.id)
            self.note(task)
        if not task.awaits or task.is_terminal:
            return
        self.left[task.id] = {dependency.task for dependency in task.after}
        for dependency in task.after:
            self.dependents.setdefault(dependency.task, {})[task.id] = dependency.on_failure
            row = met.get(dependency.task)
            if row is None:
                self.unknown.add(dependency.task)
            else:
                self.note(row)
        self.inheritance.hear(task)

    def note(self, task: Task) -> None:
        """A task as it has become. If it has ended, those who wait for it hear of it."""
        if task.is_terminal:
            self.ended(task.id, TaskEnd(task.state, task.failed_by))
        if task.id in self.left:
            if task.is_terminal or not task.awaits:
                self._leave(task.id)
            else:
                self.inheritance.hear(task)

    def ended(self, task: TaskId, end: TaskEnd) -> None:
        self.unknown.discard(task)
        self.inheritance.ended(task)
        for dependent, on_failure in self.dependents.pop(task, {}).items():
            left = self.left[dependent]
            left.discard(task)
            if end.state is not TaskState.SUCCEEDED and on_failure is OnFailure.FAIL:
                self.doomed.setdefault(dependent, (task, end))
            elif not left:
                self.ripe.add(dependent)

    def learn(self, asked: Iterable[TaskId], ends: Mapping[TaskId, TaskEnd]) -> None:
        """What the store says of tasks that were unknown. One without a record ended, nobody knows how."""
        for task in asked:
            end = ends.get(task, TaskEnd(None))
            if task in self.unknown and (end.state is None or end.state.is_terminal):
                self.ended(task, end)

    def _leave(self, dependent: TaskId) -> None:
        self.inheritance.leave(dependent)
        for task in self.left.pop(dependent):
            others = self.dependents[task]
            del others[dependent]
            if not others:
                del self.dependents[task]
                self.unknown.discard(task)
        self.ripe.discard(dependent)
        self.doomed.pop(dependent, None)


MAX_DECISIONS = 1000
"""Decisions at a time: a task may have any number of dependents."""


def settle_dependencies(
    awaited: DependencyIndex, tasks: Mapping[TaskId, Task], now: Instant
) -> list[Decision]:
    """Fail those whose dependency failed, and those who wait for them in turn; let in those who await
    nothing any more. At most MOST; ask again until there are none."""
    decisions = list(_cascade(awaited, tasks, now))
    failed = {decision.subject for decision in decisions}
    ripe = sorted(awaited.ripe - failed - awaited.doomed.keys())[: MAX_DECISIONS - len(decisions)]
    return decisions + [_let_in(tasks[name], now) for name in ripe]


def _cascade(awaited: DependencyIndex, tasks: Mapping[TaskId, Task], now: Instant) -> list[Decision]:
    """In the order in which they hear of it. One that is left for later is doomed by then."""
    agenda = deque((name, *awaited.doomed[name]) for name in sorted(awaited.doomed))
    decisions: dict[TaskId, Decision] = {}
    while agenda and len(decisions) < MAX_DECISIONS:
        name, by, end = agenda.popleft()
        if name in decisions:
            continue
        first = end.failed_by or by
        decisions[name] = _fail(tasks[name], by, end, first, now)
        for dependent, on_failure in sorted(awaited.dependents.get(name, {}).items()):
            if on_failure is OnFailure.FAIL:
                agenda.append((dependent, name, TaskEnd(TaskState.FAILED, first)))
    return list(decisions.values())


def _fail(task: Task, by: TaskId, end: TaskEnd, first: TaskId, now: Instant) -> Decision:
    failure = Failure("dependency", f"it was to run after {by}, which {_how(end)}")
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


def _let_in(task: Task, now: Instant) -> Decision:
    """It stands in the queue from now on, and its time to wait begins."""
    changes: dict[str, Any] = {"awaits": False}
    if task.queue_ttl_seconds is not None:
        earliest = max(now, task.not_before or now)
        changes["expires_at"] = Instant(earliest + task.queue_ttl_seconds)
    return Decision(task.id, "awaited", tasks=(write_move(task, Move.CHANGED, **changes),))
