"""Arrays and worker sets in the routes of tasks. The id of an array or a worker set is the id of its first
worker, and stands for all of its workers."""

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

_MAX_LISTED = 5
"""The largest number of workers that a refusal names; further workers are only counted."""


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
    """The first worker, whose id is also the id of the whole."""
    workers: tuple[TaskId, ...]
    terms: ArrayTerms | None = None
    """The terms of an array; None for a worker set."""

    @property
    def is_array(self) -> bool:
        return self.terms is not None


class WholeState(Struct, frozen=True):
    """The state of an array or a worker set."""

    state: TaskState
    workers: Mapping[TaskId, TaskState]
    """Worker -> its state, in the order of the whole, for the workers that have a row."""
    left: tuple[TaskId, ...]
    """The workers that have not ended."""
    failed_items: int = 0
    missing_items: int = 0


async def whole_of(store: TaskStore, record: TaskRecord) -> Whole | None:
    """Return the array or the worker set whose first worker the task is; None for any other task."""
    task, seat = record.task, record.spec.seat
    if task.holder != WorkerSeat(task.id) and (seat is None or seat.id != task.id):
        return None
    text = await store.batch_answer(task.id)
    stored = json.loads(text) if text else {}
    if "numbers" in stored:
        terms = array_terms_from(stored)
        return Whole(record, terms.workers, terms)
    if "worker_set" in stored:
        return Whole(record, worker_set_from(stored["worker_set"]).workers)
    return None


async def standing_of(store: TaskStore, whole: Whole) -> WholeState:
    """Return the present state of an array or a worker set."""
    # The workers are read before the results, because a worker stores its last results before it ends.
    rows = await store.states(whole.workers)
    states = {worker: rows[worker].state for worker in whole.workers if worker in rows}
    left = tuple(worker for worker, state in states.items() if not state.is_terminal)
    if whole.terms is None:
        return WholeState(_state_of_set(states), states, left)
    counts = await store.item_counts(whole.terms.id)
    state = state_of_array(whole.terms, counts.done, counts.failed, states.values())
    if left and state.is_terminal:
        state = ArrayState.RUNNING  # All items are done, but workers have yet to end.
    return WholeState(TaskState(state), states, left, counts.failed, whole.terms.total - counts.done)


def _state_of_set(workers: Mapping[TaskId, TaskState]) -> TaskState:
    """Return the state of a worker set. It is RUNNING if a worker has started, and PENDING if all that have
    not ended wait. A set that has ended has the state of its cancelled, failed or expired workers, in this
    order."""
    left = [state for state in workers.values() if not state.is_terminal]
    if not left:
        ends = (TaskState.CANCELLED, TaskState.FAILED, TaskState.EXPIRED)
        return next((end for end in ends if end in workers.values()), TaskState.SUCCEEDED)
    return TaskState.PENDING if set(left) == {TaskState.PENDING} else TaskState.RUNNING


async def at_its_end(records: TaskRecords, whole: Whole, seconds: float) -> WholeState:
    """Wait until all workers of the whole have ended, for at most `seconds`, and return its state. Raises
    Problem tenant-waits."""
    until = monotonic() + seconds
    standing = await standing_of(records.store, whole)
    for worker in standing.left:
        record = await records.store.record(worker)
        if record is not None:
            await records.at_its_end(record, until - monotonic())
    return await standing_of(records.store, whole) if standing.left else standing


async def view_of_whole(records: TaskRecords, whole: Whole, standing: WholeState | None = None) -> ShownTask:
    """Return the view of the first worker of a whole, with the state and the failure of the whole."""
    standing = await standing_of(records.store, whole) if standing is None else standing
    view = await records.view(await records.reread(whole.first))
    error = failure_of_whole(whole, standing) or view.error
    return replace(view, state=ShownState(standing.state), error=error)


async def worker_asked_for(
    records: TaskRecords, record: TaskRecord, worker: str | None, *, runs: bool = False
) -> TaskRecord:
    """Return the worker to which a request about a single process refers. This is the task `worker` if it is
    given, otherwise the only worker of the whole, or with `runs` the only worker that runs. A task that is
    not a whole is its own only worker.

    Raises Problem validation-failed if several workers remain, or if `worker` is no worker of the whole.
    """
    whole = await whole_of(records.store, record)
    if worker is not None:
        return await _named_worker(records, record, whole, worker)
    if whole is None:
        return record
    standing = await standing_of(records.store, whole)
    workers = standing.workers
    candidates = [worker for worker, state in workers.items() if not runs or state in HAS_PROCESS]
    if len(candidates) == 1:
        return await records.store.record(candidates[0]) or record
    if not candidates:
        return record if not standing.left else await records.store.record(standing.left[0]) or record
    id = whole.first.task.id
    of_all = f"{len(candidates)} of the {len(workers)} workers of {id} run"
    workers_text = (
        f"{of_all if runs else f'{id} has {len(candidates)} workers'}: {_listed(whole, candidates)}"
    )
    detail = f"{workers_text}; choose one of them, as in ?worker={candidates[0]} (--worker)"
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
    """Return a text that names the first of these workers, and the route that lists all of them."""
    shown = ", ".join(workers[:_MAX_LISTED])
    if len(workers) <= _MAX_LISTED:
        return shown
    route = "arrays" if whole.is_array else "worker-sets"
    return f"{shown} and {len(workers) - _MAX_LISTED} more (GET /{route}/{whole.first.task.id})"


def failure_of_whole(whole: Whole, standing: WholeState) -> Failure | None:
    """Return why an array has failed; None if it has not failed, and for a worker set."""
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
