"""What a task inherits from those that wait for it: its place in the queue, and nothing else."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId

NOTHING = -1
"""Passed on by tasks that are held: nobody need hurry for them."""


class Inherited(NamedTuple):
    priority: int
    task: TaskId
    """Whose it is."""


class Inheritance:
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
        """Awaited task -> priority -> how many of its dependents pass that on."""

    def hear(self, dependent: Task) -> None:
        """One that waits, as it has become."""
        self._own[dependent.id] = NOTHING if dependent.held else dependent.priority
        self._pass_on(dependent.id)

    def leave(self, dependent: TaskId) -> None:
        """It waits no more; still to be called while it stands in `left`."""
        self._own[dependent] = NOTHING
        self._pass_on(dependent)
        del self._own[dependent], self._passes[dependent]

    def ended(self, task: TaskId) -> None:
        """Nobody waits for it any more."""
        self._told.pop(task, None)
        self.priorities.pop(task, None)

    def of(self, task: Task) -> Inherited | None:
        """By whose priority it stands in the queue; None if by its own."""
        highest = self.priorities.get(task.id, NOTHING)
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
            own, before = self._own[name], self._passes.get(name, NOTHING)
            after = NOTHING if own == NOTHING else max(own, self.priorities.get(name, NOTHING))
            self._passes[name] = after
            if after != before:
                changed = [task for task in self._left[name] if self._tell(task, before, after)]
                agenda += (task for task in changed if task in self._own)

    def _tell(self, task: TaskId, before: int, after: int) -> bool:
        """Whether what the task inherits is another now."""
        told = self._told.setdefault(task, Counter())
        if before != NOTHING:
            told[before] -= 1
            if not told[before]:
                del told[before]
        if after != NOTHING:
            told[after] += 1
        highest = max(told, default=NOTHING)
        if highest == self.priorities.get(task, NOTHING):
            return False
        self.priorities[task] = highest
        if highest == NOTHING:
            del self.priorities[task], self._told[task]
        self.changed.add(task)
        return True
