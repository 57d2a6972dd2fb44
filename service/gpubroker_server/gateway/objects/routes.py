"""Routes of objects, which are bytes that are uploaded once and that tasks and inferences name."""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from fastapi import Header, Query, Response
from gpubroker.wire.answered import Time
from gpubroker.wire.objects import ObjectPage
from gpubroker.wire.objects import StoredObject as ShownObject
from msgspec import Struct, field
from msgspec.structs import replace
from pydantic import Field
from starlette.responses import StreamingResponse

from gpubroker_server.core.admission.admit import unknown_object
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.stored_objects import Quota, StoredObject
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.objects.transfer import PART_BYTES, Span, Upload, span_of
from gpubroker_server.gateway.submission.named_objects import is_object_id
from gpubroker_server.http.bodies import PageQuery, direction_of, paging_of
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.routing import Call, Caller, Resource, answer, app_part
from gpubroker_server.ports.objects import ObjectOrder, ObjectSort
from gpubroker_server.ports.store import (
    BlobCorrupt,
    BlobMissing,
    BlobStore,
    Clock,
    StoreUnavailable,
    TaskStore,
)


class ObjectStorage(Struct, frozen=True):
    """Stores, reads and deletes the objects of tenants."""

    store: TaskStore
    blobs: BlobStore
    clock: Clock
    limits: ServiceLimits
    under_way: defaultdict[str, list[Upload]] = field(default_factory=lambda: defaultdict(list))
    """Tenant -> its uploads to this gateway that are under way."""

    async def put(self, parts: AsyncIterator[bytes], size_hint: int, tenant: str) -> StoredObject:
        """Store bytes as an object, which is durable when this returns. `size_hint` is the announced number
        of bytes, or 0 if it is unknown. Raises Problem objects-full."""
        now, quota = self.clock.now(), Quota(self.limits.tenant_object_bytes, self.limits.tenant_objects)
        counted = await self.store.counted_objects(tenant, now)
        given = StoredObject(tenant, "", size_hint, now, Instant(now + self.limits.object_seconds))
        upload = Upload(self.blobs)
        self.under_way[tenant].append(upload)
        try:
            async for part in parts:
                given = replace(given, size_bytes=max(given.size_bytes, upload.size_bytes + len(part)))
                # Without room nothing more is written, because a refused upload must not fill the disk. The
                # digest is still computed, because an object that the tenant already has is accepted.
                if not quota.has_room(counted, given, self._coming_bytes(tenant, upload)):
                    await upload.discard()
                await upload.add(part)
            given = replace(given, digest=await upload.digest(), size_bytes=upload.size_bytes)
            earlier = await self.store.stored_object(tenant, given.digest)
            # Other uploads may have ended since the first count.
            counted = await self.store.counted_objects(tenant, now)
            coming_bytes = self._coming_bytes(tenant, upload)
            has_room = upload.is_written and quota.has_room(counted, given, coming_bytes)
            if earlier is None and not has_room:
                raise Problem("objects-full", quota.why_full(counted, given, coming_bytes))
            await upload.finish(tenant)
            kept = await self.store.keep_object(given, quota)
            if kept is None:
                counted = await self.store.counted_objects(tenant, now)
                raise Problem("objects-full", quota.why_full(counted, given))
            return kept
        finally:
            self.under_way[tenant].remove(upload)
            await upload.discard()

    async def find(self, tenant: str, object_id: str) -> StoredObject:
        """Return an object of the tenant. Raises Problem not-found if the tenant has no such object."""
        kept = await self._kept(tenant, object_id)
        if kept is None:
            raise Problem("not-found", self._unknown(object_id))
        return kept

    async def delete(self, kept: StoredObject) -> None:
        """Delete an object, and its bytes unless another row refers to them. Bytes that remain after a crash
        are swept later."""
        if not await self.store.drop_object(kept.tenant, kept.digest):
            return
        with suppress(StoreUnavailable):
            if not await self.store.referenced([kept.digest]):
                await self.blobs.delete(kept.digest)

    async def read(self, kept: StoredObject) -> bytes:
        """Return all bytes of an object, and record a use. Raises Problem result-damaged if they are missing
        or damaged."""
        try:
            data = await self.blobs.get(kept.digest)
        except (BlobMissing, BlobCorrupt):
            raise self._damaged(kept) from None
        await self._note_use(kept)
        return data

    async def stream(self, kept: StoredObject, span: Span) -> AsyncIterator[bytes]:
        """Yield the bytes of a span in parts, and record a use. If the span is the whole object, its last
        part is yielded only after the bytes have been compared with the digest. Raises Problem
        result-damaged."""
        await self._note_use(kept)
        digest, offset = hashlib.sha256(), span.first_byte
        while offset < span.end_byte:
            try:
                part = await self.blobs.read(kept.digest, offset, min(PART_BYTES, span.end_byte - offset))
            except BlobMissing:
                raise self._damaged(kept) from None
            offset += len(part)
            await asyncio.to_thread(digest.update, part)
            is_damaged = offset == span.end_byte and digest.hexdigest() != kept.digest
            if not part or (is_damaged and span.size_bytes == kept.size_bytes):
                raise self._damaged(kept)
            yield part

    async def named(self, tenant: str, named: Mapping[int, str]) -> Mapping[str, StoredObject]:
        """Return the objects that an inference names, by id, and record their use. `named` maps the index of
        an input to the id of its object.

        Raises one Problem with all faults.
        """
        looked_up = {
            object_id: await self._kept(tenant, object_id) for object_id in sorted({*named.values()})
        }
        faults = [
            Fault(pointer=f"/inputs/{index}/object", detail=self._unknown(object_id), code="unknown-object")
            for index, object_id in named.items()
            if looked_up[object_id] is None
        ]
        if faults:
            raise invalid(*faults)
        kept = {object_id: row for object_id, row in looked_up.items() if row is not None}
        for row in kept.values():
            await self._note_use(row)
        return kept

    async def values_of(self, kept: Iterable[StoredObject]) -> Mapping[str, bytes]:
        """Return the bytes of objects that an inference copies, by id. Raises Problem if they are too large,
        missing or damaged."""
        rows = list(kept)
        self._check_copied(sum(row.size_bytes for row in rows), "/inputs")
        return {digest: await self.read(row) for digest, row in {row.digest: row for row in rows}.items()}

    async def copied(self, tenant: str, object_id: str, pointer: str) -> bytes:
        """Return the bytes of an object that a request copies. `pointer` is the JSON pointer of its id in the
        request. Raises Problem if the object is unknown or too large, or if its bytes are damaged."""
        kept = await self.find(tenant, object_id)
        self._check_copied(kept.size_bytes, pointer)
        return await self.read(kept)

    def _check_copied(self, size_bytes: int, pointer: str) -> None:
        limit_bytes = self.limits.copied_object_bytes
        if size_bytes > limit_bytes:
            detail = (
                f"the objects that one request copies may have {limit_bytes} bytes, and here they have "
                f"{size_bytes}; split the request, or raise limits.copied_object_bytes"
            )
            raise invalid(Fault(pointer=pointer, detail=detail, code="objects-too-large"))

    async def _kept(self, tenant: str, object_id: str) -> StoredObject | None:
        if not is_object_id(object_id):
            return None  # Other text may contain a NUL, which the database would refuse.
        return await self.store.find_object(tenant, object_id, self.clock.now())

    async def _note_use(self, kept: StoredObject) -> None:
        await self.store.note_use(kept, self.clock.now(), self.limits.object_seconds)

    def _coming_bytes(self, tenant: str, upload: Upload) -> int:
        """Return the total size of the tenant's other uploads to this gateway that are being written."""
        others = (other for other in self.under_way[tenant] if other is not upload)
        return sum(other.size_bytes for other in others if other.is_written)

    def _damaged(self, kept: StoredObject) -> Problem:
        return Problem(
            "result-damaged",
            f"the bytes of object {kept.digest} are missing or damaged; upload them again, and check the "
            "disk that holds the blobs",
        )

    def _unknown(self, object_id: str) -> str:
        return unknown_object(object_id, self.limits.object_seconds)


