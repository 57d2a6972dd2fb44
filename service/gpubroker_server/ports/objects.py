"""Port to the rows of uploaded objects."""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from gpubroker_server.core.domain.stored_objects import Counted, Quota, StoredObject
from gpubroker_server.core.domain.units import Instant, Seconds

SortKey = tuple[float | str, ...]
"""The place of a row in a sorted list: the values of the sort keys, of which the last is the row's id."""


class ObjectSort(StrEnum):
    """The sort keys of lists of objects; equal objects are sorted by digest. The values are fields of
    StoredObject."""

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


class ObjectRows(Protocol):
    """The rows of objects, by tenant and digest. The bytes are in the BlobStore before the row is written."""

    async def keep_object(self, given: StoredObject, quota: Quota) -> StoredObject | None:
        """Store the row, and return it as stored: an existing row keeps its `created_at` and the later
        `expires_at`. Returns None, and writes nothing, if the quota has no room."""

    async def stored_object(self, tenant: str, digest: str) -> StoredObject | None:
        """Return the object. An expired object is returned as well, until it is pruned."""

    async def find_object(self, tenant: str, digest: str, now: Instant) -> StoredObject | None:
        """Return the object; None if the tenant does not have it, or it has expired."""

    async def note_use(self, kept: StoredObject, now: Instant, object_seconds: Seconds) -> None:
        """Keep the object for `object_seconds` from `now` on. The row is written only if enough time has
        passed since the last use."""

    async def stored_objects(
        self, tenant: str, now: Instant, order: ObjectOrder, *, after: SortKey = (), limit: int
    ) -> Sequence[StoredObject]:
        """Return objects that have not expired. `after` is the key of the last object of the previous
        page."""

    async def counted_objects(self, tenant: str, now: Instant) -> Counted: ...

    async def objects_of_open_tasks(self) -> Collection[tuple[str, str]]:
        """Return (tenant, digest) of each object that a task that has not ended names. Items of arrays and
        roles of worker sets may name more objects."""

    async def extend_object(self, tenant: str, digest: str, until: Instant) -> None:
        """Let the object expire no earlier than `until`, if it exists."""

    async def drop_object(self, tenant: str, digest: str) -> bool:
        """Remove the object. Returns False if it does not exist."""
