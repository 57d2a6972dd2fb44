"""Uploaded objects: the uses that are stored, and the number of objects that a tenant may have."""

from typing import Final, NamedTuple

from msgspec import Struct

from gpubroker_server.core.domain.units import Instant, Seconds

LEAST_BYTES: Final = 4096
"""The least number of bytes that an object counts in a quota. It is about what the smallest file takes on a
disk."""


_IDLE_SHARE: Final = 0.1
"""The share of the retention time that must have passed before a use is stored again. Storing each use would
cost a write each time."""


class StoredObject(Struct, frozen=True):
    tenant: str
    digest: str
    size_bytes: int
    created_at: Instant
    expires_at: Instant
    """The time from which on clients no longer find the object."""

    @property
    def counted_bytes(self) -> int:
        return max(self.size_bytes, LEAST_BYTES)

    def end_after_use(self, now: Instant, object_seconds: Seconds) -> Instant | None:
        """Return the new expiry of the object after a use now; None if the difference is too small to be
        stored."""
        expires_at = Instant(now + object_seconds)
        return expires_at if expires_at - self.expires_at > _IDLE_SHARE * object_seconds else None


class Counted(NamedTuple):
    """The number and size of a tenant's objects that have not expired."""

    size_bytes: int
    objects: int


class Quota(NamedTuple):
    """The most objects that a tenant may have."""

    most_bytes: int
    most_objects: int
    """The most objects in number. The limit keeps uploads short: each upload counts the tenant's objects
    while it blocks other writes."""

    def has_room(self, counted: Counted, upload: StoredObject, coming_bytes: int = 0) -> bool:
        """Return True if there is room for one more object, beside `counted` and `coming_bytes` of uploads
        under way."""
        fits = counted.size_bytes + coming_bytes + upload.counted_bytes <= self.most_bytes
        return fits and counted.objects < self.most_objects

    def why_full(self, counted: Counted, upload: StoredObject, coming_bytes: int = 0) -> str:
        """Return the text that says which quota is used up and what the client can do."""
        if counted.objects < self.most_objects:
            setting = "limits.tenant_object_bytes"
            coming = f", and uploads of {coming_bytes} bytes under way" if coming_bytes else ""
            usage = (
                f"has objects of {counted.size_bytes} bytes{coming}, and may have {self.most_bytes}; this "
                f"one counts {upload.counted_bytes}"
            )
        else:
            setting = "limits.tenant_objects"
            usage = f"has {counted.objects} objects, and may have {self.most_objects}"
        return (
            f'tenant "{upload.tenant}" {usage}. List them (GET /objects, or gpubroker objects), delete some '
            "(DELETE /objects/ID, or gpubroker objects delete ID), wait until some expire, or raise "
            f"{setting}"
        )
