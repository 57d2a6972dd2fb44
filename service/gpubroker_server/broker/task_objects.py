"""Objects that runs open, and large results that become objects: the leader checks what their tenants have
and may have, and their bytes pass through it in parts."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import structlog

from gpubroker_server.core.domain.ranks import node_of
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.executor import Executor
from gpubroker_server.ports.objects import ObjectRows, Quota, StoredObject
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing, BlobStore, Clock, StoreUnavailable
from gpubroker_server.ports.task_objects import (
    ObjectPart,
    ObjectQuestion,
    ObjectWanted,
    PartAnswer,
    WantedAnswer,
)

log = structlog.get_logger("gpubroker.objects")

PART_BYTES: Final = 4 * 2**20
"""Sent at once. The agent asks for the next part when it has this one, so that nothing gathers on the way."""
AGAIN_SECONDS: Final = 1.0
_DIGEST: Final = re.compile("[0-9a-f]{64}")


class TaskObjects:
    """Remembers nothing: each question says what its node has, and is asked again to the next leader."""

    def __init__(
        self,
        world: World,
        store: ObjectRows,
        blobs: BlobStore,
        executor: Executor,
        clock: Clock,
        object_seconds: Seconds,
        quota: Quota,
        object_bytes: int,
    ) -> None:
        """`object_seconds`: an object is kept this long after its last use. `quota`: of each tenant.
        `object_bytes`: of the largest object."""
        self._world = world
        self._store = store
        self._blobs = blobs
        self._executor = executor
        self._clock = clock
        self._object_seconds = object_seconds
        self._quota = quota
        self._object_bytes = object_bytes
        self._asked: asyncio.Queue[ObjectQuestion] = asyncio.Queue()

    def hear(self, asked: Sequence[ObjectQuestion]) -> None:
        for one in asked:
            self._asked.put_nowait(one)

    async def serve(self) -> None:
        """Answer questions, until cancelled. In turn: a large object does not keep the leader from others,
        which wait for one part of it."""
        while True:
            asked = await self._asked.get()
            try:
                await self.answer(asked)
            except StoreUnavailable as fault:
                log.debug("an object cannot be read now; trying again", task=asked.task, fault=str(fault))
                self._asked.put_nowait(asked)
                await asyncio.sleep(AGAIN_SECONDS)

    async def answer(self, asked: ObjectQuestion) -> None:
        """Raises StoreUnavailable."""
        task = self._world.tasks.get(asked.task)
        if task is None or task.fence != asked.fence or not task.is_active:
            return  # it is over
        node = node_of(task, asked.rank)
        match asked:
            case ObjectWanted():
                read = await self._read(task.tenant, asked)
                self._executor.answer(WantedAnswer(node, asked, *read))
            case ObjectPart():
                kept = await self._keep(task.tenant, asked)
                self._executor.answer(PartAnswer(node, asked, *kept))

    async def _read(self, tenant: str, asked: ObjectWanted) -> tuple[int, bytes, str]:
        """Its size, what follows the first byte, and why the run does not get it."""
        kept = await self._find(tenant, asked.object)
        if kept is None:
            return 0, b"", self._missing(tenant, asked.object)
        if asked.first_byte >= kept.size_bytes:
            await self._note_use(kept)
            return kept.size_bytes, b"", ""
        try:
            data = await self._blobs.read(kept.digest, asked.first_byte, PART_BYTES)
        except BlobMissing:
            return 0, b"", f"the bytes of object {kept.digest} are missing; upload them again"
        return kept.size_bytes, data, ""

    async def _keep(self, tenant: str, part: ObjectPart) -> tuple[int, str]:
        """How many bytes are stored, and why it cannot become an object."""
        # User code runs where this was written, and may have forged it.
        if not _DIGEST.fullmatch(part.object) or part.first_byte + len(part.data) > part.size_bytes:
            return 0, "its process wrote a part of a result that is none"
        if await self._find(tenant, part.object) is not None:
            return part.size_bytes, ""
        now = self._clock.now()
        expires_at = Instant(now + self._object_seconds)
        given = StoredObject(tenant, part.object, part.size_bytes, now, expires_at)
        if part.size_bytes > self._object_bytes:
            return 0, f"an object may have {self._object_bytes} bytes (limits.object_bytes)"
        if not self._quota.has_room(await self._store.counted_objects(tenant, now), given):
            return 0, _full(tenant)
        upload = f"{part.task}-{part.fence}-{part.rank}"
        stored_bytes = await self._blobs.append(upload, part.first_byte, part.data)
        if stored_bytes < part.size_bytes:
            return stored_bytes, ""
        try:
            await self._blobs.finish(upload, part.object)
        except (BlobMissing, BlobCorrupt) as fault:
            return 0, f"its bytes did not arrive as they were: {fault}"
        if await self._store.keep_object(given, self._quota) is None:
            return 0, _full(tenant)
        return part.size_bytes, ""

    async def _find(self, tenant: str, object_id: str) -> StoredObject | None:
        kept = await self._store.stored_object(tenant, object_id)
        return kept if kept is not None and kept.expires_at > self._clock.now() else None

    async def _note_use(self, kept: StoredObject) -> None:
        expires_at = kept.end_after_use(self._clock.now(), self._object_seconds)
        if expires_at is not None:
            with suppress(StoreUnavailable):
                await self._store.extend_object(kept.tenant, kept.digest, expires_at)

    def _missing(self, tenant: str, object_id: str) -> str:
        return (
            f'tenant "{tenant}" has no object "{object_id}" any more: it was deleted, or not used for '
            f"{self._object_seconds:g} seconds; upload it again (POST /objects), and submit the task again"
        )


def _full(tenant: str) -> str:
    return (
        f'tenant "{tenant}" has no room for more objects; delete some (gpubroker objects), or raise '
        "limits.tenant_object_bytes or limits.tenant_objects"
    )
