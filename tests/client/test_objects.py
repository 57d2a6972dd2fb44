"""Uploaded objects through SDK and command line: list, usage, delete."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from gpubroker import AsyncBroker, BrokerError, ObjectRef, Refused, StoredObject, Unreachable, WrongArgument
from gpubroker.tasks import object_api
from gpubroker.transport.decoding import decode

from tests.client.command_line import Run
from tests.client.conftest import Do
from tests.client.recorded_service import HANG_UP, RecordedService, Reply, a_problem
from tests.gateway.harness import Gateway

A, B, C = "a" * 64, "b" * 64, "bbbbbbbb" + "c" * 56


def stored(id: str, size_bytes: int = 8, day: int = 21) -> dict[str, Any]:
    times = {"created_at": f"2026-11-{day}T10:02:11Z", "expires_at": f"2026-11-{day + 1}T10:02:11Z"}
    return {"id": id, "size_bytes": size_bytes, **times}


def listed(*items: dict[str, Any], cursor: str | None = None) -> Reply:
    usage = {"counted_bytes": 25_000, "most_bytes": 4 * 1024**3}
    return Reply(200, {"items": items, "next_cursor": cursor, "has_more": cursor is not None, **usage})


def test_all_objects_are_fetched_page_by_page(service: RecordedService, do: Do) -> None:
    service.reply_with(listed(stored(A), cursor="on"), listed(stored(B)))
    first, second = do("objects", sort="-size")
    assert (first.id, second.id, first.size_bytes) == (A, B, 8)
    assert first.expires_at == datetime(2026, 11, 22, 10, 2, 11, tzinfo=UTC)
    asked = [dict(request.params) for request in service.requests]
    assert [(params.get("cursor"), params["sort"]) for params in asked] == [(None, "-size"), ("on", "-size")]


def test_object_usage_has_the_use_and_the_limit(service: RecordedService, do: Do) -> None:
    service.reply_with(listed(stored(A)))
    usage = do("object_usage")
    assert (usage.counted_bytes, usage.most_bytes) == (25_000, 4 * 1024**3)


def test_an_object_is_deleted_by_its_value_or_its_id(service: RecordedService, do: Do) -> None:
    service.reply_with(Reply(204, b""), Reply(204, b""), a_problem(404, "not-found"))
    assert do("delete_object", decode(StoredObject, {"id": A, "size_bytes": 8})) is None
    do("delete_object", "a/b")
    with pytest.raises(Refused):
        do("delete_object", B)
    sent = [(one.method, one.path) for one in service.requests]
    assert sent == [("DELETE", f"/objects/{id}") for id in (A, "a%2Fb", B)]


def test_a_delete_whose_answer_is_lost_is_not_retried(service: RecordedService, do: Do) -> None:
    service.reply_with(HANG_UP, a_problem(404, "not-found"))
    with pytest.raises(Unreachable):
        do("delete_object", A)
    assert len(service.requests) == 1


async def test_a_tenant_at_its_limit_can_list_and_delete_objects() -> None:
    async with Gateway(page_items=2, tenant_object_bytes=5 * 4096) as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            given = {(await broker.upload(f"{n}".encode())).id for n in range(5)}
            with pytest.raises(Refused) as refused:
                await broker.upload(b"one more")
            assert refused.value.code == "objects-full"
            assert "GET /objects" in refused.value.detail
            kept = [one async for one in broker.objects()]
            assert {one.id for one in kept} == given
            usage = await broker.object_usage()
            assert (usage.counted_bytes, usage.most_bytes) == (5 * 4096, 5 * 4096)
            await broker.delete_object(kept[0])
            await broker.delete_object(kept[1].id)
            assert (await broker.object_usage()).counted_bytes == 3 * 4096
            assert [one async for one in broker.objects()] == kept[2:]
            assert (await broker.upload(b"one more")).size_bytes == 8


def test_objects_lists_the_newest_first_and_the_total(service: RecordedService, run: Run) -> None:
    both = stored(B, 5000, day=22), stored(A, 3 * 1024**3)
    service.reply_with(listed(*both), listed(), listed(), listed(), listed(*both))
    shown = run("objects")
    assert dict(service.requests[0].params)["sort"] == "-created"
    assert shown.code == 0
    first, second = shown.out.splitlines()[1:]
    for line, texts in (
        (first, (B, "5 KiB", "2026-11-23 10:02:11Z")),
        (second, (A, "3.0 GiB", "2026-11-22 10:02:11Z")),
    ):
        assert [text for text in texts if text not in line] == []
    assert shown.err == "your tenant uses 24 KiB of 4.0 GiB\n"
    assert run("objects").out == "no objects\n"
    as_json = run("objects -o json")
    assert ([one["id"] for one in as_json.json], as_json.err) == ([B, A], "")


def test_objects_are_deleted_by_id_or_part_of_an_id(service: RecordedService, run: Run) -> None:
    gone = Reply(204, b"")
    service.reply_with(gone, listed(stored(A), stored(B), stored(C)), gone, gone)
    ended = run("objects delete", A)
    assert (ended.code, ended.out, ended.err) == (0, "", f"deleted {A}\n")
    ended = run("objects delete aaaaaaaa cccccccc", C)
    assert ended.code == 0
    assert [one.path for one in service.requests if one.method == "DELETE"] == [
        f"/objects/{id}" for id in (A, A, C)
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("bbbbbbbb", f"is ambiguous: {B}, {C}"),
        ("dddddddd", "no object's id begins or ends with 'dddddddd'; see: gpubroker objects"),
        ("aaa", "at least 8 characters"),
    ],
)
def test_an_ambiguous_or_unknown_word_deletes_nothing(
    service: RecordedService, run: Run, word: str, expected: str
) -> None:
    service.reply_with(listed(stored(A), stored(B), stored(C)))
    ended = run("objects delete", A, word)
    assert ended.code == 6
    assert expected in ended.err
    assert "nothing was deleted" in ended.err
    assert [one.method for one in service.requests] == ["GET"]


def test_an_error_names_the_objects_that_were_not_tried(service: RecordedService, run: Run) -> None:
    service.reply_with(Reply(204, b""), a_problem(404, "not-found", "you have no such object"))
    ended = run("objects delete", C, A, B)
    assert ended.code == 6
    assert ended.err.splitlines() == [
        f"deleted {C}",
        "gpubroker: you have no such object",
        f"not tried after this error: {B}",
    ]


def test_a_file_is_uploaded_unchanged(service: RecordedService, run: Run, tmp_path: Path) -> None:
    service.reply_with(Reply(201, stored(A)), Reply(201, stored(A)))
    file = tmp_path / "pixels"
    file.write_bytes(b"\0\xff\r\n")
    ended = run("upload", str(file))
    assert (ended.code, ended.out) == (0, f"{A}\n")
    assert "kept until 2026-11-22 10:02:11Z" in ended.err
    assert (service.requests[0].path, service.requests[0].body) == ("/objects", b"\0\xff\r\n")
    assert run("upload", str(file), "-o", "json").json["size_bytes"] == 8
    missing = run("upload", str(tmp_path / "missing"))
    assert (missing.code, "missing" in missing.err) == (2, True)
    assert len(service.requests) == 2


@pytest.mark.parametrize("method", ["upload", "put"])
def test_a_file_is_sent_as_it_is_read_and_from_its_beginning_at_a_retry(
    service: RecordedService, do: Do, tmp_path: Path, method: str
) -> None:
    service.reply_with(a_problem(503, "store-unavailable"), Reply(201, stored(A, 9)))
    (tmp_path / "weights").write_bytes(b"012345678")
    with (tmp_path / "weights").open("rb") as file:
        assert do(method, file).id == A
    assert [one.body for one in service.requests] == [b"012345678"] * 2
    with (tmp_path / "weights").open() as text, pytest.raises(WrongArgument, match="binary mode"):
        do(method, text)


async def test_an_object_is_downloaded_in_parts_and_compared_with_its_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_api, "PART_BYTES", 4)
    async with Gateway() as gateway:
        token = (await gateway.client("sdk")).headers["authorization"].removeprefix("Bearer ")
        transport = httpx.ASGITransport(gateway.app)
        async with AsyncBroker("http://127.0.0.1:8470", token, transport=transport) as broker:
            for data in (b"", b"0123", b"0123456789"):
                kept = await broker.put(data)
                assert kept == ObjectRef(kept.id, len(data))
                parts = [part async for part in broker.download(kept)]
                assert parts == [data[begin : begin + 4] for begin in range(0, len(data), 4)]
            assert bytes(await broker.fetch(kept)) == data


def test_download_resumes_after_a_failure_and_fails_if_bytes_are_wrong(
    service: RecordedService, do: Do
) -> None:
    first, second = (Reply(206, b"0123", {"Content-Range": f"bytes {at}/8"}) for at in ("0-3", "4-7"))
    service.reply_with(first, HANG_UP, a_problem(503, "store-unavailable"), second)
    with pytest.raises(BrokerError) as wrong:
        do("download", A)
    assert wrong.value.code == "result-damaged"
    asked = [int(one.headers["range"].removeprefix("bytes=").partition("-")[0]) for one in service.requests]
    assert asked == [0, 4, 4, 4]
    data = b"all of it"
    service.reply_with(Reply(200, data))
    assert do("download", hashlib.sha256(data).hexdigest()) == [data], "from a release without ranges"


def test_a_downloaded_file_is_there_when_it_is_complete(
    service: RecordedService, run: Run, tmp_path: Path
) -> None:
    data = b"0123"
    id, reply = hashlib.sha256(data).hexdigest(), Reply(206, data, {"Content-Range": "bytes 0-3/4"})
    service.reply_with(reply, reply, a_problem(404, "not-found"))
    ended = run("objects download", id, str(tmp_path / "new"))
    assert (ended.code, (tmp_path / "new").read_bytes()) == (0, data)
    assert run("objects download", A, str(tmp_path / "wrong")).code != 0
    assert run("objects download", B, str(tmp_path / "missing")).code != 0
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["new"]
