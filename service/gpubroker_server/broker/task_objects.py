"""Objects that runs open, and results and outputs that become objects. The leader checks the quota of the
tenant, and the bytes pass through it in parts."""

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog
from msgspec.structs import replace

from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.ranks import node_of
from gpubroker_server.core.domain.stored_objects import Quota, StoredObject
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.executor import Executor
from gpubroker_server.ports.run_outputs import RunOutput
from gpubroker_server.ports.store import (
    BlobCorrupt,
    BlobMissing,
    BlobStore,
    Clock,
    StoreUnavailable,
    TaskStore,
)
from gpubroker_server.ports.task_objects import (
    ObjectPart,
    ObjectQuestion,
    ObjectWanted,
    OutputPart,
    PartAnswer,
    WantedAnswer,
)

log = structlog.get_logger("gpubroker.objects")

PART_BYTES: Final = 4 * 2**20
"""The bytes of one part. The agent asks for the next part only once it has this one, so that parts do not
queue up on the way."""
AGAIN_SECONDS: Final = 1.0
"""The time before a question is tried again after the store or the disk failed."""
MAX_TRIES: Final = 120
"""The number of retries after which a run fails because its object cannot be read; until then it holds its
leases. The storing of a result is retried without limit, because losing the result would cost the whole
run."""
OUTPUT_SECONDS: Final = 3600.0
"""Incomplete outputs are dropped if their node sends no further part for this time. The node begins again
when it is back."""
EXTENDED_SHARE: Final = 0.1
"""The time between two extensions of the objects in use, as a share of the time for which objects are
kept."""
_DIGEST: Final = re.compile("[0-9a-f]{64}")


