"""What the data plane says itself: who may not ask, and that a server is away, silent or talks nonsense."""

import asyncio
import contextlib
import json
from typing import Any

import pytest
from gpubroker_server.inference.lanes import LaneOptions, Lanes
from gpubroker_server.inference.protocols.triton.operations import http_target
from gpubroker_server.inference.protocols.triton_http.exchange import DRAIN_STRANGER_BYTES
from structlog.testing import capture_logs

from tests.gateway.harness import until
from tests.gateway.inference_stage import INFER, OK, Heard, a_request, a_stage
from tests.patience import PATIENCE_SECONDS

Answered = tuple[int, dict[str, str], bytes]


def refused(answered: Answered, status: int, code: str) -> dict[str, Any]:
    """A refusal in Triton's form, which must be of this status and code."""
    found, headers, body = answered
    assert found == status, body
    assert headers["content-type"] == "application/json"
    document: dict[str, Any] = json.loads(body)
    assert document["code"] == code
    assert document["request_id"] == headers["request-id"]
    assert document["retryable"] is ("retry-after" in headers)
    return document


async def test_a_request_without_a_token_is_refused_and_says_which_one_to_send() -> None:
    async with a_stage(heard := Heard()) as stage:
        answered = await stage.ask("GET", "/v2", Authorization="")
        assert "Authorization: Bearer" in refused(answered, 401, "unauthenticated")["error"]
        assert answered[1]["www-authenticate"] == 'Bearer realm="gpubroker"'
        refused(await stage.ask("GET", "/v2", Authorization="Bearer gpb_no"), 401, "unauthenticated")
    assert heard.heads == []


async def test_server_health_may_be_asked_by_everybody_under_an_allowed_host() -> None:
    async with a_stage(Heard()) as stage:
        assert (await stage.ask("GET", "/v2/health/ready", Authorization=""))[0] == 200
        refused(await stage.ask("GET", "/v2/health/ready", Host="evil.example"), 421, "host-not-allowed")


MANAGED = (
    ("POST", "/v2/repository/models/m/load"),
    ("POST", "/v2/repository/models/m/unload"),
    ("POST", "/v2/repository/r/models/m/load"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/trace/setting"),
    ("POST", "/v2/models/m/trace/setting"),
    ("POST", "/v2/repository/models/m/load?a=b"),
    ("POST", "/v2/repository/models/m/load#a"),
    ("POST", "/v2/whatever/comes"),
)
ASKED = (
    ("GET", "/v2"),
    ("GET", "/v2?a=b"),
    ("GET", "/v2/models/m"),
    ("GET", "/v2/models/m/versions/1/ready"),
    ("POST", "/v2/models/m/generate_stream"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/repository/index"),
    ("GET", "/v2/trace/setting"),
    ("GET", "/v2/models/m/trace/setting"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/whatever"),
)


async def test_asking_and_managing_models_need_a_scope_each() -> None:
    async with a_stage(heard := Heard()) as stage:
        asks, manages = await stage.token("models:infer"), await stage.token("models:manage")
        for allowed, denied, paths in ((asks, manages, ASKED), (manages, asks, MANAGED)):
            for method, path in paths:
                body = b"{}" if method == "POST" else None
                assert (await stage.ask(method, path, body, Authorization=allowed))[0] == 200
                error = refused(await stage.ask(method, path, body, Authorization=denied), 403, "forbidden")
                assert "lacks the scope models:" in error["error"]
    assert len(heard.heads) == len(ASKED) + len(MANAGED)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/m/infer/",
        "/v2/models/m/versions/one/infer",
        "/v2/models/m//infer",
        "/v2/health",
        "/v2/repository/models/a/b/load",
        "/v2/",
    ],
)
def test_paths_that_triton_does_not_match_name_no_model(path: str) -> None:
    target = http_target(b"POST", path.encode())
    assert (target.model, target.operation.name) == (b"", "/v2/unmatched")


def test_a_model_may_be_called_like_a_part_of_a_path() -> None:
    assert http_target(b"GET", b"/v2/models/stats").model == b""
    assert http_target(b"GET", b"/v2/models/ready").model == b"ready"
    assert http_target(b"POST", b"/v2/models/a%2Fb/versions/1/infer").model == b"a/b"


@pytest.mark.parametrize("kind", ["systemsharedmemory", "cudasharedmemory"])
@pytest.mark.parametrize("act", ["register", "unregister"])
async def test_shared_memory_is_refused_in_tritons_own_words(kind: str, act: str) -> None:
    async with a_stage(Heard()) as stage:
        for path in (f"/v2/{kind}/region/in0/{act}", f"/v2/{kind}/{act}"):
            error = refused(await stage.ask("POST", path, b"{}"), 501, "shared-memory-disabled")["error"]
            assert error == (
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            )


async def test_a_refused_request_is_heard_to_its_end_and_the_connection_goes_on() -> None:
    async with a_stage(heard := Heard()) as stage:
        client = await stage.connect()
        client.ask("POST", INFER, bytes(DRAIN_STRANGER_BYTES), Authorization="")
        client.ask("POST", "/v2/repository/models/m/load", bytes(4 * DRAIN_STRANGER_BYTES), Host="evil")
        refused(await client.answer(), 401, "unauthenticated")
        refused(await client.answer(), 421, "host-not-allowed")
        assert await client.is_closed()
    assert heard.heads == []


async def test_a_known_client_may_send_more_before_it_is_refused() -> None:
    async with a_stage(Heard(), most_body_bytes=10) as stage:
        client = await stage.connect()
        client.ask("POST", INFER, bytes(32 * 2**20))
        error = refused(await client.answer(), 413, "payload-too-large")["error"]
        assert "10 bytes and this one has 33554432 or more" in error
        client.ask("POST", INFER, b"0123456789")
        assert (await client.answer())[0] == 200


async def test_a_body_in_chunks_is_counted_and_refused_where_it_is_too_long() -> None:
    async with a_stage(heard := Heard(), most_body_bytes=10) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, Transfer_Encoding="chunked"), b"8\r\n01234567\r\n")
        await until(lambda: heard.connections == 1)
        client.send(b"8\r\n01234567\r\n", b"0\r\n\r\n")
        refused(await client.answer(), 413, "payload-too-large")
        client.ask("POST", INFER, b"0123456789")
        assert (await client.answer())[0] == 200
    assert heard.bodies == [b"0123456789"]


