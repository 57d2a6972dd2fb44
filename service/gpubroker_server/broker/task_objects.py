"""Objects that runs open, and large results that become objects: the leader checks what their tenants have
and may have, and their bytes pass through it in parts."""

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
    OutputAnswer,
    OutputPart,
    PartAnswer,
    WantedAnswer,
)

log = structlog.get_logger("gpubroker.objects")

PART_BYTES: Final = 4 * 2**20
"""The bytes that are sent at once. The agent asks for the next part when it has this one, so that nothing
gathers on the way."""
AGAIN_SECONDS: Final = 1.0
MOST_TRIES: Final = 120
"""A run fails if its object cannot be read so often: meanwhile it holds its leases. A result waits without
end: to lose it would cost the whole run."""
OUTPUT_SECONDS: Final = 3600.0
"""Outputs whose node has sent no further part for so long are dropped; it begins again when it is back."""
EXTENDED_SHARE: Final = 0.1
"""Objects in use are extended whenever this share of the time has passed that objects are kept."""
_DIGEST: Final = re.compile("[0-9a-f]{64}")


@dataclass(eq=False)
class TaskObjects:
    """Answers questions about objects, and remembers nothing: each question says what its node has, and is
    asked again to the next leader."""

    world: World
    store: TaskStore
    blobs: BlobStore
    executor: Executor
    clock: Clock
    object_seconds: Seconds
    """An object is kept this long after its last use."""
    quota: Quota
    """The quota of each tenant."""
    object_bytes: int
    """The most bytes of one object."""

    def __post_init__(self) -> None:
        self._asked: asyncio.Queue[tuple[ObjectQuestion, int]] = asyncio.Queue()
        """The questions, each with the number of times it was tried in vain."""
        self._uploads: dict[str, tuple[str, ObjectPart | OutputPart]] = {}
        """The results and outputs that come here and are no objects yet: the tenant and the last part of
        each."""

    def hear(self, asked: Sequence[ObjectQuestion]) -> None:
        for question in asked:
            self._asked.put_nowait((question, 0))

    async def serve(self) -> None:
        """Answer questions, until cancelled. In turn: a large object does not keep the leader from others,
        which wait for one part of it."""
        while True:
            asked, tries = await self._asked.get()
            try:
                await self.answer(asked, tries)
            except StoreUnavailable as fault:
                if not tries:
                    message = "an object cannot be read or stored now; trying again"
                    log.warning(message, task=asked.task, fault=str(fault))
                # Others need not wait: one file may be unreadable while all else is well.
                next_try = asked, tries + 1
                asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._asked.put_nowait, next_try)

    async def keep(self) -> None:
        """Extend the objects in use until cancelled, so that they outlast the leader's absence."""
        while True:
            with suppress(StoreUnavailable):
                await self.extend()
            await asyncio.sleep(self.object_seconds * EXTENDED_SHARE)

    async def extend(self) -> None:
        """Extend the time of all objects in use. What a task, an array or a worker set names is in use until
        it is over: a run that starts again opens it. Raises StoreUnavailable."""
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
            self.executor.answer(OutputAnswer(asked.node, asked, *await self._keep_output(asked)))
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
        """Return the run; None if it is over."""
        task = self.world.tasks.get(asked.task)
        return task if task is not None and task.fence == asked.fence and task.is_active else None

    async def _discard_left(self) -> None:
        """Discard results that end with their runs before they are complete, and outputs of which no part has
        come for long."""
        for upload, (_, part) in list(self._uploads.items()):
            is_late = self.clock.now() - part.at > OUTPUT_SECONDS
            if is_late if isinstance(part, OutputPart) else self._run_of(part) is None:
                await self._discard(upload)

    async def _discard(self, upload: str) -> None:
        self._uploads.pop(upload, None)
        with suppress(StoreUnavailable):  # then a sweep removes it
            await self.blobs.discard(upload)

    async def _read(self, tenant: str, asked: ObjectWanted, tries: int) -> tuple[int, bytes, str]:
        """Return the object's size, what follows the first byte, and why the run does not get it."""
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
            if tries < MOST_TRIES:
                raise
            todo = "have the disk checked that holds the blobs, and submit the task again"
            return 0, b"", f"the bytes of object {kept.digest} cannot be read; {todo}"
        if not data:
            left = f"{asked.first_byte} of {kept.size_bytes} are left"
            return 0, b"", f"the bytes of object {kept.digest} are damaged: {left}; upload them again"
        return kept.size_bytes, data, ""

    async def _keep_output(self, part: OutputPart) -> tuple[int, bool]:
        """Keep a part of what a run has left. Return how many bytes are stored, and whether that is the end.
        Its task may have ended, or may run again."""
        record = await self.store.record(part.task)
        if record is None or part.fence > record.task.fence:
            return 0, True  # the task was pruned
        stored_bytes, why_not = 0, ""
        if part.object:
            stored_bytes, why_not = await self._keep(record.task.tenant, part)
            if stored_bytes < part.size_bytes and not why_not:
                return stored_bytes, False
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
        return stored_bytes, True

    async def _keep(self, tenant: str, part: ObjectPart | OutputPart) -> tuple[int, str]:
        """Keep a part of a result, or of outputs. Return how many bytes are stored, and why the whole cannot
        become an object."""
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
        """Return the bytes of the tenant's results and outputs on their way beside this one."""
        coming = (known for name, known in self._uploads.items() if name != upload)
        return sum(part.size_bytes for owner, part in coming if owner == tenant)

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
