"""Port to the rows of uploaded objects."""

from collections.abc import Sequence
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

    def has_room(self, counted: Counted, given: StoredObject) -> bool:
        """For one more object, beside `counted`."""
        fits = counted.size_bytes + given.counted_bytes <= self.most_bytes
        return fits and counted.objects < self.most_objects


class ObjectRows(Protocol):
    """By tenant and digest. The bytes are in the BlobStore before the row is written."""

    async def keep_object(self, given: StoredObject, quota: Quota) -> StoredObject | None:
        """The stored row: an existing one keeps its `created_at` and the later `expires_at`. None if the
        quota has no room; then nothing was written."""
        ...

    async def stored_object(self, tenant: str, digest: str) -> StoredObject | None:
        """Expired ones too, until they are pruned."""
        ...

    async def stored_objects(
        self, tenant: str, now: Instant, order: ObjectOrder, *, after: SortKey = (), limit: int
    ) -> Sequence[StoredObject]:
        """Not expired; `after`: the key of the last object of the page before."""
        ...

    async def counted_objects(self, tenant: str, now: Instant) -> Counted: ...

    async def extend_object(self, tenant: str, digest: str, until: Instant) -> None:
        """Expire no earlier than `until`, if it exists."""
        ...

    async def drop_object(self, tenant: str, digest: str) -> bool:
        """False if it does not exist."""
        ...