resource = Resource("objects")

_SCOPES: Final = (Scope.MODELS_INFER, Scope.TASKS_WRITE)
"""The scopes of which a token needs one: both inferences and tasks use objects."""

_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


Storage = Annotated[ObjectStorage, app_part(ObjectStorage)]
RangeHeader = Annotated[
    str | None,
    Header(alias="Range", description="`bytes=0-99`, `bytes=100-` or `bytes=-50`."),
]


@resource.route(
    "POST /objects",
    "objects_upload",
    _SCOPES,
    ShownObject,
    "payload-too-large objects-full store-unavailable",
    status_code=201,
    response_description="It is on disk, and kept until `expires_at` at least.",
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def upload_object(call: Call, storage: Storage) -> Response:
    """Upload bytes that inferences name as values of an input, and tasks as arguments.

    The body is the bytes of the object, with any Content-Type, and is stored as it arrives.
    Uploading the same bytes again extends the time for which the object is kept.
    """
    length = call.header(b"content-length") or ""
    size_hint = int(length) if length.isdigit() else 0
    kept = await storage.put(call.parts(), size_hint, call.identity.tenant)
    return answer(_shown(kept), 201, {"Location": f"/objects/{kept.digest}"})


class ObjectQuery(PageQuery):
    sort: Annotated[
        Literal["id", "-id", "created", "-created", "size", "-size"],
        Field(description="`-`: the latest, or the largest, first; equal ones by id."),
    ] = "id"

    @property
    def order(self) -> ObjectOrder:
        word, descending = direction_of(self.sort)
        return ObjectOrder(ObjectSort[word.upper()], descending)


@resource.route("GET /objects", "objects_list", _SCOPES, ObjectPage, "cursor-invalid")
async def list_objects(caller: Caller, storage: Storage, query: Annotated[ObjectQuery, Query()]) -> Response:
    """List your tenant's objects, by id unless `sort` is given, and how many bytes count against its
    limit."""
    tenant = caller.tenant
    store, limits, now = storage.store, storage.limits, storage.clock.now()
    order, sorted_by = query.order, {} if query.sort == "id" else {"sort": query.sort}
    filters, length = {"objects of": tenant, **sorted_by}, len(order.sort.fields)
    paging = paging_of(query, limits.page_items, filters, length, is_object_id)
    rows = await store.stored_objects(tenant, now, order, after=paging.after, limit=paging.limit + 1)
    page, next_cursor = paging.cut(rows, order.sort.key)
    # Counting reads all rows of the tenant, so it is done only for the first page of a list.
    counted_bytes = None if paging.after else (await store.counted_objects(tenant, now)).size_bytes
    return answer(
        ObjectPage(
            items=tuple(map(_shown, page)),
            next_cursor=next_cursor,
            has_more=next_cursor is not None,
            counted_bytes=counted_bytes,
            most_bytes=limits.tenant_object_bytes,
        )
    )


@resource.route("GET /objects/{object_id}", "objects_get", _SCOPES, ShownObject, "not-found")
async def get_object(caller: Caller, storage: Storage, object_id: str) -> Response:
    """Read an object's size and until when it is kept. This does not count as a use."""
    return answer(_shown(await storage.find(caller.tenant, object_id)))


@resource.route(
    "GET /objects/{object_id}/content",
    "objects_content",
    _SCOPES,
    None,
    "not-found result-damaged range-not-satisfiable",
    response_class=Response,
    responses={
        200: {"description": "The bytes.", "content": _BYTES},
        206: {"description": "The bytes that `Range` asked for.", "content": _BYTES},
    },
)
async def get_content(
    caller: Caller, storage: Storage, object_id: str, range: RangeHeader = None
) -> Response:
    """Fetch the bytes of an object, or a part of them with `Range`."""
    kept = await storage.find(caller.tenant, object_id)
    asked = span_of(range, kept.size_bytes)
    headers = {"Accept-Ranges": "bytes", "ETag": f'"{kept.digest}"'}
    if asked is not None:
        headers["Content-Range"] = f"bytes {asked.first_byte}-{asked.end_byte - 1}/{kept.size_bytes}"
    span = asked or Span(0, kept.size_bytes)
    headers["Content-Length"] = str(span.size_bytes)
    flow = storage.stream(kept, span)
    # The first part is read before the answer begins, so that missing bytes are answered with a problem.
    first = await anext(flow, b"")
    status = 200 if asked is None else 206
    return StreamingResponse(_joined(first, flow), status, headers, "application/octet-stream")


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part


@resource.route("DELETE /objects/{object_id}", "objects_delete", _SCOPES, None, "not-found", status_code=204)
async def delete_object(caller: Caller, storage: Storage, object_id: str) -> Response:
    """Delete an object. Accepted inferences already have its values; tasks that name it fail."""
    kept = await storage.find(caller.tenant, object_id)
    await storage.delete(kept)
    return Response(status_code=204)


def _shown(kept: StoredObject) -> ShownObject:
    times = Time.at(kept.created_at), Time.at(kept.expires_at)
    return ShownObject(kept.digest, kept.size_bytes, *times)
