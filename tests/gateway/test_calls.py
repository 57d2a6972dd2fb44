"""What becomes of a call over gRPC on its way to a server of models, and of how it ends."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from itertools import repeat
from pathlib import Path

import grpc
import pytest
from gpubroker_server.inference.lanes import LaneOptions, Lanes

from tests.gateway.call_stage import INFER, SERVICE, STREAM, Heard, Stage, a_stage
from tests.gateway.harness import until
from tests.gateway.inference_stage import Heard as HeardOverHttp
from tests.gateway.inference_stage import a_stage as an_http_stage
from tests.gateway.protobuf import field
from tests.patience import PATIENCE_SECONDS

Status = grpc.StatusCode
CERTIFICATE = Path(__file__).with_name("self_signed.pem").read_bytes()


async def test_metadata_go_both_ways_but_for_the_token() -> None:
    async with a_stage(heard := Heard()) as stage:
        call = stage.ask(INFER, b"abc", (*stage.own, ("x-a", "b"), ("x-c-bin", b"\x00\x01")))
        assert await call == b"abc"
        [got] = heard.metadata
        assert (got["authorization"], got["x-a"], got["x-c-bin"]) == ("Bearer theirs", "b", b"\x00\x01")
        assert dict(await call.initial_metadata()) == {"x-first": "1"}
        last = dict(await call.trailing_metadata())
        assert last.pop("request-id").startswith("req_")
        assert last == {"x-last-bin": b"\x00\xff"}


async def test_without_credentials_for_the_server_it_gets_none() -> None:
    async with a_stage(heard := Heard(), metadata=()) as stage:
        await stage.ask(INFER)
        assert "authorization" not in heard.metadata[0]


async def test_a_clients_deadline_is_the_servers() -> None:
    async with a_stage(heard := Heard()) as stage:
        await stage.ask(INFER, seconds=50)
        call = stage.open(seconds=40)
        await call.done_writing()
        assert [message async for message in call] == []
        assert 40 < (heard.seconds[0] or 0) < 51
        assert 30 < (heard.seconds[1] or 0) < 41


async def test_a_stream_without_a_deadline_has_none() -> None:
    async with a_stage(heard := Heard()) as stage:
        call = stage.open()
        for word in (b"one", b"two"):
            await call.write(word)
            assert await call.read() == word
        assert heard.seconds == [None]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert dict(await call.trailing_metadata())["x-last-bin"] == b"\x00\xff"


@pytest.mark.parametrize("method", [INFER, STREAM])
async def test_a_client_that_leaves_is_one_that_the_server_hears_of(method: str) -> None:
    began = asyncio.Event()
    gone = asyncio.Event()

    async def waits(_messages: AsyncIterator[bytes], _context: grpc.aio.ServicerContext) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    async with a_stage(waits) as stage, asyncio.timeout(PATIENCE_SECONDS):
        call = stage.ask(method) if method == INFER else stage.open()
        if method == STREAM:
            await call.write(b"")
        await began.wait()
        call.cancel()
        await gone.wait()


async def test_the_status_of_a_call_is_passed_on_unchanged() -> None:
    async def ends(_messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.abort(Status.ALREADY_EXISTS, "wörtlich: so", (("x-why", "w"),))

    async with a_stage(ends) as stage:
        for method in (INFER, STREAM):
            error = await stage.refusal(method)
            assert (error.code(), error.details()) == (Status.ALREADY_EXISTS, "wörtlich: so")
            assert dict(error.trailing_metadata())["x-why"] == "w"


async def test_client_gets_the_status_of_a_stream_the_server_ends_during_a_write() -> None:
    async def ends(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await anext(messages)
        await context.abort(Status.NOT_FOUND, "no such model")

    def how_it_ends(stage: Stage) -> tuple[object, ...]:
        with grpc.insecure_channel(stage.address) as channel:
            call = channel.stream_stream(STREAM)(repeat(b"x" * 1000), metadata=stage.own)
            try:
                return next(call), "was answered"
            except grpc.RpcError as error:
                return error.code(), error.details()

    async with a_stage(ends) as stage:
        for _ in range(20):
            assert await asyncio.to_thread(how_it_ends, stage) == (Status.NOT_FOUND, "no such model")


async def test_a_call_without_a_token_is_refused_before_a_message_is_read() -> None:
    async with a_stage(heard := Heard()) as stage:
        for method in (INFER, STREAM, SERVICE + "ServerMetadata"):
            error = await stage.refusal(method, b"x" * 10_000_000, metadata=())
            assert error.code() is Status.UNAUTHENTICATED
            assert "send Authorization: Bearer" in str(error.details())
            assert dict(error.trailing_metadata())["code"] == "unauthenticated"
        assert heard.metadata == []
        for open_to_all in (SERVICE + "ServerLive", SERVICE + "ServerReady", "/grpc.health.v1.Health/Check"):
            assert await stage.ask(open_to_all, metadata=()) == b""


async def test_each_call_needs_its_scope() -> None:
    setting = field(1, field(1, "log_verbose_level"))
    async with a_stage(heard := Heard()) as stage:
        infers, manages = await stage.token("models:infer"), await stage.token("models:manage")
        for name in ("ModelInfer", "ModelConfig", "RepositoryIndex", "TraceSetting", "LogSettings"):
            await stage.ask(SERVICE + name, field(2, "any"), infers)
        for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
            await stage.ask(SERVICE + name, b"", manages)
            error = await stage.refusal(SERVICE + name, metadata=infers)
            assert error.code() is Status.PERMISSION_DENIED
        for name in ("TraceSetting", "LogSettings"):
            error = await stage.refusal(SERVICE + name, setting, metadata=infers)
            assert "lacks the scope models:manage" in str(error.details())
            assert await stage.ask(SERVICE + name, setting) == setting
        assert (await stage.refusal(INFER, metadata=manages)).code() is Status.PERMISSION_DENIED
        assert len(heard.metadata) == 9


LOADS = {
    "nothing": (b"", False),
    "a model": (field(2, "any"), False),
    "a configuration": (field(2, "any") + field(3, field(1, "config") + field(2, field(3, "{}"))), False),
    "a file": (field(2, "any") + field(3, field(1, "file:1/model.py") + field(2, field(4, b"code"))), True),
    "a file of two keys": (field(3, field(1, "file:a") + field(1, "config")), True),
    "a file among others": (field(3, field(1, "config")) + field(3, field(1, "file:a")), True),
    "a number for a pair": (field(3, 1), True),
    "a number for a key": (field(3, field(1, 1)), True),
    "no message": (b"\xff", True),
}


@pytest.mark.parametrize("what", LOADS)
async def test_a_load_brings_files_only_where_that_is_allowed(what: str) -> None:
    message, brings_files = LOADS[what]
    method = SERVICE + "RepositoryModelLoad"
    async with a_stage(Heard()) as stage:
        if brings_files:
            error = await stage.refusal(method, message)
            assert error.code() is Status.PERMISSION_DENIED
            assert dict(error.trailing_metadata())["code"] == "load-files-disabled"
        else:
            assert await stage.ask(method, message) == message
    async with a_stage(Heard(), takes_files=True) as stage:
        assert await stage.ask(method, message) == message


async def test_an_unreachable_server_is_reported_as_one_that_was_sent_nothing() -> None:
    async with a_stage(None) as stage:
        for method in (INFER, STREAM):
            error = await stage.refusal(method)
            assert error.code() is Status.UNAVAILABLE
            assert "main cannot be reached and was sent nothing" in str(error.details())
            assert dict(error.trailing_metadata())["retry-after"] == "1"


async def test_silent_server_is_given_up_and_a_client_with_less_time_hears_of_it() -> None:
    """The client with less time is told of its own deadline."""

    async def waits(_messages: AsyncIterator[bytes], _context: grpc.aio.ServicerContext) -> None:
        await asyncio.Event().wait()

    async with a_stage(waits, silence_seconds=0.2) as stage:
        error = await stage.refusal(INFER)
        assert error.code() is Status.DEADLINE_EXCEEDED
        assert "gave no answer and may still do it" in str(error.details())
        error = await stage.refusal(INFER, seconds=0.05)
        assert (error.code(), error.details()) == (Status.DEADLINE_EXCEEDED, "Deadline Exceeded")


async def test_a_server_behind_tls_is_believed_by_its_certificate() -> None:
    async with a_stage(Heard(), certificate=CERTIFICATE) as stage:
        assert await stage.ask(INFER, b"abc") == b"abc"


@pytest.mark.parametrize(
    "method",
    [
        SERVICE + "Unheard",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.health.v1.Health/Watch",
    ],
)
async def test_an_unknown_call_is_unimplemented_with_and_without_a_token(method: str) -> None:
    async with a_stage(heard := Heard()) as stage:
        infers = await stage.token("models:infer")
        for metadata in ((), infers, stage.own):
            error = await stage.refusal(method, metadata=metadata)
            assert error.code() is Status.UNIMPLEMENTED
            assert method in str(error.details())
        assert heard.messages == []


@pytest.mark.parametrize("value", ["maybe", "1", ""])
async def test_a_call_that_is_idempotent_or_not_says_so_with_true_or_false(value: str) -> None:
    async with a_stage(heard := Heard()) as stage:
        error = await stage.refusal(INFER, metadata=(*stage.own, ("x-idempotent", value)))
        assert error.code() is Status.INVALID_ARGUMENT
        assert f'the header x-idempotent is "{value}"; write true or false' in str(error.details())
        assert heard.messages == []
        assert await stage.ask(INFER, b"abc", metadata=(*stage.own, ("x-idempotent", "False"))) == b"abc"


async def test_calls_are_counted_by_name_and_end() -> None:
    async with a_stage(Heard()) as stage:
        await stage.ask(INFER)
        await stage.refusal("/any.Other/Call", metadata=())
        told = (await stage.gateway.admin.get("/metrics")).text
    for labels in ('code="OK",method="ModelInfer"', 'code="UNIMPLEMENTED",method="unmatched"'):
        assert f"gpubroker_grpc_call_duration_seconds_count{{{labels}}} 1.0" in told


BODIES = {
    b"": 200,
    b"{}": 200,
    b'{"parameters":{"config":"{}"}}': 200,
    b'{"parameters":{"config":"{}","file:1/model.py":"AAAA"}}': 403,
    b'{"parameters":{"\\u0066ile:1/model.py":"AAAA"}}': 403,
    b'{"parameters":{"file:a":"A"},"parameters":{}}': 403,
    b"\xef\xbb\xbf{}": 403,
    b'{"parameters":{"config":"\xff"}}': 200,
    b"[" * 100_000: 403,
    b" " * 2**20 + b"{}": 413,
}


async def test_a_load_over_http_brings_no_files_either() -> None:
    path = "/v2/repository/models/any/load"
    async with an_http_stage(heard := HeardOverHttp()) as stage:
        for body, expected in BODIES.items():
            status, _, _ = await stage.ask("POST", path, body)
            assert status == expected, body[:60]
        client = await stage.connect()
        client.send(client.head("POST", path, Transfer_Encoding="chunked"), "2\r\n{}\r\n0\r\n\r\n")
        assert (await client.answer())[0] == 200
        client.send(client.head("POST", path, Transfer_Encoding="chunked"))
        client.send(*(b"10000\r\n" + b" " * 2**16 + b"\r\n" for _ in range(17)), b"0\r\n\r\n")
        assert (await client.answer())[0] == 413
        client = await stage.connect()
        client.send(client.head("POST", path, 2, Expect="100-continue"))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"{}")
        assert (await client.answer())[0] == 200
    allowed = [body for body, status in BODIES.items() if status == 200]
    assert heard.bodies == [*allowed, b"2\r\n{}\r\n0\r\n\r\n", b"{}"]


def naming(model: str) -> bytes:
    """A request of that model, under a name of another one that does not count."""
    return field(1, "other") + field(3, b"id") + field(1, model)


class Model:
    """Answers a request with itself, when it is told to."""

    def __init__(self) -> None:
        self.began: list[bytes] = []
        self._ends: dict[bytes, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        assert "x-priority" not in dict(context.invocation_metadata())
        async for message in messages:
            self.began.append(message)
            await self._ends[message].wait()
            await context.write(message)

    async def begins(self, message: bytes) -> None:
        await until(lambda: message in self.began)

    def end(self, message: bytes) -> None:
        self._ends[message].set()


async def test_calls_wait_for_a_slot_of_the_model_that_their_message_names() -> None:
    lanes, model = Lanes(LaneOptions(slots={b"m": 1})), Model()
    first, low, high, gone = (naming("m") + field(2, name) for name in ("1", "low", "high", "gone"))
    async with a_stage(model, lanes=lanes) as stage:
        calls = {first: stage.ask(INFER, first)}
        await model.begins(first)
        for number, (message, priority) in enumerate(((low, "10"), (gone, "50"), (high, "critical")), 1):
            calls[message] = stage.ask(INFER, message, (*stage.own, ("x-priority", priority)))
            await until(lambda count=number: sum(it.waiting for it in lanes.figures()) == count)  # type: ignore[misc]
        calls[gone].cancel()
        await until(lambda: sum(it.waiting for it in lanes.figures()) == 2)
        for message in (first, high, low):
            await model.begins(message)
            model.end(message)
            assert await calls[message] == message
        told = [dict(await calls[message].trailing_metadata()) for message in (first, high, low)]
        assert ["x-queue-seconds" in last for last in told] == [False, True, True]
        assert [last.get("x-priority") for last in told] == [None, "50", None]
    assert model.began == [first, high, low]
    assert not list(lanes.figures())


async def test_a_call_that_gets_no_slot_in_time_says_when_to_retry() -> None:
    model = Model()
    async with a_stage(model, lanes=Lanes(LaneOptions(slots={b"m": 1}))) as stage:
        first = stage.ask(INFER, naming("m"))
        await model.begins(naming("m"))
        error = await stage.refusal(INFER, naming("m"), metadata=(*stage.own, ("x-timeout-seconds", "0.01")))
        told = dict(error.trailing_metadata() or ())
        assert error.code() is Status.UNAVAILABLE
        assert (told["code"], told["x-queue-position"], told["retry-after"]) == (
            "model-queue-timeout",
            "1",
            "1",
        )
        error = await stage.refusal(INFER, naming("m"), metadata=(*stage.own, ("x-priority", "most")))
        assert error.code() is Status.INVALID_ARGUMENT
        model.end(naming("m"))
        assert await first == naming("m")


async def test_bytes_that_are_no_message_name_no_model() -> None:
    async with a_stage(Heard()) as stage:
        assert await stage.ask(INFER, b"\xff") == b"\xff"
