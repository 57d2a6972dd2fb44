"""Arrays and worker sets under the routes of tasks. Their id, that of their first worker, means all of it."""

import json
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Annotated

from gpubroker.wire.arrays import ArrayState
from gpubroker.wire.tasks import Failure
from gpubroker.wire.tasks import Task as ShownTask
from gpubroker.wire.tasks import TaskState as ShownState
from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field

from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.submission import (
    ArrayTerms,
    array_terms_from,
    state_of_array,
    worker_set_from,
)
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.status.records import TaskRecords
from gpubroker_server.http.bodies import Query
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.problems import Fault
from gpubroker_server.ports.store import TaskRecord, TaskStore

_MOST_LISTED = 5
"""Workers that a refusal names; the others are counted."""


HAS_PROCESS = (TaskState.RUNNING, TaskState.STOPPING)


class WorkerQuery(Query):
    worker: Annotated[
        str | None,
        Field(
            max_length=100,
            description="With the id of an array or a worker set: the id of the worker that is meant.",
        ),
    ] = None


class Whole(Struct, frozen=True):
    """An array or a worker set."""

    first: TaskRecord
    """The first worker, whose id the whole has."""
    workers: tuple[TaskId, ...]
    terms: ArrayTerms | None = None
    """The terms of an array; None for anything else."""

    @property
    def is_array(self) -> bool:
        return self.terms is not None


class WholeState(Struct, frozen=True):
    """The state of a whole."""

    state: TaskState
    workers: Mapping[TaskId, TaskState]
    """The state of each worker that has a row, in the order of the whole."""
    left: tuple[TaskId, ...]
    """The workers that have not ended."""
    failed_items: int = 0
    missing_items: int = 0


async def whole_of(store: TaskStore, record: TaskRecord) -> Whole | None:
    """Return the array or the worker set that has this task's id; None if the task is no first worker."""
    task, seat = record.task, record.spec.seat
    if task.holder != WorkerSeat(task.id) and (seat is None or seat.id != task.id):
        return None
    text = await store.batch_answer(task.id)
    kept = json.loads(text) if text else {}
    if "numbers" in kept:
        terms = array_terms_from(kept)
        return Whole(record, terms.workers, terms)
    if "worker_set" in kept:
        return Whole(record, worker_set_from(kept["worker_set"]).workers)
    return None


async def standing_of(store: TaskStore, whole: Whole) -> WholeState:
    # The workers first: the last results are stored before a worker ends.
    rows = await store.states(whole.workers)
    states = {worker: rows[worker].state for worker in whole.workers if worker in rows}
    left = tuple(worker for worker, state in states.items() if not state.is_terminal)
    if whole.terms is None:
        return WholeState(_state_of_set(states), states, left)
    counts = await store.item_counts(whole.terms.id)
    state = state_of_array(whole.terms, counts.done, counts.failed, states.values())
    if left and state.is_terminal:
        state = ArrayState.RUNNING  # its workers are about to end
    return WholeState(TaskState(state), states, left, counts.failed, whole.terms.total - counts.done)


def _state_of_set(workers: Mapping[TaskId, TaskState]) -> TaskState:
    """A set runs while one of its workers does, and waits while none does; it ends by being cancelled."""
    left = [state for state in workers.values() if not state.is_terminal]
    if not left:
        ends = (TaskState.CANCELLED, TaskState.FAILED, TaskState.EXPIRED)
        return next((end for end in ends if end in workers.values()), TaskState.SUCCEEDED)
    return TaskState.PENDING if set(left) == {TaskState.PENDING} else TaskState.RUNNING


async def at_its_end(records: TaskRecords, whole: Whole, seconds: float) -> WholeState:
    """Return how it stands once all its workers have ended, or when the time is over. Raises Problem
    tenant-waits."""
    until = monotonic() + seconds
    standing = await standing_of(records.store, whole)
    for worker in standing.left:
        record = await records.store.record(worker)
        if record is not None:
            await records.at_its_end(record, until - monotonic())
    return await standing_of(records.store, whole) if standing.left else standing


async def view_of_whole(records: TaskRecords, whole: Whole, standing: WholeState | None = None) -> ShownTask:
    """Return the view of its first worker, with the state and the failure of the whole."""
    standing = await standing_of(records.store, whole) if standing is None else standing
    view = await records.view(await records.reread(whole.first))
    error = failure_of_whole(whole, standing) or view.error
    return replace(view, state=ShownState(standing.state), error=error)


async def worker_asked_for(
    records: TaskRecords, record: TaskRecord, worker: str | None, *, runs: bool = False
) -> TaskRecord:
    """Return the one worker that a question about a single process is about: the named one, or else the only
    one, or with `runs` the only one that runs. A task that is no whole is its own only worker.

    Raises Problem validation-failed if several remain, or the named task is no worker of the whole.
    """
    whole = await whole_of(records.store, record)
    if worker is not None:
        return await _named_worker(records, record, whole, worker)
    if whole is None:
        return record
    standing = await standing_of(records.store, whole)
    workers = standing.workers
    found = [worker for worker, state in workers.items() if not runs or state in HAS_PROCESS]
    if len(found) == 1:
        return await records.store.record(found[0]) or record
    if not found:
        return record if not standing.left else await records.store.record(standing.left[0]) or record
    id = whole.first.task.id
    of_all = f"{len(found)} of the {len(workers)} workers of {id} run"
    workers_text = f"{of_all if runs else f'{id} has {len(found)} workers'}: {_listed(whole, found)}"
    detail = f"{workers_text}; choose one of them, as in ?worker={found[0]} (--worker)"
    raise invalid(Fault(pointer="query:worker", detail=detail, code="several-workers"))


async def _named_worker(
    records: TaskRecords, record: TaskRecord, whole: Whole | None, worker: str
) -> TaskRecord:
    id = record.task.id
    if worker == id:
        return record
    named = None
    if whole is None:
        detail = f"{id} is neither an array nor a worker set, so it has no other workers; leave worker out"
    else:
        named = await records.store.record(TaskId(worker)) if worker in whole.workers else None
        detail = f'"{worker}" is no worker of {id}, whose workers are {_listed(whole, whole.workers)}'
    if named is None:
        raise invalid(Fault(pointer="query:worker", detail=detail, code="no-such-worker"))
    return named


def _listed(whole: Whole, workers: Sequence[TaskId]) -> str:
    """Return the first of these workers in words, and the route that has all of them."""
    shown = ", ".join(workers[:_MOST_LISTED])
    if len(workers) <= _MOST_LISTED:
        return shown
    route = "arrays" if whole.is_array else "worker-sets"
    return f"{shown} and {len(workers) - _MOST_LISTED} more (GET /{route}/{whole.first.task.id})"


def failure_of_whole(whole: Whole, standing: WholeState) -> Failure | None:
    """Return why an array has failed; None if it has not."""
    if whole.terms is None or standing.state is not TaskState.FAILED:
        return None
    sentences: Sequence[str] = [
        text
        for count, text in (
            (standing.failed_items, f"{standing.failed_items} of its {whole.terms.total} items failed"),
            (standing.missing_items, f"{standing.missing_items} have no result"),
        )
        if count
    ]
    message = f"{' and '.join(sentences)}; GET /arrays/{whole.terms.id}/items has their errors"
    return Failure(kind="items", message=message, traceback="")
