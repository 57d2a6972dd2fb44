"""What the demo does and what must come of it. Everything goes through the public SDK."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpubroker import Broker, Event, Gpu, Task, TaskState

from examples.demo.narrator import Narrator, seconds_between
from examples.demo.workload import EVALUATION, TRAININGS, Reference, Work

_PHASE_SECONDS = 60.0
_LOOK_EVERY_SECONDS = 0.15
_LOST = (TaskState.FAILED, TaskState.EXPIRED, TaskState.CANCELLED)


class Deviation(Exception):
    """The demo did not go as it must; the text says how."""


class Screen(Protocol):
    def show(self, gpus: Sequence[Gpu], tasks: Sequence[Task], lines: Sequence[str], /) -> None:
        """The present picture, and the lines that are new since the last one."""
        ...


@dataclass(frozen=True)
class Ending:
    """What is reported at the end, to people and to programs."""

    accuracy: dict[str, float]
    reference: dict[str, float]
    preemptions: dict[str, int]
    resumed_at_epoch: dict[str, int]
    seconds_to_make_room: float


class Story:
    def __init__(self, broker: Broker, screen: Screen, narrator: Narrator) -> None:
        self._broker = broker
        self._screen = screen
        self._narrator = narrator
        self._tasks: dict[str, Task] = {}
        self._gpus: Sequence[Gpu] = ()

    def tell(self, reference: Reference) -> Ending:
        """Fill two GPUs, preempt for a critical task, resume, compare. Raises Deviation."""
        for work in TRAININGS:
            self._submit(work)
        self._until(self._all_can_be_stopped, "all trainings run and have a checkpoint")

        free_mb = max(gpu.free_mb for gpu in self._gpus)
        require(free_mb < EVALUATION.gpu_mb, f"{free_mb} MiB are free on one GPU: nothing needs to give way")
        self._submit(EVALUATION)
        self._until(lambda: all(task.is_finished for task in self._tasks.values()), "all tasks are finished")
        self._until(lambda: not any(gpu.leased_mb or gpu.used_mb for gpu in self._gpus), "all memory is free")
        return self._judged(reference.accuracies())

    def _submit(self, work: Work) -> None:
        task = self._tasks[work.name] = work.submit(self._broker)
        self._narrator.knows(task)

    def _all_can_be_stopped(self) -> bool:
        return all(task.checkpoint_at and task.state is TaskState.RUNNING for task in self._tasks.values())

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        """Look, show, and look again. Raises Deviation if it takes a minute, or if a task is lost."""
        give_up_at = time.monotonic() + _PHASE_SECONDS
        while True:
            self._look()
            if reached():
                return
            for task in self._tasks.values():
                require(task.state not in _LOST, f"{task.name} is {task.state}: {task.error}")
            states = ", ".join(f"{task.name} is {task.state}" for task in self._tasks.values())
            require(time.monotonic() < give_up_at, f"waited {_PHASE_SECONDS:.0f} s until {what}: {states}")
            time.sleep(_LOOK_EVERY_SECONDS)

    def _look(self) -> None:
        for name, task in self._tasks.items():
            if not task.is_finished:
                self._tasks[name] = self._broker.get(task)
        self._gpus = self._broker.gpus().items
        for gpu in self._gpus:
            require(gpu.leased_mb <= gpu.physical_mb, f"{gpu.leased_mb} MiB are leased on {gpu.uuid}")
        tasks = list(self._tasks.values())
        self._narrator.hears(self._broker.events(after=self._narrator.position), self._gpus, tasks)
        self._screen.show(self._gpus, tasks, self._narrator.new_lines())

    def _judged(self, reference: dict[str, float]) -> Ending:
        """Compare with what should have happened. Raises Deviation."""
        results = {name: self._broker.result(task) for name, task in self._tasks.items()}
        victims = {name: task.preemptions for name, task in self._tasks.items() if task.preemptions}
        require(bool(victims), "nothing was preempted, though the critical task did not fit")
        admitted = self._event("task.admitted", EVALUATION.name)
        for name in victims:
            freed = self._event("lease.released", name)
            require(freed.position < admitted.position, f"{EVALUATION.name} began before {name} was gone")
            require(results[name]["resumed_at_epoch"] > 0, f"{name} began again instead of resuming")

        accuracy = {name: float(result["accuracy"]) for name, result in results.items()}
        for name, expected in reference.items():
            found = accuracy[name]
            require(abs(found - expected) < 1e-9, f"{name} reached {found}, and {expected} when undisturbed")
        return Ending(
            accuracy,
            reference,
            victims,
            {name: results[name]["resumed_at_epoch"] for name in victims},
            seconds_between(self._event("task.submitted", EVALUATION.name), admitted),
        )

    def _event(self, kind: str, name: str) -> Event:
        event = self._narrator.first(kind, name)
        if event is None:
            raise Deviation(f"the event log has no {kind} of {name}")
        return event


def require(true: bool, otherwise: str) -> None:
    if not true:
        raise Deviation(otherwise)
