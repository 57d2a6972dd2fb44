"""Stored objects of a tenant: how long they are kept, how many there may be, and their bytes."""

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.limits import RequestLimits
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.ports.objects import Counted, Quota, StoredObject
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing, BlobStore, Clock, TaskStore

_ID: Final = re.compile("[0-9a-f]{64}")
_INLINE_BYTES: Final = 64 * 1024
"""Larger objects are hashed on a thread."""
_IDLE_SHARE: Final = 0.1
"""A use is stored only once this share of the retention time has passed: each is a write."""


def is_object_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class ObjectStorage:
    store: TaskStore
    blobs: BlobStore
    clock: Clock
    limits: RequestLimits

    async def put(self, data: bytes, tenant: str) -> StoredObject:
        """Durable when this returns. Raises Problem objects-full."""
        digest, now = await _digest_of(data), self.clock.now()
        given = StoredObject(tenant, digest, len(data), now, self._expires_at())
        quota = Quota(self.limits.tenant_object_bytes, self.limits.tenant_objects)
        # Checked before the bytes are on disk, so that a refused upload does not fill it.
        known = await self.store.stored_object(tenant, digest)
        counted = await self.store.counted_objects(tenant, now)
        if known is None and not quota.has_room(counted, given):
            raise self._full(given, counted)
        stored_as = await self.blobs.put(data, owner=tenant)
        assert stored_as == digest, "objects are named by their sha256"
        kept = await self.store.keep_object(given, quota)
        if kept is None:
            raise self._full(given, await self.store.counted_objects(tenant, now))
        return kept

    async def find(self, tenant: str, object_id: str) -> StoredObject:
        """Raises Problem not-found, also for an object of another tenant."""
        kept = await self._kept(tenant, object_id)
        if kept is None:
            raise Problem("not-found", self._unknown(object_id))
        return kept

    async def read(self, kept: StoredObject) -> bytes:
        """Counts as a use. Raises Problem result-damaged."""
        try:
            data = await self.blobs.get(kept.digest)
        except (BlobMissing, BlobCorrupt):
            raise Problem(
                "result-damaged",
                f"the bytes of object {kept.digest} are missing or damaged; upload them again, and check the "
                "disk that holds the blobs",
            ) from None
        expires_at = self._expires_at()
        if expires_at - kept.expires_at > _IDLE_SHARE * self.limits.object_seconds:
            await self.store.extend_object(kept.tenant, kept.digest, expires_at)
        return data

    async def values_of(self, tenant: str, named: Mapping[int, str]) -> Mapping[str, bytes]:
        """The bytes of the objects that an inference names, by id. `named`: index of the input -> id.

        Raises one Problem with all faults.
        """
        found = {object_id: await self._kept(tenant, object_id) for object_id in sorted({*named.values()})}
        faults = [
            Fault(pointer=f"/inputs/{at}/object", detail=self._unknown(object_id), code="unknown-object")
            for at, object_id in named.items()
            if found[object_id] is None
        ]
        if faults:
            raise invalid(*faults)
        kept = {object_id: row for object_id, row in found.items() if row is not None}
        total, most = sum(kept[it].size_bytes for it in named.values()), self.limits.object_bytes
        if total > most:
            detail = (
                f"the objects of one inference may have {most} bytes, and these have {total}; split the "
                "inference, or raise limits.object_bytes"
            )
            raise invalid(Fault(pointer="/inputs", detail=detail, code="objects-too-large"))
        return {object_id: await self.read(row) for object_id, row in kept.items()}

    async def _kept(self, tenant: str, object_id: str) -> StoredObject | None:
        if not is_object_id(object_id):
            return None  # the database would refuse a NUL
        row = await self.store.stored_object(tenant, object_id)
        return row if row is not None and row.expires_at > self.clock.now() else None

    def _expires_at(self) -> Instant:
        return Instant(self.clock.now() + self.limits.object_seconds)

    def _unknown(self, object_id: str) -> str:
        return (
            f'you have no object "{object_id[:100]}"; objects are kept for {self.limits.object_seconds:g} '
            "seconds after their last use: upload it with POST /objects"
        )

    def _full(self, given: StoredObject, counted: Counted) -> Problem:
        limits = self.limits
        if counted.objects < limits.tenant_objects:
            setting = "limits.tenant_object_bytes"
            found = (
                f"has objects of {counted.size_bytes} bytes, and may have {limits.tenant_object_bytes}; this "
                f"one counts {given.counted_bytes}"
            )
        else:
            setting = "limits.tenant_objects"
            found = f"has {counted.objects} objects, and may have {limits.tenant_objects}"
        return Problem(
            "objects-full",
            f'tenant "{given.tenant}" {found}. List them (GET /objects, or gpubroker objects), delete some '
            "(DELETE /objects/ID, or gpubroker objects delete ID), wait until some have not been used for "
            f"{limits.object_seconds:g} seconds, or raise {setting}",
        )


async def _digest_of(data: bytes) -> str:
    if len(data) <= _INLINE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
