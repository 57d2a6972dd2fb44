"""Which tasks a new one runs after: what the client says, held against the rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpubroker_server.core.domain.task import Dependency, OnFailure
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.http.faults import refused
from gpubroker_server.gateway.http.ids import is_task_id
from gpubroker_server.gateway.http.problems import Fault
from gpubroker_server.gateway.http.routing import Call
from gpubroker_server.gateway.submission.task_body import SubmitTask
from gpubroker_server.ports.store import Stand

if TYPE_CHECKING:
    from gpubroker_server.gateway.inferences.inferences import SubmitInference

Stands = Mapping[TaskId, Stand]


async def stands_for(call: Call, body: "SubmitTask | SubmitInference") -> Stands:
    """How the tasks stand that it runs after; those that there are not are left out."""
    ids = {TaskId(wanted.task) for wanted in body.after if is_task_id(wanted.task)}
    return await call.parts.store.stands(sorted(ids)) if ids else {}


def dependencies_of(
    body: "SubmitTask | SubmitInference", stands: Stands, tenant: str
) -> tuple[Dependency, ...]:
    """Raises Problem for tasks that the caller's tenant does not have, and for those named twice.

    How they stand is not asked here: whatever happens until the submit commits, the leader finds out.
    """
    if not body.after:
        return ()
    ids = [TaskId(wanted.task) for wanted in body.after]
    faults: list[Fault] = []
    for at, id in enumerate(ids):
        if id not in stands or stands[id].tenant != tenant:
            detail = f'there is no task "{id}"; GET /tasks lists yours'
            faults.append(Fault(pointer=f"/after/{at}/task", detail=detail, code="unknown-task"))
        elif id in ids[:at]:
            detail = f"task {id} stands at /after/{ids.index(id)} already; name it once"
            faults.append(Fault(pointer=f"/after/{at}/task", detail=detail, code="named-twice"))
    if faults:
        raise refused(faults)
    return tuple(
        Dependency(id, OnFailure(wanted.on_failure)) for id, wanted in zip(ids, body.after, strict=True)
    )
