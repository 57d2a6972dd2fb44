"""What tenants upload: how long it is kept, how much of it, and what it gives to an inference."""

import asyncio
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.http.faults import refused
from gpubroker_server.gateway.http.pages import filter_hash, read_cursor, write_cursor
from gpubroker_server.gateway.http.problems import Fault, Problem
from gpubroker_server.gateway.http.queries import PageQuery
from gpubroker_server.gateway.http.routing import Call
from gpubroker_server.gateway.status.task_view import rfc3339
from gpubroker_server.gateway.status.views import Time
from gpubroker_server.ports.objects import LEAST_BYTES, Counted, Quota, StoredObject
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing

_ID: Final = re.compile("[0-9a-f]{64}")
_AT_ONCE_BYTES: Final = 64 * 1024
_IDLE_SHARE: Final = 0.1
"""A use is noted once so much of the time that an object is kept has gone by: each note is a write."""


class ObjectView(TypedDict):
    id: Annotated[str, Field(description="The sha256 of its bytes, in hexadecimal.")]
    size_bytes: int
    created_at: Time
    expires_at: Annotated[Time, Field(description="Each use puts it off.")]


class ObjectPage(TypedDict):
    items: list[ObjectView]
    next_cursor: str | None
    has_more: bool
    counted_bytes: Annotated[
        int | None,
        Field(description=f"Of all the tenant has, each {LEAST_BYTES} at least. Null but on the first page."),
    ]
    most_bytes: Annotated[int, Field(description="So many may count (`limits.tenant_object_bytes`).")]


def object_view(kept: StoredObject) -> ObjectView:
    return {
        "id": kept.digest,
        "size_bytes": kept.size_bytes,
        "created_at": rfc3339(kept.created_at),
        "expires_at": rfc3339(kept.expires_at),
    }


async def keep(call: Call, data: bytes) -> StoredObject:
    """Durable when this returns. Raises Problem objects-full."""
    parts, tenant = call.parts, call.identity.tenant
    given = StoredObject(tenant, await _digest_of(data), len(data), parts.clock.now(), _end(call))
    # Before its bytes are on the disk: who is refused fills none.
    known = await parts.store.stored_object(tenant, given.digest)
    counted = await parts.store.counted_objects(tenant, given.created_at)
    quota = Quota(parts.limits.tenant_object_bytes, parts.limits.tenant_objects)
    if known is None and not quota.has_room(counted, given):
        raise _full(call, given, counted)
    digest = await parts.blobs.put(data, owner=tenant)
    assert digest == given.digest, "objects are named by their sha256"
    kept = await parts.store.keep_object(given, quota)
    if kept is None:
        raise _full(call, given, await parts.store.counted_objects(tenant, given.created_at))
    return kept


async def page_of(call: Call, query: PageQuery) -> ObjectPage:
    """Raises Problem cursor-invalid."""
    parts, tenant, now = call.parts, call.identity.tenant, call.parts.clock.now()
    limit = min(query.limit, parts.limits.page_items)
    filtered_by = filter_hash({"objects of": tenant})
    after = "" if query.cursor is None else read_cursor(query.cursor, filtered_by, _is_id)
    found = await parts.store.stored_objects(tenant, now, after=after, limit=limit + 1)
    page, has_more = found[:limit], len(found) > limit
    return {
        "items": [object_view(kept) for kept in page],
        "next_cursor": write_cursor(page[-1].digest, filtered_by) if has_more else None,
        "has_more": has_more,
        # To count reads all rows of the tenant: once for a list, not for each of its pages.
        "counted_bytes": None if after else (await parts.store.counted_objects(tenant, now)).size_bytes,
        "most_bytes": parts.limits.tenant_object_bytes,
    }


async def find(call: Call, object_id: str) -> StoredObject:
    """Raises Problem not-found; also for an object of another tenant."""
    kept = await _kept(call, object_id)
    if kept is None:
        raise Problem("not-found", _unknown(call, object_id))
    return kept


async def bytes_of(call: Call, kept: StoredObject) -> bytes:
    """Noted as a use. Raises Problem result-damaged."""
    try:
        data = await call.parts.blobs.get(kept.digest)
    except (BlobMissing, BlobCorrupt):
        raise Problem(
            "result-damaged",
            f"the bytes of object {kept.digest} are missing or damaged; upload them again, and check the "
            "disk that holds the blobs",
        ) from None
    until = _end(call)
    if until - kept.expires_at > _IDLE_SHARE * call.parts.limits.object_seconds:
        await call.parts.store.extend_object(kept.tenant, kept.digest, until)
    return data


async def values_of(call: Call, named: Mapping[int, str]) -> Mapping[str, bytes]:
    """The objects that these inputs of an inference name, by id. Raises Problem with all that is wrong."""
    found = {object_id: await _kept(call, object_id) for object_id in sorted({*named.values()})}
    faults = [
        Fault(pointer=f"/inputs/{at}/object", detail=_unknown(call, object_id), code="unknown-object")
        for at, object_id in named.items()
        if found[object_id] is None
    ]
    if faults:
        raise refused(faults)
    kept = {object_id: row for object_id, row in found.items() if row is not None}
    all_bytes, most = sum(kept[it].size_bytes for it in named.values()), call.parts.limits.object_bytes
    if all_bytes > most:
        detail = (
            f"the objects of one inference may have {most} bytes, and these have {all_bytes}; ask in "
            "parts, or raise limits.object_bytes"
        )
        raise refused([Fault(pointer="/inputs", detail=detail, code="objects-too-large")])
    return {object_id: await bytes_of(call, row) for object_id, row in kept.items()}


async def _kept(call: Call, object_id: str) -> StoredObject | None:
    if not _is_id(object_id):
        return None  # not for the database, which takes no NUL
    row = await call.parts.store.stored_object(call.identity.tenant, object_id)
    return row if row is not None and row.expires_at > call.parts.clock.now() else None


def _is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def _end(call: Call) -> Instant:
    return Instant(call.parts.clock.now() + call.parts.limits.object_seconds)


def _unknown(call: Call, object_id: str) -> str:
    seconds = call.parts.limits.object_seconds
    return (
        f'you have no object "{object_id[:100]}"; objects are kept for {seconds:g} seconds after their last '
        "use: upload it (again) with POST /objects"
    )


def _full(call: Call, given: StoredObject, counted: Counted) -> Problem:
    limits = call.parts.limits
    if counted.objects < limits.tenant_objects:
        setting = "limits.tenant_object_bytes"
        found = (
            f"has objects of {counted.size_bytes} bytes, and may have {limits.tenant_object_bytes}; this one "
            f"counts {given.counted_bytes}"
        )
    else:
        setting = "limits.tenant_objects"
        found = f"has {counted.objects} objects, and may have {limits.tenant_objects}"
    return Problem(
        "objects-full",
        f'tenant "{given.tenant}" {found}. See which (GET /objects, or gpubroker objects), delete some '
        "(DELETE /objects/ID, or gpubroker objects delete ID), wait until some were not used for "
        f"{limits.object_seconds:g} seconds, or raise {setting}",
    )


async def _digest_of(data: bytes) -> str:
    if len(data) <= _AT_ONCE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
