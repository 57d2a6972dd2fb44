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
    """List what was collected of the files of a task's runs, by its `outputs`.

    Each is an archive in an object, `GET /objects/{id}/content`, which is kept as other objects are. With the
    id of an array or a worker set, of all its workers.
    """
    store = parts.records.store
    record = await parts.records.find(caller, task_id)
    if query.worker is not None:
        records = [await worker_asked_for(parts.records, record, query.worker)]
    elif (whole := await whole_of(store, record)) is not None:
        found = [await store.record(worker) for worker in whole.workers]
        records = [one for one in found if one is not None]
    else:
        records = [record]
    items: list[Output] = []
    for one in records:
        items += _outputs_of(one, await store.outputs_of(one.task.id))
    return answer(Outputs(record.spec.outputs, tuple(items)))


def _outputs_of(record: TaskRecord, kept: Sequence[RunOutput]) -> Iterator[Output]:
    task = record.task
    for one in kept:
        yield Output(
            task=one.task,
            attempt=one.fence,
            rank=one.rank,
            state="collected" if one.digest else "empty",
            object=one.digest,
            files=one.files,
            size_bytes=one.size_bytes,
            collected_at=Time.at(one.at),
            message=one.message,
        )
    if not record.spec.outputs or not task.fence:
        return
    known = {(one.fence, one.rank) for one in kept}
    why = "the run has not ended" if task.state in _STARTED else "its node has not sent the files yet"
    for rank in range(rank_count(task)):
        if (task.fence, rank) not in known:
            yield Output(task.id, task.fence, rank, "pending", None, 0, 0, None, why)
