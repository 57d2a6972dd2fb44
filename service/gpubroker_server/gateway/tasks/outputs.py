"""The files that were collected at the end of a task's runs."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from fastapi import Query, Response
from gpubroker.wire.answered import Time
from gpubroker.wire.outputs import Output, Outputs

from gpubroker_server.core.domain.ranks import rank_count
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.wholes import WorkerQuery, whole_of, worker_asked_for
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.routing import Caller, Resource, answer
from gpubroker_server.ports.run_outputs import RunOutput
from gpubroker_server.ports.store import TaskRecord

resource = Resource("tasks")

_STARTED = (TaskState.ADMITTED, TaskState.RUNNING, TaskState.STOPPING)


@resource.route(
    "GET /tasks/{task_id}/outputs", "tasks_outputs", Scope.TASKS_READ, Outputs, "not-found validation-failed"
)
async def get_outputs(
    caller: Caller, parts: Parts, task_id: str, query: Annotated[WorkerQuery, Query()]
) -> Response:
    """List the files that were collected at the end of a task's runs, by the patterns in its `outputs`.

    The files of a run are an archive in an object (`GET /objects/{id}/content`), which is kept as long as
    other objects. With the id of an array or a worker set, the outputs of all its workers are listed.
    """
    store = parts.records.store
    record = await parts.records.find(caller, task_id)
    if query.worker is not None:
        records = [await worker_asked_for(parts.records, record, query.worker)]
    elif (whole := await whole_of(store, record)) is not None:
        of_workers = [await store.record(worker) for worker in whole.workers]
        records = [record_of_worker for record_of_worker in of_workers if record_of_worker is not None]
    else:
        records = [record]
    items: list[Output] = []
    for run_record in records:
        items += _outputs_of(run_record, await store.outputs_of(run_record.task.id))
    return answer(Outputs(record.spec.outputs, tuple(items)))


def _outputs_of(record: TaskRecord, kept: Sequence[RunOutput]) -> Iterator[Output]:
    """Yield the outputs that were collected, then those of the last attempt that are still expected."""
    task = record.task
    for output in kept:
        yield Output(
            task=output.task,
            attempt=output.fence,
            rank=output.rank,
            state="collected" if output.digest else "empty",
            object=output.digest,
            files=output.files,
            size_bytes=output.size_bytes,
            collected_at=Time.at(output.at),
            message=output.message,
        )
    if not record.spec.outputs or not task.fence:
        return
    collected = {(output.fence, output.rank) for output in kept}
    why = "the run has not ended" if task.state in _STARTED else "its node has not sent the files yet"
    for rank in range(rank_count(task)):
        if (task.fence, rank) not in collected:
            yield Output(task.id, task.fence, rank, "pending", None, 0, 0, None, why)
