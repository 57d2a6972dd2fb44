"""Says why the model that a queued inference waits for is not in memory, in the words of its server."""

from asyncio import gather
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState
from gpubroker_server.core.domain.submission import MODEL_KIND
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.backends import NotFetched
from gpubroker_server.ports.model_servers import KnownServer, ModelResidencies
from gpubroker_server.ports.store import TaskFilter, TaskSort, TaskStore

_INDEX_SECONDS: Final = Seconds(2.0)
"""How long a server outside the ledger may take to list its models."""

_LATELY_SECONDS: Final = Seconds(3600.0)
"""A failed load is reported only if it ended at most this long before the inference was submitted."""


async def model_fault(
    store: TaskStore, residencies: ModelResidencies | None, outside: Sequence[KnownServer], task: Task
) -> str:
    """Return a text that says why the model of a pending inference is not in memory: its last load failed, or
    no server has the model. The text is empty if the model is in memory, or if no reason is known."""
    model = task.demand.answered_by
    if residencies is not None:
        held = [residency.of(model) for residency in residencies.holding(model)]
        if any(holder is not None and holder.state is TaskState.RUNNING for holder in held):
            return ""
        if fault := await _failed_load(store, task, model):
            return fault
        if held:
            return ""
    return await _outside(outside, model)


async def _failed_load(store: TaskStore, task: Task, model: str) -> str:
    """Return a text that says how the last load of the model failed; empty if it did not fail lately."""
    failed = TaskFilter(
        None, (TaskState.FAILED,), kind=MODEL_KIND, name=model, sort=TaskSort.FINISHED, limit=1
    )
    for record in await store.records(failed):
        is_lately = (record.task.finished_at or 0.0) >= task.submitted_at - _LATELY_SECONDS
        if is_lately and record.failure is not None:
            return f"its last load failed: {record.failure.get('message', '')}"
    return ""


async def _outside(servers: Sequence[KnownServer], model: str) -> str:
    """Return a text that says why no server outside the ledger has the model in memory; empty if one has it,
    or if no server answers."""
    answers = [
        answer for answer in await gather(*(_of_server(server, model) for server in servers)) if answer
    ]
    if not answers or any(row is not None and row.stage is ModelState.READY for _, row in answers):
        return ""
    having = [(name, row) for name, row in answers if row is not None]
    if not having:
        asked = ", ".join(name for name, _ in answers)
        return f'no model server has model "{model[:100]}" (asked: {asked}); GET /models lists all'
    name, row = having[0]
    load = f"load it there: gpubroker load {model[:100]} --server {name}"
    reason = f" ({row.reason})" if row.reason else ""
    return f"server {name} has it in its repository and not in memory{reason}; {load}"


async def _of_server(server: KnownServer, model: str) -> tuple[str, IndexedModel | None] | None:
    """Return the server's name and its entry for the model, which is None if it lacks the model. Returns None
    if the server does not list its models."""
    with suppress(NotFetched):
        models = await server.index(_INDEX_SECONDS)
        if models is not None:
            return server.name, models.get(model)
    return None
