"""Port to the rows of uploaded objects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from gpubroker_server.core.domain.units import Instant

LEAST_BYTES: Final = 4096
"""The least that an object counts in a quota, as on a disk."""


IDLE_SHARE: Final = 0.1
"""A use is stored only once this share of the retention time has passed: each is a write."""


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
        self, tenant: str, now: Instant, *, after: str = "", limit: int
    ) -> Sequence[StoredObject]:
        """Not expired, in order of digests, after `after`."""
        ...

    async def counted_objects(self, tenant: str, now: Instant) -> Counted: ...

    async def extend_object(self, tenant: str, digest: str, until: Instant) -> None:
        """Expire no earlier than `until`, if it exists."""
        ...

    async def drop_object(self, tenant: str, digest: str) -> bool:
        """False if it does not exist."""
        ...
