"""Where a running task is: the stacks of its Python threads."""

import json
from typing import Annotated

from fastapi import Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.ranks import node_of
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.lifecycle.change_requests import STACK_SECONDS
from gpubroker_server.gateway.http import bodies
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.routing import Call, Resource, answer
from gpubroker_server.gateway.http.times import Time, rfc3339
from gpubroker_server.gateway.parts import Parts

resource = Resource("tasks")


class StackQuery(bodies.Query):
    rank: Annotated[int, Field(ge=0, description="Of a gang: whose process.")] = 0


WAIT_SECONDS = Seconds(STACK_SECONDS + 2.0)
"""The leader gives the agent a little less."""


class StackView(TypedDict):
    id: str
    attempt: int
    rank: int
    node: str
    taken_at: Time
    stack: Annotated[
        str | None, Field(description="All Python threads, each with its most recent call last; null: none.")
    ]
    message: Annotated[str, Field(description="Why there is no stack, as of a command that is not Python.")]


@resource.route(
    "GET /tasks/{task_id}/stack",
    "tasks_stack",
    Scope.TASKS_READ,
    StackView,
    "not-found task-not-running stack-unavailable tenant-waits validation-failed leader-outdated "
    "store-unavailable",
)
async def get_stack(
    call: Call, parts: Parts, task_id: str, query: Annotated[StackQuery, Query()]
) -> Response:
    """Read the stacks of all Python threads of a running task, which goes on meanwhile.

    A small task that shares its process with others shows its own thread alone.
    """
    record = await parts.records.find(call.identity, task_id)
    task, rank = record.task, query.rank
    if task.state not in (TaskState.RUNNING, TaskState.STOPPING) or not task.is_run:
        raise Problem("task-not-running", task=task.id, state=task.state)
    ranks = max(1, len(task.members))
    if rank >= ranks:
        detail = f"it has {ranks} {'rank' if ranks == 1 else 'ranks'}, counted from 0"
        raise invalid(Fault(pointer="query:rank", detail=detail, code="no-such-rank"))
    digest = await parts.requests.ask_for(task.id, task.tenant, "stack", {"rank": rank}, WAIT_SECONDS)
    if not digest:
        raise Problem(
            "stack-unavailable", task=task.id, node=node_of(task, rank), seconds=f"{STACK_SECONDS:g}"
        )
    told = json.loads(await parts.records.blobs.get(digest))
    view: StackView = {
        "id": task.id,
        "attempt": task.fence,
        "rank": rank,
        "node": node_of(task, rank),
        "taken_at": rfc3339(Instant(told["at"])),
        "stack": told["stack"] or None,
        "message": told["message"],
    }
    return answer(view)
