"""Uploaded objects: the uses that are stored, and the number of objects that a tenant may have."""

from typing import Final, NamedTuple

from msgspec import Struct

from gpubroker_server.core.domain.units import Instant, Seconds

LEAST_BYTES: Final = 4096
"""The least that an object counts in a quota, as on a disk."""


_IDLE_SHARE: Final = 0.1
"""A use is stored only once this share of the retention time has passed: each is a write."""


class StoredObject(Struct, frozen=True):
    tenant: str
    digest: str
    size_bytes: int
    created_at: Instant
    expires_at: Instant
    """The time from which the object does not exist for clients."""

    @property
    def counted_bytes(self) -> int:
        return max(self.size_bytes, LEAST_BYTES)

    def end_after_use(self, now: Instant, object_seconds: Seconds) -> Instant | None:
        """Return until when a use keeps the object, if that has to be stored."""
        expires_at = Instant(now + object_seconds)
        return expires_at if expires_at - self.expires_at > _IDLE_SHARE * object_seconds else None


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
        """Return True if there is room for one more object, beside `counted` and uploads under way."""
        fits = counted.size_bytes + coming_bytes + given.counted_bytes <= self.most_bytes
        return fits and counted.objects < self.most_objects

    def why_full(self, counted: Counted, given: StoredObject, coming_bytes: int = 0) -> str:
        """Return the sentence about what is found, and what to do."""
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
