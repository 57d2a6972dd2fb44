"""What connections may take from the port for calls, most of all those without a token: bare sockets."""

import asyncio
import contextlib

import grpc
import pytest
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.units import Seconds

from tests.gateway.call_stage import INFER, SERVICE, Heard, Stage, a_stage
from tests.gateway.harness import until
from tests.patience import PATIENCE_SECONDS

QUICK = ServiceLimits(head_bytes=8192, head_seconds=Seconds(0.5), connections=20, idle_seconds=1)

SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""How HTTP/2 begins."""

OF_ITS_OWN = (("grpc.use_local_subchannel_pool", 1),)
"""Else channels to one address share a connection."""

HEADERS, CONTINUATION, DATA = 1, 9, 0
END_HEADERS = 4


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + b"\x00\x00\x00\x01" + payload


def a_field(name: bytes, value: bytes) -> bytes:
    """Never indexed, and short."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def head_of(method: str) -> bytes:
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": (SERVICE + method).encode(),
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    return b"".join(a_field(*one) for one in fields.items())


async def connected(stage: Stage) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = stage.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    read = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                read += data
    return read


STRANGERS = {
    "nothing": b"",
    "half of the greeting": SETTINGS[:10],
    "no call": SETTINGS,
    "half a head": SETTINGS + frame(HEADERS, 0, head_of("ModelInfer")),
    "a call without its message": SETTINGS + frame(HEADERS, END_HEADERS, head_of("ModelInfer")),
    "a health check without its message": SETTINGS + frame(HEADERS, END_HEADERS, head_of("ServerLive")),
    "too long a head": SETTINGS
    + frame(HEADERS, 0, head_of("ServerLive"))
    + frame(CONTINUATION, END_HEADERS, a_field(b"x", b"y" * 100) * 400),
}


@pytest.mark.parametrize("what", STRANGERS)
async def test_a_connection_without_calls_is_closed(what: str) -> None:
    async with a_stage(heard := Heard(), limits=QUICK) as stage:
        reader, writer = await connected(stage)
        writer.write(STRANGERS[what])
        await read_to_end(reader)
        writer.close()
        assert len(heard.metadata) == (what == "a health check without its message")
        assert await stage.ask(INFER, b"abc") == b"abc"


async def test_a_message_without_end_is_not_read_without_a_token() -> None:
    """More than the window of its stream is refused by the library, as HTTP/2 has it."""
    pieces = [b"\x00" + (2**30).to_bytes(4, "big"), *[b"x" * 16_000] * 200]
    async with a_stage(heard := Heard()) as stage:
        reader, writer = await connected(stage)
        writer.write(SETTINGS + frame(HEADERS, END_HEADERS, head_of("ServerLive")))
        await until(lambda: len(heard.metadata) == 1)
        writer.write(b"".join(frame(DATA, 0, piece) for piece in pieces))
        writer.write_eof()
        assert b"grpc-status" in await read_to_end(reader)
        writer.close()
    assert heard.messages == [b""]


async def test_connections_have_a_limit_and_those_with_calls_stay() -> None:
    async with a_stage(Heard(), limits=QUICK) as stage:
        call = stage.open()
        await call.write(b"one")
        assert await call.read() == b"one"
        strangers = [await connected(stage) for _ in range(QUICK.connections)]
        async with grpc.aio.insecure_channel(stage.address, OF_ITS_OWN) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(INFER)(b"", metadata=stage.own)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.gather(*(read_to_end(reader) for reader, _ in strangers))
        await call.write(b"two")
        assert await call.read() == b"two"
        async with grpc.aio.insecure_channel(stage.address, OF_ITS_OWN) as channel:
            assert await channel.unary_unary(INFER)(b"abc", metadata=stage.own, wait_for_ready=True) == b"abc"
        for _, writer in strangers:
            writer.close()
