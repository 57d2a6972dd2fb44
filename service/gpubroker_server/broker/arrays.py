"""The arrays whose workers report, as far as the leader has met them."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from gpubroker_server.core.domain.decisions import Decision, ItemPage
from gpubroker_server.core.domain.orders import ItemsReported, Report
from gpubroker_server.core.domain.submission import ARRAY_VARIABLE, array_terms_from
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.lifecycle.array_items import ArrayWork
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import BlobStore, BlobTooLarge, TaskStore


class Arrays:
    """Read from the store when a worker is first heard, and again whenever a commit has failed."""

    def __init__(self, store: TaskStore, world: World) -> None:
        self._store = store
        self._world = world
        self._works: dict[TaskId, ArrayWork] = {}
        self._array_of: dict[TaskId, TaskId | None] = {}
        self._drafts: dict[TaskId, ArrayWork] = {}

    async def drafts(self, reports: Iterable[Report]) -> Mapping[TaskId, ArrayWork]:
        """By worker, the arrays that these reports are about; to be changed. Raises StoreUnavailable."""
        workers = {report.task for report in reports if isinstance(report, ItemsReported)}
        found = {
            worker: await self._find(worker) for worker in sorted(workers) if worker in self._world.tasks
        }
        self._drafts = {work.terms.id: work.copy() for work in found.values() if work is not None}
        return {worker: self._drafts[work.terms.id] for worker, work in found.items() if work is not None}

    def begin_commit(self) -> None:
        """Until `committed`, what was decided may be so or not."""
        for array in self._drafts:
            self._works.pop(array, None)

    def committed(self) -> None:
        """All that was decided from the drafts is so. Arrays without work left are forgotten, and those whose
        workers have ended."""
        works = {**self._works, **self._drafts}
        self._works = {array: work for array, work in works.items() if work.left and self._is_at_work(work)}
        self._array_of = {worker: of for worker, of in self._array_of.items() if worker in self._world.tasks}
        self._drafts = {}

    def _is_at_work(self, work: ArrayWork) -> bool:
        return any(worker in self._world.tasks for worker in work.terms.workers)

    async def _find(self, worker: TaskId) -> ArrayWork | None:
        if worker not in self._array_of:
            specs = await self._store.specs([worker])
            named = specs[worker].env.get(ARRAY_VARIABLE) if worker in specs else None
            self._array_of[worker] = None if named is None else TaskId(json.loads(named)["id"])
        array = self._array_of[worker]
        if array is None:
            return None
        work = self._works.get(array)
        if work is None:
            text = await self._store.batch_answer(array)
            if not text:
                return None
            terms = array_terms_from(json.loads(text))
            done, counts = await self._store.items_done(array), await self._store.item_counts(array)
            work = self._works[array] = ArrayWork(terms, done, counts.last_page)
        return work if worker in work.terms.workers else None


async def with_pages_stored(decision: Decision, blobs: BlobStore, inline_bytes: int) -> Decision:
    """Large pages become objects. One that is too large for that stays in its row: each item is within the
    limit of results."""
    pages: list[ItemPage] = []
    for page in decision.items:
        digest = None
        if len(page.lines) > inline_bytes:
            with suppress(BlobTooLarge):
                digest = await blobs.put(page.lines, owner=page.array)
        pages.append(page if digest is None else replace(page, lines=b"", digest=digest))
    return replace(decision, items=tuple(pages))