async def test_only_chunks_are_understood_as_an_encoding_of_the_transfer() -> None:
    async with a_stage(Heard()) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, Transfer_Encoding="gzip, chunked"), b"0\r\n\r\n")
        refused(await client.answer(), 415, "unsupported-media-type")


async def test_a_head_that_triton_would_choke_on_is_refused() -> None:
    async with a_stage(heard := Heard()) as stage:
        error = refused(await stage.ask("POST", INFER, b"{}", Cookie="c" * 8000), 431, "headers-too-large")
        assert "of which Triton takes 8000" in error["error"]
        assert (await stage.ask("POST", INFER, b"{}", Cookie="c" * 7000))[0] == 200
    assert len(heard.heads) == 1


async def test_two_requests_in_one_cannot_be_smuggled() -> None:
    async with a_stage(heard := Heard()) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, 5, Transfer_Encoding="chunked"), b"0\r\n\r\nGET /v2 HTTP")
        assert (await client.answer())[0] == 400
        assert await client.is_closed()
    assert heard.heads == []


async def test_an_unreachable_server_is_reported_at_once_and_nothing_was_sent() -> None:
    async with a_stage(None) as stage:
        with capture_logs() as logs:
            error = refused(await stage.ask("POST", INFER, b"{}"), 503, "model-server-unavailable")
        assert "model server main cannot be reached" in error["error"]
        [line] = logs
        assert (line["server"], line["request"]) == ("main", error["request_id"])
        refused(await stage.ask("POST", INFER, bytes(32 * 2**20)), 503, "model-server-unavailable")


@pytest.mark.parametrize(
    "said",
    [b"", b"HTTP/1.1 200 OK\r\nContent-", b"nonsense\r\n\r\n", b"HTTP/1.1 101 Go\r\nUpgrade: x\r\n\r\n"],
)
async def test_half_a_head_or_nonsense_is_no_answer(said: bytes) -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        writer.write(said)

    async with a_stage(breaks) as stage:
        client = await stage.connect()
        for _ in range(2):
            client.ask("POST", INFER, b"{}")
            error = refused(await client.answer(), 502, "model-server-failed")["error"]
            assert "may have done it" in error


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
async def test_an_answer_that_breaks_off_breaks_off_for_the_client(framing: bytes) -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n3\r\none\r\n")
        await writer.drain()

    async with a_stage(breaks) as stage:
        client = await stage.connect()
        client.ask("POST", INFER, b"{}")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
            await client.answer()


