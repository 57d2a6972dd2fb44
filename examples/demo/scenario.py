"""What the demo does and what it expects. Everything goes through the public SDK."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpubroker import Broker, Event, Gpu, Task, TaskState

from examples.demo.event_lines import EventLines, seconds_between
from examples.demo.workload import EVALUATION, TRAININGS, Reference, Work

_PHASE_SECONDS = 60.0
_POLL_SECONDS = 0.15
_LOST = (TaskState.FAILED, TaskState.EXPIRED, TaskState.CANCELLED)


class Unexpected(Exception):
    """Something did not happen as expected; the text says what."""


class Screen(Protocol):
    def show(self, gpus: Sequence[Gpu], tasks: Sequence[Task], lines: Sequence[str], /) -> None:
        """Show the present state, and the lines since the last call."""
        ...


@dataclass(frozen=True)
class Result:
    """The text that is printed at the end, for people and for programs."""

    accuracy: dict[str, float]
    reference: dict[str, float]
    preemptions: dict[str, int]
    resumed_at_epoch: dict[str, int]
    seconds_to_make_room: float


class Scenario:
    def __init__(self, broker: Broker, screen: Screen, lines: EventLines) -> None:
        self._broker = broker
        self._screen = screen
        self._lines = lines
        self._tasks: dict[str, Task] = {}
        self._gpus: Sequence[Gpu] = ()

    def run(self, reference: Reference) -> Result:
        """Fill two GPUs, preempt for a critical task, resume, compare. Raises Unexpected."""
        for work in TRAININGS:
            self._submit(work)
        self._until(self._all_can_be_stopped, "all trainings run and have a checkpoint")

        free_mb = max(gpu.free_mb for gpu in self._gpus)
        require(free_mb < EVALUATION.gpu_mb, f"{free_mb} MiB are free on one GPU: no run has to leave")
        self._submit(EVALUATION)
        self._until(lambda: all(task.is_finished for task in self._tasks.values()), "all tasks are finished")
        self._until(lambda: not any(gpu.leased_mb or gpu.used_mb for gpu in self._gpus), "all memory is free")
        return self._checked(reference.accuracies())

    def _submit(self, work: Work) -> None:
        task = self._tasks[work.name] = work.submit(self._broker)
        self._lines.register(task)

    def _all_can_be_stopped(self) -> bool:
        return all(task.checkpoint_at and task.state is TaskState.RUNNING for task in self._tasks.values())

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        """Poll and show the state until `reached` returns True. Raises Unexpected if it takes a minute, or if
        a task fails."""
        give_up_at = time.monotonic() + _PHASE_SECONDS
        while True:
            self._poll()
            if reached():
                return
            for task in self._tasks.values():
                require(task.state not in _LOST, f"{task.name} is {task.state}: {task.error}")
            states = ", ".join(f"{task.name} is {task.state}" for task in self._tasks.values())
            require(time.monotonic() < give_up_at, f"waited {_PHASE_SECONDS:.0f} s until {what}: {states}")
            time.sleep(_POLL_SECONDS)

    def _poll(self) -> None:
        for name, task in self._tasks.items():
            if not task.is_finished:
                self._tasks[name] = self._broker.get(task)
        self._gpus = self._broker.gpus().items
        for gpu in self._gpus:
            require(gpu.leased_mb <= gpu.physical_mb, f"{gpu.leased_mb} MiB are leased on {gpu.uuid}")
        tasks = list(self._tasks.values())
        self._lines.observe(self._broker.events(after=self._lines.position), self._gpus, tasks)
        self._screen.show(self._gpus, tasks, self._lines.new_lines())

    def _checked(self, reference: dict[str, float]) -> Result:
        """Compare the results with the expected ones. Raises Unexpected if they differ."""
        results = {name: self._broker.result(task) for name, task in self._tasks.items()}
        victims = {name: task.preemptions for name, task in self._tasks.items() if task.preemptions}
        require(bool(victims), "nothing was preempted, though the critical task did not fit")
        admitted = self._event("task.admitted", EVALUATION.name)
        for name in victims:
            freed = self._event("lease.released", name)
            require(freed.position < admitted.position, f"{EVALUATION.name} started before {name} was gone")
            require(results[name]["resumed_at_epoch"] > 0, f"{name} started again instead of resuming")

        accuracy = {name: float(result["accuracy"]) for name, result in results.items()}
        for name, expected in reference.items():
            found = accuracy[name]
            require(abs(found - expected) < 1e-9, f"{name} reached {found}, and {expected} when undisturbed")
        return Result(
            accuracy,
            reference,
            victims,
            {name: results[name]["resumed_at_epoch"] for name in victims},
            seconds_between(self._event("task.submitted", EVALUATION.name), admitted),
        )

    def _event(self, kind: str, name: str) -> Event:
        event = self._lines.first(kind, name)
        if event is None:
            raise Unexpected(f"the event log has no {kind} of {name}")
        return event


def require(true: bool, otherwise: str) -> None:
    if not true:
        raise Unexpected(otherwise)
