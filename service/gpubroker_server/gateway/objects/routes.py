"""Objects: bytes that are uploaded once, for inferences that name them."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.queries import PageQuery
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.objects.objects import (
    ObjectPage,
    ObjectView,
    bytes_of,
    find,
    keep,
    object_view,
    page_of,
)

router = APIRouter(route_class=DirectRoute, tags=["models"])

_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.post(
    "/objects",
    operation_id="objects_upload",
    dependencies=[needs(Scope.MODELS_INFER)],
    status_code=201,
    response_model=ObjectView,
    response_description="It is on disk, and kept until `expires_at` at least.",
    responses=problems(
        "unauthenticated", "forbidden", "payload-too-large", "objects-full", "store-unavailable"
    ),
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def upload_object(call: Call) -> Response:
    """Upload bytes that inferences name as values of an input.

    The body is the bytes as they are, whatever its Content-Type says. The same bytes again are the same
    object, kept anew.
    """
    kept = await keep(call, await call.body())
    return answer(object_view(kept), 201, {"Location": f"/objects/{kept.digest}"})


@router.get(
    "/objects",
    operation_id="objects_list",
    dependencies=[needs(Scope.MODELS_INFER)],
    response_model=ObjectPage,
    responses=problems("cursor-invalid", "unauthenticated", "forbidden", "validation-failed"),
)
async def list_objects(call: Call, query: Annotated[PageQuery, Query()]) -> Response:
    """List your tenant's objects, by id, and how much of what it may have they are."""
    return answer(await page_of(call, query))


@router.get(
    "/objects/{object_id}",
    operation_id="objects_get",
    dependencies=[needs(Scope.MODELS_INFER)],
    response_model=ObjectView,
    responses=problems("unauthenticated", "forbidden", "not-found"),
)
async def get_object(call: Call, object_id: str) -> Response:
    """Tell how large an object is and until when it is kept. This is no use of it."""
    return answer(object_view(await find(call, object_id)))


@router.get(
    "/objects/{object_id}/content",
    operation_id="objects_content",
    dependencies=[needs(Scope.MODELS_INFER)],
    response_class=Response,
    responses={
        200: {"description": "The bytes.", "content": _BYTES},
        **problems("unauthenticated", "forbidden", "not-found", "result-damaged"),
    },
)
async def get_content(call: Call, object_id: str) -> Response:
    """Fetch the bytes of an object."""
    data = await bytes_of(call, await find(call, object_id))
    return Response(data, media_type="application/octet-stream")


@router.delete(
    "/objects/{object_id}",
    operation_id="objects_delete",
    dependencies=[needs(Scope.MODELS_INFER)],
    status_code=204,
    responses=problems("unauthenticated", "forbidden", "not-found"),
)
async def delete_object(call: Call, object_id: str) -> Response:
    """Delete an object. Inferences that were accepted have its values already."""
    kept = await find(call, object_id)
    await call.parts.store.drop_object(kept.tenant, kept.digest)
    return Response(status_code=204)