async def test_a_silent_server_is_given_up_and_its_connection_is_closed() -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        try:
            await reader.read()
        finally:
            gone.set()

    async with a_stage(silent, silence_seconds=0.2) as stage:
        refused(await stage.ask("POST", INFER, b"{}"), 504, "model-server-silent")
        await asyncio.wait_for(gone.wait(), PATIENCE_SECONDS)


async def test_a_client_that_reads_slowly_does_not_make_a_server_silent() -> None:
    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n" + bytes(20_000_000))

    async with a_stage(pours, silence_seconds=0.1) as stage:
        client = await stage.connect()
        client.transport.pause_reading()
        client.ask("POST", INFER, b"{}")
        await asyncio.sleep(0.4)  # what is tried is that nothing happens
        client.transport.resume_reading()
        assert len((await client.answer())[2]) == 20_000_000


async def test_a_client_that_sends_slowly_does_not_make_a_server_silent() -> None:
    async with a_stage(heard := Heard(), silence_seconds=0.1) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, 4), b"ab")
        await asyncio.sleep(0.3)  # what is tried is that nothing happens
        client.send(b"cd")
        assert (await client.answer())[0] == 200
    assert heard.bodies == [b"abcd"]


async def test_answer_before_the_end_of_the_request_is_passed_on_and_disconnects() -> None:
    """The connection to the server is not used again."""

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async with a_stage(hasty) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, 10), b"01234")
        assert (await client.answer())[0] == 404
        client.send(b"56789")
        client.ask("POST", INFER, b"{}")
        assert (await client.answer())[0] == 404


async def test_too_many_requests_that_wait_for_a_connection_are_refused() -> None:
    came, go_on = asyncio.Event(), asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await a_request(reader)
            came.set()
            await go_on.wait()
            writer.write(OK)

    with capture_logs() as logs:
        lanes = Lanes(LaneOptions(slots={b"any": 100}))
        async with a_stage(waits, connections=1, lanes=lanes) as stage:
            first = await stage.connect()
            first.ask("POST", INFER, b"{}")
            await asyncio.wait_for(came.wait(), PATIENCE_SECONDS)
            clients = [await stage.connect() for _ in range(19)]
            for client in clients:
                client.ask("POST", INFER, b"{}")
            answers = asyncio.gather(*(client.answer() for client in clients))
            await until(lambda: [line["event"] for line in logs].count("no answer from Triton") == 3)
            go_on.set()
            statuses = sorted(status for status, _, _ in await answers)
            assert statuses == [200] * 16 + [503] * 3


async def test_a_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        writer.write(OK)

    async with a_stage(once) as stage:
        client = await stage.connect()
        for _ in range(5):
            client.ask("POST", INFER, b"{}")
            assert (await client.answer())[0] == 200
            await until(lambda: not stage.backend._connections)


async def test_an_internal_error_is_reported_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_stage(Heard()) as stage:
        monkeypatch.setattr(stage.backend, "ask", None)
        with capture_logs() as logs:
            error = refused(await stage.ask("POST", INFER, b"{}"), 500, "internal-error")
        assert logs[0]["request"] == error["request_id"]


@pytest.mark.parametrize("start", [b"0\r\nX: ", b"5;x="])
async def test_trailers_and_extensions_of_chunks_without_end_are_cut_off(start: bytes) -> None:
    async with a_stage(Heard()) as stage:
        client = await stage.connect()
        client.send(client.head("POST", INFER, Transfer_Encoding="chunked"), start)
        with contextlib.suppress(ConnectionError):
            for _ in range(400):
                client.send(b"x" * 65536)
                await client.writer.drain()
        assert await client.is_closed()


async def test_a_body_that_gets_too_long_while_it_is_answered_is_cut_off() -> None:
    """A second head in the middle of the answer would be taken for a part of it."""

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        await reader.read()

    async with a_stage(early, most_body_bytes=1000) as stage:
        connection = await stage.connect()
        connection.send(connection.head("POST", INFER, Transfer_Encoding="chunked"), "1\r\nx\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await connection.reader.readuntil(b"2\r\n{}\r\n")
        connection.send("7d0\r\n", "x" * 2000, "\r\n")
        assert await connection.is_closed()