@dataclass(eq=False)
class TaskObjects:
    """Answers questions about objects. Nothing needs to be stored about them: each question says which bytes
    its node has, and agents repeat their questions to the next leader."""

    world: World
    store: TaskStore
    blobs: BlobStore
    executor: Executor
    clock: Clock
    object_seconds: Seconds
    """The time for which an object is kept after its last use."""
    quota: Quota
    """The quota of each tenant."""
    object_bytes: int
    """The most bytes of one object."""

    def __post_init__(self) -> None:
        self._asked: asyncio.Queue[tuple[ObjectQuestion, int]] = asyncio.Queue()
        """The questions to answer, each with the number of tries that have failed."""
        self._uploads: dict[str, tuple[str, ObjectPart | OutputPart]] = {}
        """The results and outputs that have not arrived completely: the tenant and the last part of each."""

    def hear(self, asked: Sequence[ObjectQuestion]) -> None:
        for question in asked:
            self._asked.put_nowait((question, 0))

    async def serve(self) -> None:
        """Answer questions until cancelled, one part of an object at a time, so that no question waits for
        all of a large object."""
        while True:
            asked, tries = await self._asked.get()
            try:
                await self.answer(asked, tries)
            except StoreUnavailable as fault:
                if not tries:
                    message = "an object cannot be read or stored now; trying again"
                    log.warning(message, task=asked.task, fault=str(fault))
                # Other questions do not wait for the retry: perhaps only one file is unreadable.
                next_try = asked, tries + 1
                asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._asked.put_nowait, next_try)

    async def keep(self) -> None:
        """Extend the objects in use again and again until cancelled, so that they do not expire while no
        process leads."""
        while True:
            with suppress(StoreUnavailable):
                await self.extend()
            await asyncio.sleep(self.object_seconds * EXTENDED_SHARE)

    async def extend(self) -> None:
        """Extend the time of all objects in use. An object is in use while a task, an array or a worker set
        that names it is not over, because a run that starts again opens the object again. Raises
        StoreUnavailable."""
        until = Instant(self.clock.now() + self.object_seconds)
        used = set(await self.store.objects_of_open_tasks())
        formed = {workers.id: workers.tenant for workers in self.world.worker_sets.values()}
        arrays = {
            task.holder.array: task.tenant
            for task in self.world.tasks.values()
            if isinstance(task.holder, WorkerSeat)
        }
        for id, tenant in {**formed, **arrays}.items():
            answer = json.loads(await self.store.batch_answer(id) or "{}")
            used.update((tenant, named) for named in answer.get("objects", ()))
        for tenant, named in sorted(used):
            await self.store.extend_object(tenant, named, until)

    async def answer(self, asked: ObjectQuestion, tries: int = 0) -> None:
        """Answer a run's question about an object. Raises StoreUnavailable."""
        await self._discard_left()
        if isinstance(asked, OutputPart):
            self.executor.answer(PartAnswer(asked.node, asked, *await self._keep_output(asked)))
            return
        task = self._run_of(asked)
        if task is None:
            return
        node = node_of(task, asked.rank)
        match asked:
            case ObjectWanted():
                read = await self._read(task.tenant, asked, tries)
                self.executor.answer(WantedAnswer(node, asked, *read))
            case ObjectPart():
                kept = await self._keep(task.tenant, asked)
                self.executor.answer(PartAnswer(node, asked, *kept))

    def _run_of(self, asked: ObjectQuestion) -> Task | None:
        """Return the task whose run asks; None if that run is over."""
        task = self.world.tasks.get(asked.task)
        return task if task is not None and task.fence == asked.fence and task.is_active else None

    async def _discard_left(self) -> None:
        """Discard incomplete results whose runs are over, and incomplete outputs of which no part has come
        for OUTPUT_SECONDS."""
        for upload, (_, part) in list(self._uploads.items()):
            is_late = self.clock.now() - part.at > OUTPUT_SECONDS
            if is_late if isinstance(part, OutputPart) else self._run_of(part) is None:
                await self._discard(upload)

    async def _discard(self, upload: str) -> None:
        self._uploads.pop(upload, None)
        with suppress(StoreUnavailable):  # a sweep removes it later
            await self.blobs.discard(upload)

    async def _read(self, tenant: str, asked: ObjectWanted, tries: int) -> tuple[int, bytes, str]:
        """Return the object's size, a part of its bytes from `first_byte` on, and the reason if the run
        cannot get them."""
        kept = await self._find(tenant, asked.object)
        if kept is None:
            return 0, b"", self._missing(tenant, asked.object)
        if asked.first_byte >= kept.size_bytes:
            await self._note_use(kept)
            return kept.size_bytes, b"", ""
        try:
            data = await self.blobs.read(kept.digest, asked.first_byte, PART_BYTES)
        except BlobMissing:
            return 0, b"", f"the bytes of object {kept.digest} are missing; upload them again"
        except StoreUnavailable:
            if tries < MAX_TRIES:
                raise
            todo = "have the disk checked that holds the blobs, and submit the task again"
            return 0, b"", f"the bytes of object {kept.digest} cannot be read; {todo}"
        if not data:
            left = f"{asked.first_byte} of {kept.size_bytes} are left"
            return 0, b"", f"the bytes of object {kept.digest} are damaged: {left}; upload them again"
        return kept.size_bytes, data, ""

    async def _keep_output(self, part: OutputPart) -> tuple[int, str]:
        """Store a part of the outputs of a run, and record the outcome with the last part. Return the number
        of stored bytes, and the reason if the outputs cannot become an object. The task may have ended by
        now, or may be running again."""
        record = await self.store.record(part.task)
        if record is None or part.fence > record.task.fence:
            return 0, "their task was pruned"
        stored_bytes, why_not = 0, ""
        if part.object:
            stored_bytes, why_not = await self._keep(record.task.tenant, part)
            if stored_bytes < part.size_bytes and not why_not:
                return stored_bytes, ""
        message = "; ".join(
            filter(None, [why_not and f"they cannot become an object: {why_not}", part.message])
        )
        is_kept = bool(part.object) and not why_not
        await self.store.keep_output(
            RunOutput(
                part.task, part.fence, part.rank, part.at, part.files if is_kept else 0,
                part.object if is_kept else None, part.size_bytes if is_kept else 0, message,
            )
        )  # fmt: skip
        return stored_bytes, why_not

    async def _keep(self, tenant: str, part: ObjectPart | OutputPart) -> tuple[int, str]:
        """Store a part of a result or of outputs. Return the number of stored bytes, and the reason if the
        whole cannot become an object."""
        # User code runs where this was written, and may have forged it.
        if not _DIGEST.fullmatch(part.object) or part.first_byte + len(part.data) > part.size_bytes:
            return 0, "its process wrote a part of a result that is none"
        if await self._find(tenant, part.object) is not None:
            return part.size_bytes, ""
        now = self.clock.now()
        expires_at = Instant(now + self.object_seconds)
        given = StoredObject(tenant, part.object, part.size_bytes, now, expires_at)
        if part.size_bytes > self.object_bytes:
            return 0, f"an object may have {self.object_bytes} bytes (limits.object_bytes)"
        upload = f"{part.task}-{part.fence}-{part.rank}"
        if isinstance(part, OutputPart):
            upload += "-outputs"
        counted = await self.store.counted_objects(tenant, now)
        coming_bytes = self._coming_bytes(tenant, upload)
        if not self.quota.has_room(counted, given, coming_bytes):
            await self._discard(upload)
            return 0, self.quota.why_full(counted, given, coming_bytes)
        self._uploads[upload] = tenant, replace(part, data=b"")
        stored_bytes = await self.blobs.append(upload, part.first_byte, part.data)
        if stored_bytes < part.size_bytes:
            return stored_bytes, ""
        try:
            await self.blobs.finish(upload, part.object)
        except (BlobMissing, BlobCorrupt) as fault:
            await self._discard(upload)
            return 0, f"its bytes did not arrive as they were: {fault}"
        del self._uploads[upload]
        if await self.store.keep_object(given, self.quota) is None:
            return 0, self.quota.why_full(await self.store.counted_objects(tenant, now), given)
        return part.size_bytes, ""

    def _coming_bytes(self, tenant: str, upload: str) -> int:
        """Return the bytes of the tenant's other results and outputs that have not arrived completely."""
        others = (state for name, state in self._uploads.items() if name != upload)
        return sum(part.size_bytes for owner, part in others if owner == tenant)

    async def _find(self, tenant: str, object_id: str) -> StoredObject | None:
        return await self.store.find_object(tenant, object_id, self.clock.now())

    async def _note_use(self, kept: StoredObject) -> None:
        with suppress(StoreUnavailable):
            await self.store.note_use(kept, self.clock.now(), self.object_seconds)

    def _missing(self, tenant: str, object_id: str) -> str:
        return (
            f'tenant "{tenant}" has no object "{object_id}" any more: it was deleted, or not used for '
            f"{self.object_seconds:g} seconds; upload it again (POST /objects), and submit the task again"
        )
