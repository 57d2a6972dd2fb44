"""What tenants have uploaded: rows that name objects, each for a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from gpubroker_server.core.domain.units import Instant

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


class Counted(NamedTuple):
    """What a tenant has, but for what its time is over."""

    size_bytes: int
    objects: int


class Quota(NamedTuple):
    """What a tenant may have."""

    most_bytes: int
    most_objects: int
    """Each upload counts those that are there, while nobody else writes."""

    def has_room(self, counted: Counted, given: StoredObject) -> bool:
        """Beside these, for one that is none of them."""
        fits = counted.size_bytes + given.counted_bytes <= self.most_bytes
        return fits and counted.objects < self.most_objects


class ObjectRows(Protocol):
    """Of a tenant's objects; each is named by its digest. Bytes are in the BlobStore before their row is."""

    async def keep_object(self, given: StoredObject, quota: Quota) -> StoredObject | None:
        """As it is from now on: one that is there already keeps its age, and the later end counts. None, and
        nothing is written, if the quota has no room for it beside the tenant's others."""
        ...

    async def stored_object(self, tenant: str, digest: str) -> StoredObject | None:
        """Also one whose time is over, until it is pruned."""
        ...

    async def stored_objects(
        self, tenant: str, now: Instant, *, after: str = "", limit: int
    ) -> Sequence[StoredObject]:
        """Those of a tenant whose time is not over, by digest, from the one behind `after` on."""
        ...

    async def counted_objects(self, tenant: str, now: Instant) -> Counted: ...

    async def extend_object(self, tenant: str, digest: str, until: Instant) -> None:
        """Keep it so long, if it is there and would go earlier."""
        ...

    async def drop_object(self, tenant: str, digest: str) -> bool:
        """False if it was not there."""
        ...
