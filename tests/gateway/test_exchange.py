"""What becomes of a request under /v2 on its way to a server of models, and of the answer."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from tests.gateway.harness import until
from tests.gateway.inference_stage import INFER, OK, Heard, a_request, a_stage
from tests.patience import PATIENCE_SECONDS


async def test_headers_keep_their_spelling_except_for_connection_and_token() -> None:
    """Headers of the connection are dropped, and the token is replaced."""
    async with a_stage(heard := Heard()) as stage:
        status, headers, body = await stage.ask(
            "POST", INFER + "?a=%20b", b"xyz", X_Tenant="A", triton_Thing="1", Connection="X-Hop, close",
            X_Hop="1", TE="trailers", Inference_Header_Content_Length="2",
        )  # fmt: skip
    assert (status, body) == (200, b"{}")
    assert headers["request-id"].startswith("req_")
    assert headers["connection"] == "close"
    assert "date" not in headers
    assert "server" not in headers
    first, *lines = heard.heads[0].split(b"\r\n")
    assert first == b"POST /v2/models/any/infer?a=%20b HTTP/1.1"
    assert lines == [
        b"Host: triton:8000",
        b"Authorization: Bearer theirs",
        b"X-Tenant: A",
        b"triton-Thing: 1",
        b"Inference-Header-Content-Length: 2",
        b"Content-Length: 3",
        b"",
        b"",
    ]
    assert heard.bodies == [b"xyz"]


async def test_requests_of_both_kinds_on_one_connection_are_answered_in_order() -> None:
    async with a_stage(heard := Heard()) as stage:
        client = await stage.connect()
        client.send(
            client.head("GET", "/healthz"),
            client.head("POST", INFER, 3), b"one",
            client.head("GET", "/v2/health/live"),
            client.head("GET", "/tasks"),
            client.head("GET", "/v2x"),
            client.head("POST", INFER, 3), b"two",
        )  # fmt: skip
        answers = [await client.answer() for _ in range(6)]
        assert [status for status, _, _ in answers] == [200, 200, 200, 200, 404, 200]
        assert [json.loads(body) for _, _, body in answers[:3]] == [{"status": "ok"}, {}, {}]
        assert "items" in json.loads(answers[3][2])
        client.ask("GET", "/healthz")
        assert (await client.answer())[0] == 200
    assert heard.bodies == [b"one", b"", b"two"]
    assert heard.connections == 1


async def test_thousands_of_requests_in_one_reading_are_all_answered() -> None:
    count = 3000
    for body in (b"", b"x"):
        async with a_stage(heard := Heard()) as stage:
            client = await stage.connect()
            client.ask("POST", INFER, body)  # the next heads equal this one
            assert (await client.answer())[0] == 200
            client.send(*[client.head("POST", INFER, len(body)).encode() + body] * count)
            assert [(await client.answer())[0] for _ in range(count)] == [200] * count
        assert heard.bodies == [body] * (count + 1)


async def test_a_large_body_goes_both_ways_as_it_came_and_the_connection_goes_on() -> None:
    sent = bytes(range(256)) * 20_000

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await a_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()

    async with a_stage(echo) as stage:
        client = await stage.connect()
        for _ in range(2):
            client.ask("POST", INFER, sent)
            assert (await client.answer())[2] == sent
            client.ask("GET", "/healthz")
            assert (await client.answer())[0] == 200


async def test_a_body_in_chunks_is_passed_on_in_fewer_chunks() -> None:
    async with a_stage(heard := Heard()) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, Transfer_Encoding="chunked"))
        client.send(*(b"1\r\n%c\r\n" % (97 + number % 26) for number in range(1000)), b"0\r\n\r\n")
        assert (await client.answer())[0] == 200
    chunks = heard.bodies[0].split(b"\r\n")
    assert b"".join(chunks[1::2]) == b"".join(b"%c" % (97 + number % 26) for number in range(1000))
    assert len(chunks) < 100


async def test_each_event_of_a_stream_is_passed_on_when_it_comes() -> None:
    go_on = asyncio.Event()

    async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for event in (b"one", b"two"):
            writer.write(b"3\r\n%b\r\n" % event)
            await go_on.wait()
            go_on.clear()
        writer.write(b"0\r\n\r\n")

    async with a_stage(streams) as stage, asyncio.timeout(PATIENCE_SECONDS):
        client = await stage.connect()
        client.ask("POST", "/v2/models/any/generate_stream", b"{}")
        await client.reader.readuntil(b"\r\n\r\n")
        seen = []
        async for chunk in client.chunks():
            seen.append(chunk)
            go_on.set()
        assert seen == [b"one", b"two"]


async def test_client_of_http_1_0_gets_a_stream_without_chunks_and_then_the_end() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    async with a_stage(Heard(answer)) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, 0).replace("HTTP/1.1", "HTTP/1.0"))
        status, headers, body = await client.answer()
        assert (status, body) == (200, b"onetwo")
        assert "transfer-encoding" not in headers


async def test_an_answer_that_ends_with_its_connection_ends_so_for_the_client() -> None:
    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nall of it")

    async with a_stage(closes) as stage:
        status, _, body = await stage.ask("GET", "/v2")
        assert (status, body) == (200, b"all of it")


async def test_interim_answers_are_not_taken_for_the_answer() -> None:
    async with a_stage(Heard(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)) as stage:
        client = await stage.connect()
        for _ in range(2):
            client.ask("POST", INFER, b"{}")
            assert (await client.answer())[0] == 200


async def test_expect_100_continue_is_answered_once_and_not_passed_on() -> None:
    async with a_stage(heard := Heard()) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, 3, Expect="100-continue"))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"xyz")
        assert (await client.answer())[0] == 200
    assert b"expect" not in heard.heads[0].lower()


async def test_a_refused_request_with_expect_100_continue_sends_no_body() -> None:
    async with a_stage(heard := Heard()) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, 10**6, Expect="100-continue", Authorization=""))
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (401, "close")
        assert await client.is_closed()
    assert heard.heads == []


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
async def test_an_offer_to_change_the_protocol_is_not_taken(upgrade: str) -> None:
    async with a_stage(heard := Heard()) as stage:
        client = await stage.connect()
        client.ask("POST", INFER, b"xyz", connection="upgrade, HTTP2-Settings", upgrade=upgrade)
        client.ask("GET", "/v2", connection="upgrade, HTTP2-Settings", upgrade=upgrade)
        client.ask("GET", "/healthz")
        assert [(await client.answer())[0] for _ in range(3)] == [200] * 3
    assert heard.bodies == [b"xyz", b""]
    assert not any(b"upgrade" in head.lower() for head in heard.heads)


async def test_an_answer_to_head_has_no_body_and_says_how_long_one_would_be() -> None:
    async with a_stage(Heard(b"HTTP/1.1 405 Not Allowed\r\nContent-Length: 30\r\n\r\n")) as stage:
        client = await stage.connect()
        client.send(client.head("HEAD", "/v2"), client.head("GET", "/healthz"))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405 ")
        assert b"Content-Length: 30\r\n" in head
        assert (await client.answer())[0] == 200


async def test_a_request_whose_client_has_gone_is_cancelled() -> None:
    came, gone = asyncio.Event(), asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        came.set()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        gone.set()

    async with a_stage(waits) as stage:
        client = await stage.connect()
        client.ask("POST", INFER, b"{}")
        await asyncio.wait_for(came.wait(), PATIENCE_SECONDS)
        client.writer.transport.abort()
        await asyncio.wait_for(gone.wait(), PATIENCE_SECONDS)


async def test_client_that_does_not_read_slows_the_server_and_then_gets_all() -> None:
    size, written = 64 * 2**20, 0

    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await a_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(64):
            writer.write(bytes(2**20))
            await writer.drain()
            written += 2**20

    async with a_stage(pours) as stage:
        client = await stage.connect()
        client.transport.pause_reading()
        client.ask("POST", INFER, b"{}")
        await standstill(lambda: written)
        assert 0 < written < size / 2
        client.transport.resume_reading()
        assert len((await client.answer())[2]) == size


async def test_server_that_does_not_read_slows_the_client_and_then_gets_all() -> None:
    size, go_on = 64 * 2**20, asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        _, body = await a_request(reader)
        writer.write(OK if len(body) == size else b"")

    async with a_stage(waits) as stage:
        client = await stage.connect()
        client.ask("POST", INFER, bytes(size))
        left = client.writer.transport.get_write_buffer_size
        await standstill(left)
        assert left() > size / 2
        go_on.set()
        assert (await client.answer())[0] == 200


async def test_a_client_that_sends_on_and_reads_nothing_is_paused() -> None:
    written = 0

    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        while True:
            await a_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n" + bytes(2**20))
            await writer.drain()
            written += 2**20

    async with a_stage(pours) as stage:
        client = await stage.connect()
        client.transport.pause_reading()
        for _ in range(100):
            client.ask("POST", INFER, b"{}")
        await standstill(lambda: written)
        assert 0 < written < 50 * 2**20
        client.transport.resume_reading()
        for _ in range(100):
            assert len((await client.answer())[2]) == 2**20


async def standstill(count: object) -> None:
    """Until nothing moves for a while: nobody says that he is held up."""
    assert callable(count)
    still, last = 0, -1
    async with asyncio.timeout(PATIENCE_SECONDS):
        while still < 20:
            await asyncio.sleep(0.01)
            still, last = (still + 1, last) if count() == last and last else (0, count())


async def test_requests_are_counted_by_their_route_and_model_names_are_no_labels() -> None:
    async with a_stage(Heard()) as stage:
        await stage.ask("POST", "/v2/models/mine/versions/3/infer", b"{}")
        await stage.ask("GET", "/v2/models/../secret/")
        client = await stage.connect()
        client.ask("POST", INFER, b"{}", Authorization="")
        assert (await client.answer())[0] == 401
        text = (await stage.gateway.admin.get("/metrics")).text
    counts = [line.partition("_count")[2] for line in text.splitlines() if "_count{" in line]
    assert sorted(count for count in counts if "/v2" in count) == [
        '{method="GET",route="/v2/unmatched",status="200"} 1.0',
        '{method="POST",route="/v2/models/{model}/infer",status="200"} 1.0',
        '{method="POST",route="/v2/models/{model}/infer",status="401"} 1.0',
    ]


async def test_a_server_behind_tls_is_asked_under_its_certificate() -> None:
    async with a_stage(heard := Heard(), certificate=Path(__file__).with_name("self_signed.pem")) as stage:
        sent = bytes(range(256)) * 4000
        assert (await stage.ask("POST", INFER, sent))[0] == 200
    assert heard.bodies == [sent]


async def test_server_connections_are_reused_and_limited() -> None:
    at_once, most, let_go = 0, 0, asyncio.Event()

    async def counts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal at_once, most
        while True:
            await a_request(reader)
            at_once += 1
            most = max(most, at_once)
            await let_go.wait()
            at_once -= 1
            writer.write(OK)

    async with a_stage(counts, connections=2) as stage:
        clients = [await stage.connect() for _ in range(5)]
        for client in clients:
            client.ask("POST", INFER, b"{}")
        await until(lambda: at_once == 2)
        let_go.set()
        assert [(await client.answer())[0] for client in clients] == [200] * 5
    assert most == 2


async def test_repeated_head_is_parsed_like_the_first_however_it_is_cut() -> None:
    """It does not matter what comes between the two."""
    async with a_stage(heard := Heard()) as stage:
        client = await stage.connect()
        head = client.head("POST", INFER, 3)
        other = client.head("POST", INFER + "?a", 4, X_Other="1")

        async def answered(*parts: str | bytes) -> None:
            client.send(*parts)
            assert (await client.answer())[0] == 200

        for word in (b"one", b"two"):
            await answered(head + word.decode())
        client.send(head[:30])
        await client.writer.drain()
        await answered(head[30:] + "six")
        await answered(other + "four")
        await answered(other + "five")
        await answered(client.head("GET", "/healthz"))
        client.send(head)
        await client.writer.drain()
        await answered(b"ten")
        client.send(head + "abc" + head + "def" + other + "four")
        assert [(await client.answer())[0] for _ in range(3)] == [200] * 3
        await answered(client.head("GET", "/v2/health/live"))
        await answered(client.head("GET", "/v2/health/live"))
    sent = [b"one", b"two", b"six", b"four", b"five", b"ten", b"abc", b"def", b"four", b"", b""]
    assert heard.bodies == sent
    assert heard.heads[1] == heard.heads[0]
    assert b"X-Other: 1" in heard.heads[4]


async def test_a_token_that_is_revoked_is_refused_on_a_connection_that_used_it() -> None:
    async with a_stage(Heard()) as stage:
        client = await stage.connect()
        token = await stage.token("models:infer")
        for _ in range(2):
            client.ask("POST", INFER, b"{}", Authorization=token)
            assert (await client.answer())[0] == 200
        await stage.gateway.store.drop_token("only-models:infer", by="test")
        await stage.gateway.parts.tokens.load()
        client.ask("POST", INFER, b"{}", Authorization=token)
        assert (await client.answer())[0] == 401
