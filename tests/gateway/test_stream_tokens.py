"""A stream over gRPC may go on as long as its token may: each message is checked as a call of its own is."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.http.identity import new_token
from gpubroker_server.inference.protocols.triton_grpc.streams import TOKEN_SECONDS

from tests.gateway.call_stage import STREAM, Heard, Stage, a_stage
from tests.gateway.protobuf import field
from tests.patience import PATIENCE_SECONDS


async def opened(stage: Stage, expires_in_seconds: float | None = None) -> grpc.aio.StreamStreamCall:
    """Its first message, which names the model `a`, is answered."""
    now = stage.gateway.clock.now()
    expires_at = None if expires_in_seconds is None else Instant(now + expires_in_seconds)
    secret, row = new_token(
        "guest", tenant="default", scopes=["models:infer"], max_priority=50, now=now, expires_at=expires_at
    )
    await stage.gateway.store.put_token(row, by="test")
    await stage.gateway.parts.tokens.load()
    call = stage.channel.stream_stream(STREAM)(metadata=(("authorization", f"Bearer {secret}"),))
    await call.write(field(1, "a"))
    assert await call.read() == field(1, "a")
    return call


async def revoke(stage: Stage) -> None:
    await stage.gateway.store.drop_token("guest", by="test")
    await stage.gateway.parts.tokens.load()


async def how_it_ends(call: grpc.aio.StreamStreamCall) -> grpc.StatusCode:
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert dict(refused.value.trailing_metadata())["code"] == "unauthenticated"
    code: grpc.StatusCode = refused.value.code()
    return code


async def test_a_message_after_the_token_was_revoked_reaches_no_server() -> None:
    async with a_stage(heard := Heard()) as stage:
        call = await opened(stage)
        for model in ("a", "b"):
            await call.write(field(1, model))
            assert await call.read() == field(1, model)
        await revoke(stage)
        await call.write(field(1, "b"))
        assert await how_it_ends(call) is grpc.StatusCode.UNAUTHENTICATED
    assert heard.messages == [field(1, "a"), field(1, "a"), field(1, "b")]


async def test_a_stream_that_only_listens_ends_when_its_token_is_revoked() -> None:
    gone = asyncio.Event()

    async def answers_once(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.write(await anext(messages))
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    async with a_stage(answers_once) as stage, asyncio.timeout(PATIENCE_SECONDS):
        call = await opened(stage)
        await revoke(stage)
        assert await how_it_ends(call) is grpc.StatusCode.UNAUTHENTICATED
        await gone.wait()


async def test_a_stream_ends_when_its_token_expires() -> None:
    async with a_stage(Heard()) as stage:
        call = await opened(stage, expires_in_seconds=10)
        stage.gateway.clock.advance(10)
        assert await how_it_ends(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stream_whose_token_stays_goes_on() -> None:
    async with a_stage(Heard()) as stage:
        call = await opened(stage, expires_in_seconds=10)
        stage.gateway.clock.advance(9)
        await asyncio.sleep(1.2 * TOKEN_SECONDS)  # a check has passed
        await call.write(field(1, "b"))
        assert await call.read() == field(1, "b")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
