"""The state of arrays whose workers report to this leader."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision, ItemPage
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.orders import ItemsReported, Report
from gpubroker_server.core.domain.submission import array_terms_from, state_of_array
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.lifecycle.array_items import ArrayWork
from gpubroker_server.core.world.dependencies import TaskEnd
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import BlobStore, BlobTooLarge, StoredState, TaskStore


class Arrays:
    """A cache of arrays. An array is read from the store when one of its workers first reports, and again
    after a commit has failed."""

    def __init__(self, store: TaskStore, world: World) -> None:
        self._store = store
        self._world = world
        self._works: dict[TaskId, ArrayWork] = {}
        self._drafts: dict[TaskId, ArrayWork] = {}

    async def drafts(self, reports: Iterable[Report]) -> Mapping[TaskId, ArrayWork]:
        """Return copies of the arrays that these reports are about, which the caller may change, and the
        arrays without work left of which some workers are still in the World. Raises StoreUnavailable."""
        tasks = (
            self._world.tasks.get(report.task) for report in reports if isinstance(report, ItemsReported)
        )
        holders = (task.holder for task in tasks if task is not None)
        arrays = {holder.array for holder in holders if isinstance(holder, WorkerSeat)}
        works = [await self._find(array) for array in sorted(arrays)]
        self._drafts = {work.terms.id: work.copy() for work in works if work is not None}
        over = {array: work for array, work in self._works.items() if work.left == 0}
        return {**over, **self._drafts}

    def begin_commit(self) -> None:
        """Forget the arrays that the drafts change. Whether the changes hold is unknown until `committed` is
        called; if it is not, the arrays are read from the store again."""
        for array in self._drafts:
            self._works.pop(array, None)

    def committed(self) -> None:
        """Keep the drafts, because their changes are committed now. Arrays whose workers have all ended are
        forgotten."""
        works = {**self._works, **self._drafts}
        self._works = {array: work for array, work in works.items() if self._is_at_work(work)}
        self._drafts = {}

    def _is_at_work(self, work: ArrayWork) -> bool:
        return any(worker in self._world.tasks for worker in work.terms.workers)

    async def _find(self, array: TaskId) -> ArrayWork | None:
        work = self._works.get(array)
        if work is None:
            text = await self._store.batch_answer(array)
            if not text:
                return None
            terms = array_terms_from(json.loads(text))
            done, counts = await self._store.items_done(array), await self._store.item_counts(array)
            work = self._works[array] = ArrayWork(terms, done, counts.last_page, counts.size_bytes)
        return work


async def ends_of(store: TaskStore, states: Mapping[TaskId, StoredState]) -> dict[TaskId, TaskEnd]:
    """Return the end, or else the present state, of each of these tasks. The id of an array stands for the
    whole array: it has ended when its last worker has, and has succeeded if all its items have."""
    ends = {task: TaskEnd(state.state, state.failed_by) for task, state in states.items()}
    for task, state in states.items():
        if state.array == task and state.state.is_terminal:
            ends[task] = await _end_of_array(store, task) or ends[task]
    return ends


async def _end_of_array(store: TaskStore, array: TaskId) -> TaskEnd | None:
    """Return the end or the present state of an array; None if its row is gone."""
    text = await store.batch_answer(array)
    if not text:
        return None
    terms = array_terms_from(json.loads(text))
    workers = await store.states(terms.workers)
    if not all(worker.state.is_terminal for worker in workers.values()):
        return TaskEnd(TaskState.RUNNING)
    counts = await store.item_counts(array)
    state = state_of_array(terms, counts.done, counts.failed, [worker.state for worker in workers.values()])
    return TaskEnd(
        TaskState(state), next((worker.failed_by for worker in workers.values() if worker.failed_by), None)
    )


async def with_pages_stored(
    decisions: Sequence[Decision], blobs: BlobStore, inline_bytes: int
) -> list[Decision]:
    """Store large pages of results as blobs, and return the decisions that name these. All pages are stored
    at once, because each write waits for the disk. A page that is too large for a blob stays in its row;
    that row is bounded, because each item is within the limit of results."""
    large = [page for decision in decisions for page in decision.items if len(page.lines) > inline_bytes]
    stored = dict(
        zip(map(id, large), await asyncio.gather(*(_put(blobs, page) for page in large)), strict=True)
    )
    return [
        replace(decision, items=tuple(stored.get(id(page), page) for page in decision.items))
        if decision.items
        else decision
        for decision in decisions
    ]


async def _put(blobs: BlobStore, page: ItemPage) -> ItemPage:
    try:
        return replace(page, lines=b"", digest=await blobs.put(page.lines, owner=page.array))
    except BlobTooLarge:
        return page
