"""How tasks end: wait for it, fetch what they left."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.queries import WaitQuery
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.records import at_its_end, find, finished, live_of
from gpubroker_server.gateway.status.results import result_member, shown_format
from gpubroker_server.gateway.status.task_view import error_view, task_view
from gpubroker_server.gateway.status.views import ResultView, TaskView

router = APIRouter(route_class=DirectRoute, tags=["tasks"])


@router.get(
    "/tasks/{task_id}/wait",
    operation_id="tasks_wait",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=TaskView,
    response_description="The task has ended; see `result`.",
    responses={
        202: {"model": TaskView, "description": "The time is over and the task goes on; ask again."},
        **problems("unauthenticated", "forbidden", "not-found", "validation-failed", "result-damaged"),
    },
)
async def wait_for_task(call: Call, task_id: str, query: Annotated[WaitQuery, Query()]) -> Response:
    """Wait for the end of a task. Answers the moment it ends."""
    parts = call.parts
    seconds = min(query.timeout_seconds, parts.limits.wait_seconds)
    record = await at_its_end(parts, await find(call, task_id), seconds)
    if record.task.is_terminal:
        return await finished(parts, record)
    return answer(task_view(record, live_of(parts, record.task)), 202)


@router.get(
    "/tasks/{task_id}/result",
    operation_id="tasks_result",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=ResultView,
    responses=problems("unauthenticated", "forbidden", "not-found", "task-not-finished", "result-damaged"),
)
async def get_result(call: Call, task_id: str) -> Response:
    """Fetch what a finished task left: its result or its error, and the end of its log."""
    record = await find(call, task_id)
    task = record.task
    if not task.is_terminal:
        raise Problem(
            "task-not-finished",
            f"task {task.id} is {task.state}; /tasks/{task.id}/wait answers when it ends",
        )
    stored = await call.parts.store.result(task.id)
    view: ResultView = {
        "id": task.id,
        "state": task.state.value,
        "format": record.spec.result_format if stored is None else shown_format(stored.format),
        "error": error_view(record.failure),
        "log_tail": "" if stored is None else stored.log_tail.decode("utf-8", "replace"),
    }
    return answer(view, member=await result_member(call.parts, stored))
