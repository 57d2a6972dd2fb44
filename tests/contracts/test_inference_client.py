"""A server that answers inferences over HTTP as none should."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from gpubroker_server.adapters.triton.http_backend import TritonServer
from gpubroker_server.adapters.triton.inference_client import TritonInferenceClient
from gpubroker_server.core.serving.batching import InferenceRequest
from gpubroker_server.core.serving.tensors import Tensor, tensor_of
from gpubroker_server.ports.inferences import InferenceFailed, InferenceFault

from tests.patience import PATIENCE_SECONDS

MAX_BYTES = 100_000
QUESTION = InferenceRequest((tensor_of("x", "INT8", [1, 1], [1]),))


@asynccontextmanager
async def an_asker(head: bytes, piece: bytes) -> AsyncIterator[tuple[TritonInferenceClient, asyncio.Event]]:
    """Of a server that sends pieces for as long as somebody takes them; the event says that nobody does."""
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            writer.write(head)
            while True:
                writer.write(piece)
                await writer.drain()
        except OSError:
            left.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = TritonInferenceClient(TritonServer("lab", "127.0.0.1", port, b"lab"), MAX_BYTES)
    try:
        yield client, left
    finally:
        await client.close()
        server.close()


@pytest.mark.parametrize("length", [b"Transfer-Encoding: chunked", b"Content-Length: 1000000000000"])
async def test_no_more_of_an_answer_is_taken_than_may_be_kept(length: bytes) -> None:
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    piece = chunk if b"chunked" in length else b"x" * 0x8000
    async with an_asker(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n", piece) as (client, left):
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(InferenceFailed, match="more than 100000 bytes") as refusal:
                await client.infer("m", QUESTION)
            assert refusal.value.fault is InferenceFault.REFUSED
            await left.wait()


@asynccontextmanager
async def a_reader(bytes_a_turn: int) -> AsyncIterator[tuple[TritonInferenceClient, list[int]]]:
    """Of a server that reads slowly, says how much it has read, and refuses the request at its end."""
    read: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [line for line in head.lower().splitlines() if line.startswith(b"content-length:")]
        left = int(length.split()[1])
        while left:
            read.append(len(await reader.readexactly(min(left, bytes_a_turn))))
            left -= read[-1]
        writer.write(b"HTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\n{}")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = TritonInferenceClient(TritonServer("lab", "127.0.0.1", port, b"lab"), MAX_BYTES)
    try:
        yield client, read
    finally:
        await client.close()
        server.close()


async def test_an_object_is_read_as_the_server_takes_it() -> None:
    part, parts = bytes(2**20), 64
    ahead: list[int] = []
    async with a_reader(2**16) as (client, taken):

        async def read(digest: str, size_bytes: int) -> AsyncIterator[bytes]:
            assert (digest, size_bytes) == ("d1", parts * len(part))
            for number in range(parts):
                ahead.append(number * len(part) - sum(taken))
                yield part

        question = InferenceRequest(
            (Tensor("x", "INT8", (parts * len(part),), b"", "d1", parts * len(part)),)
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(InferenceFailed) as refusal:
                await client.infer("m", question, read)
        assert refusal.value.fault is InferenceFault.REFUSED
        assert sum(taken) > parts * len(part)
        assert max(ahead) < 32 * len(part), "what is not sent is not read either"


async def test_a_request_whose_object_is_gone_ends_without_its_last_byte() -> None:
    async with a_reader(2**16) as (client, _):

        async def read(_digest: str, _size_bytes: int) -> AsyncIterator[bytes]:
            yield b"half"
            raise InferenceFailed(InferenceFault.REFUSED, "it is gone")

        question = InferenceRequest((Tensor("x", "INT8", (8,), b"", "d1", 8),))
        with pytest.raises(InferenceFailed, match="it is gone"):
            await client.infer("m", question, read)
