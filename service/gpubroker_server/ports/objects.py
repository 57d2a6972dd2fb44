"""Port to the rows of uploaded objects."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from gpubroker_server.core.domain.units import Instant, Seconds

LEAST_BYTES: Final = 4096
"""The least that an object counts in a quota, as on a disk."""


_IDLE_SHARE: Final = 0.1
"""A use is stored only once this share of the retention time has passed: each is a write."""
SortKey = tuple[float | str, ...]
"""A row's place in a sorted list: numbers, and its id."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    tenant: str
    digest: str
    size_bytes: int
    created_at: Instant
    expires_at: Instant
    """From then on it does not exist for clients."""

    @property
    def counted_bytes(self) -> int:
        return max(self.size_bytes, LEAST_BYTES)

    def end_after_use(self, now: Instant, object_seconds: Seconds) -> Instant | None:
        """Until when a use keeps it, if that has to be stored."""
        expires_at = Instant(now + object_seconds)
        return expires_at if expires_at - self.expires_at > _IDLE_SHARE * object_seconds else None


class ObjectSort(StrEnum):
    """What lists of objects are sorted by; equal ones by digest. The values are fields of StoredObject."""

    ID = "digest"
    CREATED = "created_at"
    SIZE = "size_bytes"

    @property
    def fields(self) -> Sequence[str]:
        return ("digest",) if self is ObjectSort.ID else (self.value, "digest")

    def key(self, stored: StoredObject) -> SortKey:
        return tuple(getattr(stored, name) for name in self.fields)


class ObjectOrder(NamedTuple):
    sort: ObjectSort = ObjectSort.ID
    descending: bool = False


class Counted(NamedTuple):
    """The objects of a tenant that have not expired."""

    size_bytes: int
    objects: int


class Quota(NamedTuple):
    """The most that a tenant may have."""

    most_bytes: int
    most_objects: int
    """Each upload counts the tenant's objects while it blocks other writes."""

    def has_room(self, counted: Counted, given: StoredObject, coming_bytes: int = 0) -> bool:
        """For one more object, beside `counted` and uploads under way."""
        fits = counted.size_bytes + coming_bytes + given.counted_bytes <= self.most_bytes
        return fits and counted.objects < self.most_objects

    def why_full(self, counted: Counted, given: StoredObject, coming_bytes: int = 0) -> str:
        """What is found, and what to do."""
        if counted.objects < self.most_objects:
            setting = "limits.tenant_object_bytes"
            coming = f", and uploads of {coming_bytes} bytes under way" if coming_bytes else ""
            found = (
                f"has objects of {counted.size_bytes} bytes{coming}, and may have {self.most_bytes}; this "
                f"one counts {given.counted_bytes}"
            )
        else:
            setting = "limits.tenant_objects"
            found = f"has {counted.objects} objects, and may have {self.most_objects}"
        return (
            f'tenant "{given.tenant}" {found}. List them (GET /objects, or gpubroker objects), delete some '
            "(DELETE /objects/ID, or gpubroker objects delete ID), wait until some expire, or raise "
            f"{setting}"
        )


class ObjectRows(Protocol):
    """By tenant and digest. The bytes are in the BlobStore before the row is written."""

    async def keep_object(self, given: StoredObject, quota: Quota) -> StoredObject | None:
        """The stored row: an existing one keeps its `created_at` and the later `expires_at`. None if the
        quota has no room; then nothing was written."""

    async def stored_object(self, tenant: str, digest: str) -> StoredObject | None:
        """Expired ones too, until they are pruned."""

    async def stored_objects(
        self, tenant: str, now: Instant, order: ObjectOrder, *, after: SortKey = (), limit: int
    ) -> Sequence[StoredObject]:
        """Not expired; `after`: the key of the last object of the page before."""

    async def counted_objects(self, tenant: str, now: Instant) -> Counted: ...

    async def objects_of_open_tasks(self) -> Collection[tuple[str, str]]:
        """(tenant, digest) of what tasks that have not ended name; the items of arrays and the roles of
        worker sets name more."""

    async def extend_object(self, tenant: str, digest: str, until: Instant) -> None:
        """Expire no earlier than `until`, if it exists."""

    async def drop_object(self, tenant: str, digest: str) -> bool:
        """False if it does not exist."""


async def find_object(rows: ObjectRows, tenant: str, digest: str, now: Instant) -> StoredObject | None:
    """None if the tenant does not have it, or has it no longer."""
    kept = await rows.stored_object(tenant, digest)
    return kept if kept is not None and kept.expires_at > now else None


async def note_use(rows: ObjectRows, kept: StoredObject, now: Instant, object_seconds: Seconds) -> None:
    """It is kept `object_seconds` from `now` on."""
    expires_at = kept.end_after_use(now, object_seconds)
    if expires_at is not None:
        await rows.extend_object(kept.tenant, kept.digest, expires_at)
