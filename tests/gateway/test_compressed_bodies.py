"""Bodies with a Content-Encoding pass as they came, unless they inflate to more than a body may have."""

import gzip
import zlib

import grpc
import pytest

from tests.gateway import call_stage
from tests.gateway.inference_stage import INFER, Heard, a_stage

MAX_BYTES = 2**20
TENSOR = bytes(range(256)) * 4096


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_body_arrives_as_it_came(encoding: str) -> None:
    body = gzip.compress(TENSOR) if encoding == "gzip" else zlib.compress(TENSOR)
    async with a_stage(heard := Heard(), most_body_bytes=MAX_BYTES) as stage:
        for _ in range(2):
            assert (await stage.ask("POST", INFER, body, Content_Encoding=encoding))[0] == 200
        client = await stage.connect()
        client.send(client.head("POST", INFER, Content_Encoding=encoding, Transfer_Encoding="chunked"))
        client.send(*(b"1\r\n%c\r\n" % byte for byte in body), b"0\r\n\r\n")
        assert (await client.answer())[0] == 200
        client.ask("POST", INFER, b"", Content_Encoding=encoding)
        assert (await client.answer())[0] == 200
    assert heard.bodies[:2] == [body, body]
    assert f"Content-Encoding: {encoding}".encode() in heard.heads[0]


async def test_a_large_compressed_body_goes_on_while_it_comes() -> None:
    random = b"".join(zlib.crc32(b"%d" % n).to_bytes(4, "big") for n in range(2**19))
    body = gzip.compress(random, 1)
    async with a_stage(heard := Heard()) as stage:
        client = await stage.connect()
        for _ in range(2):
            client.ask("POST", INFER, body, Content_Encoding="gzip")
            assert (await client.answer())[0] == 200
    assert heard.bodies == [body, body]


BOMBS = {
    "one": gzip.compress(bytes(MAX_BYTES + 1)),
    "of several members": gzip.compress(bytes(MAX_BYTES)) + gzip.compress(b"x"),
    "larger": gzip.compress(bytes(200 * MAX_BYTES)),
}


@pytest.mark.parametrize("what", BOMBS)
async def test_a_body_that_inflates_to_too_much_is_refused(what: str) -> None:
    async with a_stage(heard := Heard(), most_body_bytes=MAX_BYTES) as stage:
        status, _, answer = await stage.ask("POST", INFER, BOMBS[what], Content_Encoding="gzip")
        assert (status, b"payload-too-large" in answer) == (413, True)
        client = await stage.connect()
        client.send(client.head("POST", INFER, Content_Encoding="gzip", Transfer_Encoding="chunked"))
        client.send(b"%x\r\n%b\r\n" % (len(BOMBS[what]), BOMBS[what]))
        client.send(b"0\r\n\r\n")
        assert (await client.answer())[0] == 413
        client.ask("GET", "/healthz")
        assert (await client.answer())[0] == 200
    assert heard.bodies == []


async def test_a_body_that_is_not_what_it_says_is_refused() -> None:
    async with a_stage(heard := Heard()) as stage:
        for encoding, body in (
            ("gzip", b"{}"),
            ("gzip", gzip.compress(b"{}") + b"{}"),
            ("x-gzip", b"{}"),
            ("gzip, gzip", gzip.compress(gzip.compress(b"{}"))),
        ):
            status, _, answer = await stage.ask("POST", INFER, body, Content_Encoding=encoding)
            assert (status, b"unsupported-media-type" in answer) == (415, True), encoding
        client = await stage.connect()
        client.ask("POST", INFER, b"{}", Content_Encoding="gzip", content_encoding="br")
        assert (await client.answer())[0] == 415
        for encoding in ("identity", "br"):
            assert (await stage.ask("POST", INFER, b"{}", Content_Encoding=encoding))[0] == 200
    assert heard.bodies == [b"{}", b"{}"]


async def test_a_compressed_message_over_grpc_may_not_inflate_to_more_either() -> None:
    async with call_stage.a_stage(heard := call_stage.Heard(), most_body_bytes=MAX_BYTES) as stage:
        compressing = {"compression": grpc.Compression.Gzip, "metadata": stage.own}
        infer = stage.channel.unary_unary(call_stage.INFER)
        assert await infer(TENSOR[: MAX_BYTES // 2], **compressing) == TENSOR[: MAX_BYTES // 2]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await infer(bytes(200 * MAX_BYTES), **compressing)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert heard.messages == [TENSOR[: MAX_BYTES // 2]]


async def test_a_server_that_is_away_is_told_of_when_the_body_is_there() -> None:
    async with a_stage(None) as stage:
        status, _, answer = await stage.ask("POST", INFER, gzip.compress(TENSOR), Content_Encoding="gzip")
    assert (status, b"model-server-unavailable" in answer) == (503, True)
