"""Who waits for whose end: an index over the tasks that run after others, kept by the World."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpubroker_server.core.domain.task import OnFailure, Task, TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.world.inherited_priority import Inheritance


class End(NamedTuple):
    """How a task ended, as those hear it who wait for it."""

    state: TaskState | None
    """None if nobody knows: its record is gone."""
    failed_by: TaskId | None = None
    """Of a task that failed because of another: the first of that chain."""


class Awaited:
    """Dependents leave it when they await nothing any more, and when they end.

    What a dependent awaits may have ended before the World heard of either: such tasks are `unknown`, and
    how they ended is for the store to say. So the order in which rows come in does not matter, and no end
    is missed.
    """

    def __init__(self) -> None:
        self.dependents: dict[TaskId, dict[TaskId, OnFailure]] = {}
        """Awaited task -> those who wait for its end, and what its failure does to them."""
        self.left: dict[TaskId, set[TaskId]] = {}
        """Dependent -> the tasks whose end it still waits for."""
        self.ripe: set[TaskId] = set()
        """Dependents that have nothing left to wait for."""
        self.doomed: dict[TaskId, tuple[TaskId, End]] = {}
        """Dependents that cannot run, and the end because of which."""
        self.unknown: set[TaskId] = set()
        """Awaited tasks that the World has not met."""
        self.inheritance = Inheritance(self.left, self.dependents)

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
            self.ended(task.id, End(task.state, task.failed_by))
        if task.id in self.left:
            if task.is_terminal or not task.awaits:
                self._leave(task.id)
            else:
                self.inheritance.hear(task)

    def ended(self, task: TaskId, end: End) -> None:
        self.unknown.discard(task)
        self.inheritance.ended(task)
        for dependent, on_failure in self.dependents.pop(task, {}).items():
            left = self.left[dependent]
            left.discard(task)
            if end.state is not TaskState.SUCCEEDED and on_failure is OnFailure.FAIL:
                self.doomed.setdefault(dependent, (task, end))
            elif not left:
                self.ripe.add(dependent)

    def learn(self, asked: Iterable[TaskId], ends: Mapping[TaskId, End]) -> None:
        """What the store says of tasks that were unknown. One without a record ended, nobody knows how."""
        for task in asked:
            end = ends.get(task, End(None))
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
