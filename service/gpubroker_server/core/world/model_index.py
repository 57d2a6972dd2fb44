"""An index of the models that are wanted or loaded, and of the inferences that ask them."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from gpubroker_server.core.domain.holders import Inference, Model
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.task import Task, TaskState, model_of
from gpubroker_server.core.domain.units import Instant, TaskId

WAIT_BOUNDS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
"""The bounds of the histogram of waits, in seconds."""


_MAX_NAMES: Final = 1024
"""The most models whose last answer is kept. The number is limited because clients choose the names."""


def is_unasked(task: Task) -> bool:
    """Return True if the model made room for others and no request has needed it since."""
    return task.state is TaskState.PENDING and model_of(task).yields


class InferenceCounts:
    def __init__(self) -> None:
        self.ended: Counter[TaskState] = Counter()
        self.waited_seconds = 0.0
        """The sum of the waits over all first sends."""
        self._waits = [0] * (len(WAIT_BOUNDS) + 1)

    def note(self, before: Task, after: Task) -> None:
        """Count the change of a task. The wait begins at submission, or at `not_before`, and ends at the
        first send."""
        match after.holder:
            case Inference():
                self._note_inference(before, after)
            case _:
                pass

    def _note_inference(self, before: Task, after: Task) -> None:
        if not before.fence and after.fence and after.started_at is not None:
            since = max(after.submitted_at, before.not_before or after.submitted_at)
            waited_seconds = max(0.0, after.started_at - since)
            self._waits[bisect_left(WAIT_BOUNDS, waited_seconds)] += 1
            self.waited_seconds += waited_seconds
        if after.is_terminal:
            self.ended[after.state] += 1

    def waits(self) -> Sequence[int]:
        """Return the cumulative counts by bound, and the total."""
        return tuple(accumulate(self._waits))


class ModelIndex:
    def __init__(self) -> None:
        self._live: dict[ModelKey, Task] = {}
        self._known: dict[TaskId, Task] = {}
        """The models by task. Ended models stay as long as they may hold memory."""
        self._asking: dict[str, dict[TaskId, Task]] = {}
        self._answered_at: dict[str, Instant] = {}
        """Maps a model to the instant at which an inference was last sent to it or answered, as far as this
        process has seen. Only the `_MAX_NAMES` models that were asked last are kept."""
        self.answered = InferenceCounts()

    def note(self, task: Task) -> None:
        match task.holder:
            case Inference():
                self._note_inference(task)
            case Model() as model:
                self._note_model(task, model)
            case _:
                pass

    def _note_model(self, task: Task, model: Model) -> None:
        if task.id in self._known:
            home = model_of(self._known[task.id]).home  # the server may have had another name before
            if self._live.get(home) == self._known[task.id]:
                del self._live[home]
        self._known[task.id] = task
        if not task.is_terminal:
            self._live[model.home] = task

    def drop(self, task: Task) -> None:
        self._known.pop(task.id, None)

    def asking(self, model: str) -> Mapping[TaskId, Task]:
        """Return the inferences of a model that were sent and have not ended."""
        return self._asking.get(model, {})

    def answered_at(self, model: str) -> Instant:
        """Return when a queued inference was last sent to the model or answered; 0 if none is known."""
        return self._answered_at.get(model, Instant(0.0))

    def asked(self) -> list[str]:
        """Return the models with inferences that were sent and have not ended, by name."""
        return sorted(self._asking)

    def _note_inference(self, task: Task) -> None:
        model = task.demand.answered_by
        if task.started_at is not None:
            self._answered_at.pop(model, None)
            self._answered_at[model] = task.finished_at or task.started_at
            if len(self._answered_at) > _MAX_NAMES:
                del self._answered_at[next(iter(self._answered_at))]
        if task.is_active:
            self._asking.setdefault(model, {})[task.id] = task
        elif model in self._asking:
            self._asking[model].pop(task.id, None)
            if not self._asking[model]:
                del self._asking[model]

    def of(self, home: ModelKey) -> Task | None:
        return self._live.get(home)

    def known(self) -> Iterator[Task]:
        """Yield the models by id, including ended models with memory."""
        return (self._known[name] for name in sorted(self._known))

    def on(self, server: str, address: str = "", process: str = "") -> Iterator[Task]:
        """Yield all models of one server by id, including ended models with memory."""
        for task in self.known():
            if model_of(task).is_at(server, address, process):
                yield task

    def live(self) -> Iterator[Task]:
        """Yield the live models, ordered by server and model."""
        return (self._live[home] for home in sorted(self._live))
