"""Tasks that know the broker from which they came."""

from collections.abc import Callable
from typing import Any
from weakref import ref

from gpubroker.errors import TaskCancelled, TaskExpired, TaskFailed, WrongArgument
from gpubroker.transport.decoding import decode
from gpubroker.wire.tasks import Failure, Outcome, TaskState
from gpubroker.wire.tasks import Task as Answer


class Task(Answer, frozen=True):
    """A task as the service answered it."""

    @property
    def told_by(self) -> "ref[Any] | None":
        """The broker that returned this task."""
        broker: ref[Any] | None = self.__dict__.get("told_by")
        return broker

    def __reduce__(self) -> Any:
        return decode, (Task, self.raw)  # a copy elsewhere has no broker

    def __repr__(self) -> str:
        """Return the main fields in one line; `task.raw` has all fields."""
        name = f"{self.name!r}, " if self.name else ""
        where = f" on {self.node}" if self.node else ""
        return f"<Task {self.id} {name}{self.raw.get('state', self.state.value)}{where}>"

    def _repr_html_(self) -> str:
        from gpubroker.notebook import html_of_task

        return html_of_task(self)

    @property
    def is_finished(self) -> bool:
        return self.state.is_terminal

    def result(self, timeout_seconds: float | None = None) -> Any:  # type: ignore[misc]  # over the field
        """Wait for the task and return its result, as `broker.result(task)` of the broker that returned this
        task."""
        return self._broker().result(self, timeout_seconds)

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Return the ended Task, or a coroutine of it, as `broker.wait(task)` of the broker that returned
        this task."""
        return self._broker().wait(self, timeout_seconds)

    def outcome(self) -> Any:
        """Return an Outcome, or a coroutine of one, as `broker.outcome(task)` of the broker that returned
        this task."""
        return self._broker().outcome(self)

    def cancel(self, *, grace_seconds: float | None = None, reason: str | None = None) -> Any:
        """Return the Task, or a coroutine of it, as `broker.cancel(task)` of the broker that returned this
        task."""
        return self._broker().cancel(self, grace_seconds=grace_seconds, reason=reason)

    def retry(self, *, idempotency_key: str | None = None) -> Any:
        """Return a new Task, or a coroutine of one, as `broker.retry(task)` of the broker that returned this
        task."""
        return self._broker().retry(self, idempotency_key=idempotency_key)

    def stack(self, *, rank: int = 0, worker: str | None = None) -> Any:
        """Return a Stack, or a coroutine of one, as `broker.stack(task)` of the broker that returned this
        task."""
        return self._broker().stack(self, rank=rank, worker=worker)

    @property
    def outputs(self) -> "TaskOutputs":
        """The files that the runs of this task left behind: `task.outputs.download("results")`."""
        return TaskOutputs(self, self._broker)

    def logs(self, **wanted: Any) -> Any:
        """Iterate over the printed lines, as `broker.logs(task, follow=True)` of the broker that returned
        this task."""
        return self._broker().logs(self, **wanted)

    def events(self, **wanted: Any) -> Any:
        """Iterate over the task's events, as `broker.events(task, follow=True)` of the broker that returned
        this task."""
        return self._broker().events(self, **wanted)

    def _broker(self) -> Any:
        broker = None if self.told_by is None else self.told_by()
        if broker is None:
            raise WrongArgument(f"the broker that task {self.id} came from is gone; ask another by this id")
        return broker


class TaskOutputs:
    """The files that were collected at the end of a task's runs."""

    def __init__(self, task: Task, broker: Callable[[], Any]) -> None:
        self._task = task
        self._its_broker = broker

    def list(self, **wanted: Any) -> Any:
        """Return Outputs, or a coroutine of them, as `broker.task_outputs(task)` of the broker that returned
        the task."""
        return self._its_broker().task_outputs(self._task, **wanted)

    def download(self, directory: Any = ".", **wanted: Any) -> Any:
        """Write the files and return their paths, or a coroutine of them, as `broker.download_outputs(task,
        directory)` of the broker that returned the task."""
        return self._its_broker().download_outputs(self._task, directory, **wanted)


AnyTask = Task | str
"""A task, its id, at least the last 8 characters of its id, or a unique name."""


def id_of(task: AnyTask) -> str:
    return task.id if isinstance(task, Task) else task


def check_success(outcome: Outcome) -> None:
    """Check that the task succeeded. Raises TaskFailed, TaskExpired or TaskCancelled if it ended without a
    result."""
    if outcome.state is TaskState.CANCELLED:
        raise TaskCancelled(outcome.id)
    if outcome.state is not TaskState.SUCCEEDED:
        error = outcome.error or Failure(str(outcome.raw.get("state")), "it left no message", "")
        fault = TaskExpired if outcome.state is TaskState.EXPIRED else TaskFailed
        raise fault(
            outcome.id,
            kind=error.kind,
            message=error.message,
            traceback=error.traceback,
            log_tail=outcome.log_tail,
        )
