"""Uploaded objects, and how many bytes of them a tenant has."""

from typing import Annotated

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time


class StoredObject(Answered, frozen=True):
    """Bytes that are stored once and named by their digest."""

    id: Annotated[str, Meta(description="The sha256 of its bytes, in hexadecimal.")]
    size_bytes: int
    created_at: Time
    expires_at: Annotated[Time, Meta(description="The time when it is deleted. Each use moves it on.")]


class ObjectUsage(Answered, frozen=True):
    """The total bytes of a tenant's objects, and their limit."""

    counted_bytes: Annotated[
        int | None,
        Meta(
            description="The bytes of all the tenant's objects, each at least 4096. Only on the first page, "
            "null on others."
        ),
    ]
    most_bytes: Annotated[
        int, Meta(description="The most that `counted_bytes` may be (`limits.tenant_object_bytes`).")
    ]


class ObjectPage(ObjectUsage, frozen=True):
    """A part of the list of objects, and the cursor of the next part, which is null after the last."""

    items: tuple[StoredObject, ...]
    next_cursor: str | None
    has_more: bool
