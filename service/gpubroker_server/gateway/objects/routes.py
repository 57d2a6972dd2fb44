"""Objects: upload bytes once, for inferences that name them."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.gateway.http.call import Call, answer
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.pages import PageQuery, filter_hash, read_cursor, write_cursor
from gpubroker_server.gateway.http.routing import PARTS, Resource
from gpubroker_server.gateway.http.times import Time, rfc3339
from gpubroker_server.gateway.objects.storage import ObjectStorage, is_object_id
from gpubroker_server.ports.objects import LEAST_BYTES, StoredObject

resource = Resource("models")

_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@dataclass(frozen=True, slots=True)
class ObjectParts:
    """What the routes of objects need."""

    storage: ObjectStorage


Parts = Annotated[ObjectParts, PARTS]


class ObjectView(TypedDict):
    id: Annotated[str, Field(description="The sha256 of its bytes, in hexadecimal.")]
    size_bytes: int
    created_at: Time
    expires_at: Annotated[Time, Field(description="Each use moves it on.")]


class ObjectPage(TypedDict):
    items: list[ObjectView]
    next_cursor: str | None
    has_more: bool
    counted_bytes: Annotated[
        int | None,
        Field(
            description=f"Of all the tenant's objects, each at least {LEAST_BYTES}. Only on the first page, "
            "null on others."
        ),
    ]
    most_bytes: Annotated[int, Field(description="The maximum of it (`limits.tenant_object_bytes`).")]


@resource.route(
    "POST /objects",
    "objects_upload",
    Scope.MODELS_INFER,
    ObjectView,
    "payload-too-large objects-full store-unavailable",
    status_code=201,
    response_description="It is on disk, and kept until `expires_at` at least.",
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def upload_object(call: Call, parts: Parts) -> Response:
    """Upload bytes that inferences name as values of an input.

    The body is the bytes as they are, with any Content-Type. Uploading the same bytes again extends the time
    for which the object is kept.
    """
    kept = await parts.storage.put(await call.body(), call.identity.tenant)
    return answer(_view(kept), 201, {"Location": f"/objects/{kept.digest}"})


@resource.route(
    "GET /objects", "objects_list", Scope.MODELS_INFER, ObjectPage, "cursor-invalid validation-failed"
)
async def list_objects(call: Call, parts: Parts, query: Annotated[PageQuery, Query()]) -> Response:
    """List your tenant's objects, by id, and how many bytes count against its limit."""
    storage, tenant = parts.storage, call.identity.tenant
    store, limits, now = storage.store, storage.limits, storage.clock.now()
    limit = min(query.limit, limits.page_items)
    filtered_by = filter_hash({"objects of": tenant})
    after = "" if query.cursor is None else read_cursor(query.cursor, filtered_by, is_object_id)
    found = await store.stored_objects(tenant, now, after=after, limit=limit + 1)
    page, has_more = found[:limit], len(found) > limit
    # Counting reads all rows of the tenant: once for a list, not for each of its pages.
    counted_bytes = None if after else (await store.counted_objects(tenant, now)).size_bytes
    view: ObjectPage = {
        "items": [_view(kept) for kept in page],
        "next_cursor": write_cursor(page[-1].digest, filtered_by) if has_more else None,
        "has_more": has_more,
        "counted_bytes": counted_bytes,
        "most_bytes": limits.tenant_object_bytes,
    }
    return answer(view)


@resource.route("GET /objects/{object_id}", "objects_get", Scope.MODELS_INFER, ObjectView, "not-found")
async def get_object(call: Call, parts: Parts, object_id: str) -> Response:
    """Read an object's size and until when it is kept. This does not count as a use."""
    return answer(_view(await parts.storage.find(call.identity.tenant, object_id)))


@resource.route(
    "GET /objects/{object_id}/content",
    "objects_content",
    Scope.MODELS_INFER,
    None,
    "not-found result-damaged",
    response_class=Response,
    responses={200: {"description": "The bytes.", "content": _BYTES}},
)
async def get_content(call: Call, parts: Parts, object_id: str) -> Response:
    """Fetch the bytes of an object."""
    data = await parts.storage.read(await parts.storage.find(call.identity.tenant, object_id))
    return Response(data, media_type="application/octet-stream")


@resource.route(
    "DELETE /objects/{object_id}", "objects_delete", Scope.MODELS_INFER, None, "not-found", status_code=204
)
async def delete_object(call: Call, parts: Parts, object_id: str) -> Response:
    """Delete an object. Accepted inferences already have its values."""
    kept = await parts.storage.find(call.identity.tenant, object_id)
    await parts.storage.store.drop_object(kept.tenant, kept.digest)
    return Response(status_code=204)


def _view(kept: StoredObject) -> ObjectView:
    return {
        "id": kept.digest,
        "size_bytes": kept.size_bytes,
        "created_at": rfc3339(kept.created_at),
        "expires_at": rfc3339(kept.expires_at),
    }
