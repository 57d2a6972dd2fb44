"""Cancel all tasks that match a filter, in one request."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from fastapi import Response
from gpubroker.wire.tasks import Cancelled
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gpubroker_server.core.domain.task import TERMINAL, TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.tasks.routes import CancelTask
from gpubroker_server.gateway.tasks.selection import MAX_STANDS, TaskSelection
from gpubroker_server.http.bodies import JsonBody, Labels
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Fault
from gpubroker_server.http.routing import Caller, Resource, answer
from gpubroker_server.ports.store import TaskFilter, TaskStore

resource = Resource("tasks")

MAX_SELECTED = 10_000
_STARTED = (TaskState.ADMITTED, TaskState.RUNNING, TaskState.STOPPING)
_UNFINISHED = (TaskState.PENDING, *_STARTED)
_TO_BE_CANCELLED = (TaskState.PENDING, TaskState.ADMITTED, TaskState.RUNNING)


class CancelSelected(CancelTask, TaskSelection):
    """A selection of tasks to cancel. Without `state`, only tasks that have not ended are selected."""

    NOT_FILTERS: ClassVar = frozenset({"all", "dry_run", *CancelTask.model_fields})

    labels: Annotated[Labels, Field(default_factory=dict, description="All must match.")]
    all: Annotated[bool, Field(description="Every task that has not ended, if there is no filter.")] = False
    dry_run: Annotated[bool, Field(description="Count only.")] = False

    @model_validator(mode="after")
    def _selects_something(self) -> Self:
        has_filter = bool(self.model_dump(exclude_defaults=True).keys() - self.NOT_FILTERS)
        if self.all == has_filter:
            raise PydanticCustomError(
                "nothing_selected",
                'give one filter or more, such as {"labels": {"run": "42"}}, or "all": true',
            )
        return self


@resource.route(
    "POST /tasks/cancel",
    "tasks_cancel_selected",
    Scope.TASKS_WRITE,
    Cancelled,
    "malformed-json not-found unsupported-media-type validation-failed store-unavailable",
    accepted="Some are `stored`: there is no leader now, or it is busy.",
)
async def cancel_selected(caller: Caller, parts: Parts, body: JsonBody[CancelSelected]) -> Response:
    """Cancel all of a tenant's tasks that match a filter, waiting tasks before running tasks.

    One request cancels up to 10,000 tasks, the newest first. Tasks that hold the memory of models are not
    selected: the routes of models free that memory.
    """
    store = parts.records.store
    wanted = {**await body.filters(parts.records, caller), "labels": dict(body.labels)}
    tenant = wanted["tenant"]
    if tenant is None:
        raise invalid(Fault(pointer="/tenant", detail="name one tenant", code="one-tenant"))
    chosen = wanted.pop("states") or _UNFINISHED
    groups: list[Sequence[TaskId]] = []
    for group in ((TaskState.PENDING,), _STARTED, tuple(TERMINAL)):
        states = tuple(state for state in group if state in chosen)
        room = MAX_SELECTED + 1 - sum(map(len, groups))
        selected = TaskFilter(**wanted, states=states, limit=room)
        groups.append(await store.selected(selected) if states and room else ())
    matched = [task for group in groups for task in group]
    waiting, started, ended = groups
    asked = [*waiting, *started][:MAX_SELECTED]
    if asked and not body.dry_run:
        if tenant != caller.tenant:
            about = f"{len(asked)} tasks, from {asked[0]} on"
            await store.audit(by=caller.name, tenant=tenant, action="task.cancel", subject=about)
        fields = body.model_dump(exclude_defaults=True, include=set(CancelTask.model_fields))
        await parts.requests.ask_many(asked, tenant, "cancel", {**fields, "by": caller.name})
    now = Counter() if body.dry_run else await _states(store, asked)
    over = sum(now[state] for state in TERMINAL - {TaskState.CANCELLED})
    counted = Cancelled(
        matched=len(matched[:MAX_SELECTED]),
        waiting=len(waiting[:MAX_SELECTED]),
        started=len(asked[len(waiting) :]),
        cancelled=now[TaskState.CANCELLED],
        stopping=now[TaskState.STOPPING],
        already_ended=over + len(ended[: MAX_SELECTED - len(asked)]),
        stored=sum(now[state] for state in _TO_BE_CANCELLED),
        has_more=len(matched) > MAX_SELECTED,
    )
    return answer(counted, 202 if counted.stored else 200)


async def _states(store: TaskStore, tasks: Sequence[TaskId]) -> Counter[TaskState]:
    counts: Counter[TaskState] = Counter()
    for start in range(0, len(tasks), MAX_STANDS):
        states = await store.states(tasks[start : start + MAX_STANDS])
        counts.update(stored.state for stored in states.values())
    return counts
