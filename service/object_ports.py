"""What tenants have uploaded: rows that name objects, each for a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from service.core.units import Instant

LEAST_BYTES: Final = 4096
"""Of a quota each object takes so much at least, as it does of a disk."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    tenant: str
    digest: str
    size_bytes: int
    created_at: Instant
    expires_at: Instant
    """From then on it is as if it were not there."""

    @property
    def counted_bytes(self) -> int:
        return max(self.size_bytes, LEAST_BYTES)


class ObjectRows(Protocol):
    """Of a tenant's objects; each is named by its digest. Bytes are in the BlobStore before their row is."""

    async def keep_object(self, given: StoredObject, most_bytes: int) -> StoredObject | None:
        """As it is from now on: one that is there already keeps its age, and the later end counts. None, and
        nothing is written, if the tenant's would count more than `most_bytes` with it."""
        ...

    async def stored_object(self, tenant: str, digest: str) -> StoredObject | None:
        """Also one whose time is over, until it is pruned."""
        ...

    async def stored_objects(
        self, tenant: str, now: Instant, *, after: str = "", limit: int
    ) -> Sequence[StoredObject]:
        """Those of a tenant whose time is not over, by digest, from the one behind `after` on."""
        ...

    async def counted_bytes(self, tenant: str, now: Instant) -> int:
        """Of all that the tenant has, but for those whose time is over."""
        ...

    async def extend_object(self, tenant: str, digest: str, until: Instant) -> None:
        """Keep it so long, if it is there and would go earlier."""
        ...

    async def drop_object(self, tenant: str, digest: str) -> bool:
        """False if it was not there."""
        ...
