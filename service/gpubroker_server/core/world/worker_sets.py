"""The worker sets that are not over, and the set of each worker."""

from collections.abc import Iterable, Mapping

from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.payload import changed, read


class WorkerSets(dict[TaskId, WorkerSet]):
    """The worker sets by id. Only `apply` changes them, which also knows the workers."""

    def __init__(self, known: Iterable[WorkerSet] = ()) -> None:
        super().__init__()
        self._set_of: dict[TaskId, TaskId] = {}
        self.restore(known)

    def restore(self, known: Iterable[WorkerSet]) -> None:
        """Add the sets of a database snapshot."""
        for workers in known:
            self._form(workers)

    def of(self, worker: TaskId) -> WorkerSet | None:
        """Return the set of which this task is a worker; None if it is no worker."""
        return self.get(self._set_of.get(worker, worker))

    def running(self, tasks: Mapping[TaskId, Task]) -> int:
        """Return how many workers of all sets run."""
        workers = (tasks.get(worker) for worker in self._set_of)
        return sum(task is not None and task.state is TaskState.RUNNING for task in workers)

    def apply(self, event: Event, change: str) -> None:
        id = TaskId(event.key)
        match change:
            case "formed":
                self._form(read(event.payload, WorkerSet))
            case "changed":
                self[id] = changed(self[id], event.payload)
            case _:
                for worker in self.pop(id).workers:
                    del self._set_of[worker]

    def _form(self, workers: WorkerSet) -> None:
        self[workers.id] = workers
        self._set_of |= dict.fromkeys(workers.workers, workers.id)
