"""Uploaded objects over HTTP: kept for a time, for their tenant, and named by inferences."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.serving.batching import request_in
from gpubroker_server.gateway.objects.routes import ObjectStorage
from gpubroker_server.gateway.objects.transfer import PART_BYTES, Upload
from gpubroker_server.ports.store import StoreUnavailable
from starlette.requests import ClientDisconnect
from structlog.testing import capture_logs

from tests.gateway.harness import Client, Gateway, fault, problem
from tests.gateway.test_inferences_queued import OPEN, a_gateway
from tests.memory_blobs import Blobs
from tests.tensor_values import values_of

DAY = 86400.0
FLOATS = bytes.fromhex("0000003f 00000040")
"""0.5 and 2.0."""


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with a_gateway(serving=OPEN) as gateway:
        yield gateway


async def upload(client: Client, data: bytes = FLOATS) -> dict[str, Any]:
    response = await client.post("/objects", content=data)
    assert response.status_code == 201, response.text
    told: dict[str, Any] = response.json()
    assert response.headers["location"] == f"/objects/{told['id']}"
    return told


def naming(object_id: str, **fields: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 1], "object": object_id, **fields}
    return {"model": "llm", "inputs": [tensor]}


async def test_an_uploaded_object_has_its_digest_as_id_and_is_returned_unchanged(gateway: Gateway) -> None:
    told = await upload(gateway.admin)
    assert (told["id"], told["size_bytes"]) == (hashlib.sha256(FLOATS).hexdigest(), 8)
    where = f"/objects/{told['id']}"
    assert (await gateway.admin.get(where)).json() == told
    assert (await gateway.admin.get(f"{where}/content")).content == FLOATS
    assert (await gateway.admin.delete(where)).status_code == 204
    problem(await gateway.admin.get(where), 404, "not-found")
    problem(await gateway.admin.delete(where), 404, "not-found")


async def test_the_bytes_go_with_the_last_row_that_names_them(gateway: Gateway, api: Client) -> None:
    assert isinstance(gateway.blobs, Blobs)
    other = await gateway.client("other", tenant="acme")
    id = (await upload(api))["id"]
    await upload(other)
    for client, left in ((api, {id}), (other, set())):
        assert (await client.delete(f"/objects/{id}")).status_code == 204
        assert set(gateway.blobs.objects) == left


async def test_an_object_is_deleted_though_its_bytes_cannot_be(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_digest: str) -> None:
        raise StoreUnavailable("the disk is away")

    id = (await upload(api))["id"]
    monkeypatch.setattr(gateway.blobs, "delete", fail)
    assert (await api.delete(f"/objects/{id}")).status_code == 204
    problem(await api.get(f"/objects/{id}"), 404, "not-found")


async def test_an_object_is_visible_only_to_its_tenant(gateway: Gateway) -> None:
    id = (await upload(gateway.admin))["id"]
    other = await gateway.client("other", tenant="acme")
    for path in (f"/objects/{id}", f"/objects/{id}/content"):
        problem(await other.get(path), 404, "not-found")
    fault(await other.post("/inferences", json=naming(id)), "/inputs/0/object")
    await upload(other)
    assert (await gateway.admin.delete(f"/objects/{id}")).status_code == 204
    assert (await other.get(f"/objects/{id}/content")).content == FLOATS


async def test_a_tenant_lists_its_objects_in_pages_with_count_and_limit(gateway: Gateway) -> None:
    other = await gateway.client("other", tenant="acme")
    mine = [await upload(gateway.admin, b"%d" % n * 5000) for n in range(5)]
    theirs = await upload(other)
    first = (await gateway.admin.get("/objects?limit=2")).json()
    assert (first["has_more"], first["counted_bytes"], first["most_bytes"]) == (True, 25_000, 4 * 1024**3)
    seen, page = list(first["items"]), first
    while page["has_more"]:
        page = (await gateway.admin.get(f"/objects?limit=2&cursor={page['next_cursor']}")).json()
        assert len(page["items"]) <= 2
        assert page["counted_bytes"] is None, "to count takes reading all, once for a list"
        seen += page["items"]
    assert page["next_cursor"] is None
    assert seen == sorted(mine, key=lambda one: one["id"])
    assert (await other.get("/objects")).json()["items"] == [theirs]
    assert (await other.get("/objects")).json()["counted_bytes"] == 4096


@pytest.mark.parametrize("sort", ["id", "-id", "created", "-created", "size", "-size"])
async def test_objects_are_sorted_page_by_page_as_asked(gateway: Gateway, sort: str) -> None:
    mine: list[Any] = []
    for size in (3, 1, 2, 3):
        gateway.clock.advance(0.25)
        mine.append(await upload(gateway.admin, b"%d" % len(mine) * size))
    field = {"id": "id", "created": "created_at", "size": "size_bytes"}[sort.strip("-")]
    expected = sorted(mine, key=lambda one: (one[field], one["id"]), reverse=sort[0] == "-")
    page = (await gateway.admin.get(f"/objects?limit=3&sort={sort}")).json()
    cursor = page["next_cursor"]
    rest = (await gateway.admin.get(f"/objects?limit=3&sort={sort}&cursor={cursor}")).json()
    assert page["items"] + rest["items"] == expected
    other = "size" if field == "created_at" else "created"
    problem(await gateway.admin.get(f"/objects?sort={other}&cursor={cursor}"), 400, "cursor-invalid")


async def test_an_expired_object_is_neither_listed_nor_counted(gateway: Gateway) -> None:
    await upload(gateway.admin)
    gateway.clock.advance(DAY / 2)
    kept = await upload(gateway.admin, b"x" * 5000)
    gateway.clock.advance(DAY / 2)
    listed = (await gateway.admin.get("/objects")).json()
    assert (listed["items"], listed["counted_bytes"]) == ([kept], 5000)


async def test_a_page_is_cut_to_the_maximum_and_zero_is_refused() -> None:
    async with a_gateway(serving=OPEN, page_items=2) as gateway:
        for data in (b"a", b"b", b"c"):
            await upload(gateway.admin, data)
        assert len((await gateway.admin.get("/objects?limit=1000")).json()["items"]) == 2
        problem(await gateway.admin.get("/objects?limit=0"), 422, "validation-failed")


async def test_a_cursor_is_valid_for_one_list_and_one_tenant(gateway: Gateway) -> None:
    for data in (b"a", b"b"):
        await upload(gateway.admin, data)
    cursor = (await gateway.admin.get("/objects?limit=1")).json()["next_cursor"]
    assert len((await gateway.admin.get(f"/objects?cursor={cursor}")).json()["items"]) == 1
    other = await gateway.client("other", tenant="acme")
    problem(await other.get(f"/objects?cursor={cursor}"), 400, "cursor-invalid")
    problem(await gateway.admin.get("/objects?cursor=rubbish"), 400, "cursor-invalid")
    problem(await gateway.admin.get(f"/tasks?cursor={cursor}"), 400, "cursor-invalid")


async def test_objects_need_the_scope_for_inferences_or_for_tasks(gateway: Gateway) -> None:
    reader = await gateway.client("reader", "tasks:read")
    problem(await reader.post("/objects", content=FLOATS), 403, "forbidden")
    problem(await reader.get("/objects/abc"), 403, "forbidden")
    problem(await reader.get("/objects"), 403, "forbidden")


async def test_an_object_is_kept_for_a_day_after_its_upload_or_last_use(gateway: Gateway) -> None:
    first = await upload(gateway.admin)
    where = f"/objects/{first['id']}"
    gateway.clock.advance(DAY / 2)
    again = await upload(gateway.admin)
    assert (again["created_at"], again["expires_at"] > first["expires_at"]) == (first["created_at"], True)
    for use in ("inference", "content"):
        gateway.clock.advance(DAY - 1)
        if use == "content":
            assert (await gateway.admin.get(f"{where}/content")).status_code == 200
        else:
            response = await gateway.admin.post("/inferences", json=naming(first["id"]))
            assert response.status_code == 202
    gateway.clock.advance(DAY - 1)
    assert (await gateway.admin.get(where)).status_code == 200
    gateway.clock.advance(1)
    assert "86400 seconds" in problem(await gateway.admin.get(where), 404, "not-found")["detail"]
    fault(await gateway.admin.post("/inferences", json=naming(first["id"])), "/inputs/0/object")
    assert (await upload(gateway.admin))["created_at"] > first["created_at"], "it is a new one"


async def test_an_object_above_a_limit_is_refused_with_the_numbers() -> None:
    async with a_gateway(
        serving=OPEN, body_bytes=100, object_bytes=9000, tenant_object_bytes=10_000
    ) as gateway:
        await upload(gateway.admin, b"x" * 6000)
        too_large = await gateway.admin.post("/objects", content=b"x" * 9001)
        assert "limits.object_bytes" in problem(too_large, 413, "payload-too-large")["detail"]
        full = problem(await gateway.admin.post("/objects", content=b"y" * 5000), 422, "objects-full")
        for said in (
            "6000 bytes",
            "may have 10000",
            "counts 5000",
            "GET /objects",
            "gpubroker objects",
            "limits.tenant_object_bytes",
        ):
            assert said in full["detail"]
        assert len(gateway.blobs.objects) == 1, "a refused upload fills no disk"
        await upload(gateway.admin, b"x" * 6000)
        await upload(await gateway.client("other", tenant="acme"), b"y" * 6000)


async def test_a_tenant_at_its_limit_of_objects_is_refused_with_their_number() -> None:
    async with a_gateway(serving=OPEN, tenant_objects=2) as gateway:
        for data in (b"a", b"b"):
            await upload(gateway.admin, data)
        full = problem(await gateway.admin.post("/objects", content=b"c"), 422, "objects-full")
        for said in ("has 2 objects", "may have 2", "limits.tenant_objects"):
            assert said in full["detail"]
        await upload(gateway.admin, b"a")


async def test_an_inference_keeps_the_values_of_a_deleted_object(
    gateway: Gateway,
) -> None:
    id = (await upload(gateway.admin))["id"]
    inline = {"name": "b", "datatype": "FP32", "shape": [1], "data": [7]}
    text = {"name": "t", "datatype": "BYTES", "shape": [1]}
    text["object"] = (await upload(gateway.admin, b"\x02\0\0\0ab"))["id"]
    body = naming(id)
    body["inputs"] += [inline, text, {**body["inputs"][0], "name": "again"}]
    response = await gateway.admin.post("/inferences", json=body)
    assert response.status_code == 202, response.text
    await gateway.admin.delete(f"/objects/{id}")
    [spec] = (await gateway.store.specs([TaskId(response.json()["id"])])).values()
    tensors = request_in(spec.arguments).inputs
    assert [values_of(tensor) for tensor in tensors] == [[0.5, 2.0], [7.0], ["ab"], [0.5, 2.0]]


async def test_a_replayed_inference_gets_its_answer_without_its_object(
    gateway: Gateway,
) -> None:
    id, key = (await upload(gateway.admin))["id"], {"Idempotency-Key": "k"}
    first = await gateway.admin.post("/inferences", json=naming(id), headers=key)
    await gateway.admin.delete(f"/objects/{id}")
    again = await gateway.admin.post("/inferences", json=naming(id), headers=key)
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"object": "gone"}, 'you have no object "gone"'),
        ({"object": ""}, 'you have no object ""'),
        ({"object": "\0"}, "you have no object"),
        ({"object": "ab" * 32}, 'you have no object "abab'),
        ({"shape": [3, 1]}, "came with 8 bytes"),
        ({"datatype": "FP64"}, "came with 8 bytes"),
        ({"datatype": "BYTES"}, "longer than what holds it"),
        ({"data": [1, 2]}, "in exactly one way"),
        ({"parameters": {"binary_data_size": 0}}, "in exactly one way"),
    ],
)
async def test_an_unknown_or_unfitting_object_is_refused(
    gateway: Gateway, fields: dict[str, Any], says: str
) -> None:
    id = (await upload(gateway.admin))["id"]
    refused = await gateway.admin.post("/inferences", json=naming(id, **{"object": id, **fields}))
    assert says in fault(refused, "/inputs/0/object")
    assert gateway.world.tasks == {}


async def test_objects_that_a_request_copies_have_a_limit_in_bytes() -> None:
    async with a_gateway(serving=OPEN, copied_object_bytes=15) as gateway:
        body = naming((await upload(gateway.admin))["id"])
        body["inputs"].append({**body["inputs"][0], "name": "y"})
        refused = await gateway.admin.post("/inferences", json=body)
        assert "may have 15 bytes, and here they have 16" in fault(refused, "/inputs")
        items = {"object": (await upload(gateway.admin, b"[1, 2, 3, 4, 5, 6]"))["id"]}
        run = {"entrypoint": "myteam.jobs:f"}
        refused = await gateway.admin.post("/arrays", json={"run": run, "items": items})
        assert "limits.copied_object_bytes" in fault(refused, "/items/object")


async def test_lost_bytes_of_an_object_are_reported(gateway: Gateway) -> None:
    id = (await upload(gateway.admin))["id"]
    gateway.blobs.objects.clear()
    for response in (
        await gateway.admin.post("/inferences", json=naming(id)),
        await gateway.admin.get(f"/objects/{id}/content"),
    ):
        assert "upload them again" in problem(response, 500, "result-damaged")["detail"]


LARGE = bytes(range(256)) * 10_000
"""More than goes into memory at once."""


async def in_parts(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def test_an_upload_whose_first_parts_are_deleted_is_refused() -> None:
    blobs = Blobs()
    upload = Upload(blobs)
    await upload.add(bytes(PART_BYTES + 1))
    blobs.uploads.clear()
    with pytest.raises(StoreUnavailable, match="send it again"):
        await upload.add(bytes(PART_BYTES + 1))


async def test_a_large_object_is_stored_and_read_as_it_comes(gateway: Gateway) -> None:
    told = (await gateway.admin.post("/objects", content=in_parts(LARGE))).json()
    assert (told["id"], told["size_bytes"]) == (hashlib.sha256(LARGE).hexdigest(), len(LARGE))
    answer = await gateway.admin.get(f"/objects/{told['id']}/content")
    assert (answer.status_code, answer.headers["content-length"]) == (200, str(len(LARGE)))
    assert answer.content == LARGE
    assert answer.headers["etag"] == f'"{told["id"]}"'


@pytest.mark.parametrize(
    ("asked", "begin", "end"),
    [("bytes=0-0", 0, 1), ("bytes=5-1500000", 5, 1_500_001), ("bytes=2559990-", 2_559_990, 2_560_000),
     ("bytes=-3", 2_559_997, 2_560_000), ("bytes=10-99999999", 10, 2_560_000)],
)  # fmt: skip
async def test_a_part_of_an_object_can_be_fetched(gateway: Gateway, asked: str, begin: int, end: int) -> None:
    where = f"/objects/{(await upload(gateway.admin, LARGE))['id']}/content"
    answer = await gateway.admin.get(where, headers={"Range": asked})
    assert answer.status_code == 206
    assert answer.content == LARGE[begin:end]
    assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{len(LARGE)}"


async def test_range_beyond_an_object_is_refused_and_a_useless_one_is_ignored(
    gateway: Gateway,
) -> None:
    where = f"/objects/{(await upload(gateway.admin))['id']}/content"
    for beyond in ("bytes=8-", "bytes=-0"):
        refused = await gateway.admin.get(where, headers={"Range": beyond})
        assert "8 bytes" in problem(refused, 416, "range-not-satisfiable")["detail"]
        assert refused.headers["content-range"] == "bytes */8"
    for ignored in ("bytes=-", "bytes=5-2", "bytes=0-1,4-5", "lines=1-2"):
        answer = await gateway.admin.get(where, headers={"Range": ignored})
        assert (answer.status_code, answer.content) == (200, FLOATS)


async def test_large_upload_without_room_is_refused_and_nothing_is_written() -> None:
    async with a_gateway(serving=OPEN, tenant_object_bytes=0) as gateway:
        problem(await gateway.admin.post("/objects", content=LARGE), 422, "objects-full")
        assert gateway.blobs.uploads == {}
        problem(await gateway.admin.post("/objects", content=in_parts(LARGE)), 422, "objects-full")
    async with a_gateway(serving=OPEN, object_bytes=2_000_000) as gateway:
        problem(await gateway.admin.post("/objects", content=in_parts(LARGE)), 413, "payload-too-large")
        assert gateway.blobs.objects == {}


MB = 1_000_000


async def test_upload_of_unknown_length_stops_at_the_quota_and_leaves_nothing() -> None:
    async with a_gateway(serving=OPEN, tenant_object_bytes=MB) as gateway:
        problem(await gateway.admin.post("/objects", content=in_parts(LARGE)), 422, "objects-full")
        assert (gateway.blobs.uploads, gateway.blobs.objects) == ({}, {})
        assert gateway.blobs.most_bytes <= MB


async def test_an_upload_that_breaks_off_leaves_nothing(gateway: Gateway) -> None:
    storage = gateway.parts_of(ObjectStorage)

    async def broken() -> AsyncIterator[bytes]:
        yield LARGE
        assert len(gateway.blobs.uploads) == 1
        raise ClientDisconnect

    with pytest.raises(ClientDisconnect):
        await storage.put(broken(), 0, "acme")
    assert gateway.blobs.uploads == {}


async def test_concurrent_uploads_count_against_their_own_tenant_only() -> None:
    async with a_gateway(serving=OPEN, tenant_object_bytes=4 * MB) as gateway:
        storage = gateway.parts_of(ObjectStorage)
        other = await gateway.client("other", tenant="zeta")

        async def with_more_meanwhile() -> AsyncIterator[bytes]:
            yield LARGE
            mine = await gateway.admin.post("/objects", content=in_parts(LARGE[::-1]))
            said = problem(mine, 422, "objects-full")["detail"]
            assert f"uploads of {len(LARGE)} bytes under way" in said
            assert (await other.post("/objects", content=in_parts(LARGE[::-1]))).status_code == 201

        await storage.put(with_more_meanwhile(), 0, "default")
        assert (await gateway.admin.get("/objects")).json()["counted_bytes"] == len(LARGE)
        assert gateway.blobs.uploads == {}
        await gateway.admin.delete(f"/objects/{hashlib.sha256(LARGE).hexdigest()}")
        assert (await gateway.admin.post("/objects", content=in_parts(LARGE[::-1]))).status_code == 201


async def test_a_large_object_with_wrong_bytes_is_not_handed_out_whole(gateway: Gateway) -> None:
    id = (await upload(gateway.admin, LARGE))["id"]
    gateway.blobs.objects[id] = LARGE[:-1] + b"x"
    with capture_logs():  # a traceback for the console would have the bytes in it
        answer = await gateway.admin.get(f"/objects/{id}/content")
    assert len(answer.content) < len(LARGE), "the answer breaks off"
    gateway.blobs.objects.clear()
    problem(await gateway.admin.get(f"/objects/{id}/content"), 500, "result-damaged")
