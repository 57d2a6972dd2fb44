"""The route that reads the stacks of a running task's Python threads."""

import json
from typing import Annotated

from fastapi import Query, Response
from gpubroker.wire.answered import Time
from gpubroker.wire.tasks import Stack
from pydantic import Field

from gpubroker_server.core.domain.ranks import node_of, rank_count
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle.change_requests import STACK_SECONDS
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.wholes import HAS_PROCESS, WorkerQuery, worker_asked_for
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.routing import Caller, Resource, answer

resource = Resource("tasks")


class StackQuery(WorkerQuery):
    rank: Annotated[int, Field(ge=0, description="The rank of a gang whose threads are shown.")] = 0


WAIT_SECONDS = Seconds(STACK_SECONDS + 2.0)
"""How long a request waits for the leader, which itself waits for the agent a little less."""


@resource.route(
    "GET /tasks/{task_id}/stack",
    "tasks_stack",
    Scope.TASKS_READ,
    Stack,
    "not-found task-not-running stack-unavailable tenant-waits validation-failed leader-outdated "
    "store-unavailable",
)
async def get_stack(
    caller: Caller, parts: Parts, task_id: str, query: Annotated[StackQuery, Query()]
) -> Response:
    """Read the stacks of all Python threads of a running task, which goes on meanwhile.

    Of a small task that shares its process with other tasks, only its own thread is shown. With the id of an
    array or a worker set, the stacks are those of the only running worker; if several run, name one with
    `worker`.
    """
    record = await parts.records.find(caller, task_id)
    record = await worker_asked_for(parts.records, record, query.worker, runs=True)
    task, rank = record.task, query.rank
    ranks = rank_count(task)
    if task.state not in HAS_PROCESS or not ranks:
        raise Problem("task-not-running", task=task.id, state=task.state)
    if rank >= ranks:
        detail = f"it has {ranks} {'rank' if ranks == 1 else 'ranks'}, counted from 0"
        raise invalid(Fault(pointer="query:rank", detail=detail, code="no-such-rank"))
    digest = await parts.requests.ask_for(task.id, task.tenant, "stack", {"rank": rank}, WAIT_SECONDS)
    if not digest:
        raise Problem(
            "stack-unavailable", task=task.id, node=node_of(task, rank), seconds=f"{STACK_SECONDS:g}"
        )
    stored = json.loads(await parts.records.blobs.get(digest))
    return answer(
        Stack(
            id=task.id,
            attempt=task.fence,
            rank=rank,
            node=node_of(task, rank),
            taken_at=Time.at(stored["at"]),
            stack=stored["stack"] or None,
            message=stored["message"],
        )
    )
