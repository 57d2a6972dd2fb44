"""The example's training, in runs without a node agent: an interrupted one reaches the same result."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from gpubroker import Stopped
from gpubroker.runtime.journal import Journal
from gpubroker.runtime.messages import Report, RunOrder
from gpubroker.runtime.task import RunningTask, enter_task, leave_task

WORK = {"seed": 1, "hidden": 8, "epochs": 25}


class Run:
    """One attempt of a task. `stop_after` gives notice as soon as that many epochs are done."""

    def __init__(self, attempt: int = 1, resume_state: bytes | None = None) -> None:
        self._reports: list[Report] = []
        self._journal = Journal(self._read)
        order = RunOrder("task_1", attempt, "entrypoint", attempt=attempt, resume_state=resume_state)
        self.task = RunningTask(order, self._journal)

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        entered = enter_task(self.task)
        try:
            return function(**arguments)
        finally:
            leave_task(entered)

    def checkpoints(self) -> list[bytes]:
        """The saved states, oldest first."""
        return [report[7] for report in self._reports if report[0] == "checkpointed"]

    def _read(self, _delay_seconds: float) -> None:
        """Fetch each report at once: of waiting checkpoints only the newest is kept."""
        self._reports += [report for _, report in self._journal.take(0, 2**30)]


def train(run: Run) -> Any:
    return run.call(digits().train, **WORK)


@cache
def digits() -> Any:
    """The module. It imports scikit-learn, which takes a tenth of the time in which all tests are found."""
    return import_module("examples.digits")


@cache
def undisturbed() -> tuple[float, list[bytes]]:
    """The accuracy, and the checkpoints on the way."""
    run = Run()
    return train(run)["accuracy"], run.checkpoints()


def test_a_stopped_training_resumes_to_the_same_accuracy() -> None:
    first = Run()
    first.task.give_notice()
    with pytest.raises(Stopped):
        train(first)
    [state] = first.checkpoints()

    second = Run(2, state)
    assert train(second) == {
        "accuracy": undisturbed()[0],
        "resumed_at_epoch": 1,
        "attempt": 2,
    }


def test_a_killed_training_resumes_from_its_last_checkpoint() -> None:
    accuracy, states = undisturbed()
    assert len(states) == WORK["epochs"]

    ended = train(Run(2, states[9]))
    assert (ended["accuracy"], ended["resumed_at_epoch"]) == (accuracy, 10)


def test_a_checkpoint_is_small_enough_to_travel_with_the_reports() -> None:
    _, states = undisturbed()
    assert max(map(len, states)) < 1024 * 1024


def test_the_evaluation_returns_the_best_accuracy() -> None:
    ended = Run().call(digits().evaluate, folds=2)
    assert ended["accuracy"] == max(ended["scores"].values()) > 0.9
