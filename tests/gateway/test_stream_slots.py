"""A stream over gRPC has one slot of its model while an answer is owed, and waits for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.lane import LaneRules
from gpubroker_server.http.identity import Identity
from gpubroker_server.inference.lanes import NO_WISH, LaneOptions, Lanes

from tests.gateway.call_stage import INFER, STREAM, Heard, Stage, a_stage
from tests.gateway.harness import until
from tests.gateway.protobuf import field
from tests.patience import PATIENCE_SECONDS

MESSAGE = field(1, "a")


class Scene:
    def __init__(self, stage: Stage, heard: Heard, lanes: Lanes) -> None:
        self.stage = stage
        self.heard = heard
        self.lanes = lanes

    async def opens(self, **metadata: str) -> grpc.aio.StreamStreamCall:
        """With one message."""
        given = (*self.stage.own, *((name.replace("_", "-"), value) for name, value in metadata.items()))
        call = self.stage.channel.stream_stream(STREAM)(metadata=given, timeout=PATIENCE_SECONDS)
        await call.write(MESSAGE)
        return call

    async def waits(self, count: int, **metadata: str) -> grpc.aio.StreamStreamCall:
        call = await self.opens(**metadata)
        await until(lambda: self.figures()[1] == count)
        return call

    def figures(self) -> tuple[int, int]:
        """Requests in flight, and those that wait."""
        figures = list(self.lanes.figures())
        return sum(one.in_flight for one in figures), sum(one.waiting for one in figures)


@asynccontextmanager
async def a_scene(slots: int = 1, **options: object) -> AsyncIterator[Scene]:
    lanes = Lanes(LaneOptions(LaneRules(8, queue_seconds=Seconds(PATIENCE_SECONDS)), slots={b"a": slots}))
    heard = Heard()
    async with a_stage(heard, lanes=lanes, **options) as stage:  # type: ignore[arg-type]
        yield Scene(stage, heard, lanes)


async def answered(call: grpc.aio.StreamStreamCall) -> None:
    assert await call.read() == MESSAGE


async def ends(call: grpc.aio.StreamStreamCall) -> dict[str, str]:
    """What comes after its last answer."""
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return dict(await call.trailing_metadata())


async def test_stream_has_a_slot_until_it_ends_and_the_next_waits_by_priority() -> None:
    async with a_scene() as scene:
        first = await scene.opens()
        await answered(first)
        low = await scene.waits(1, x_priority="10")
        high = await scene.waits(2, x_priority="40")
        assert scene.heard.messages == [MESSAGE]
        assert "x-queue-seconds" not in await ends(first)
        await answered(high)
        assert scene.figures() == (1, 1)
        assert "x-queue-seconds" in await ends(high)
        await answered(low)
        await ends(low)
        await until(lambda: scene.figures() == (0, 0))


async def test_a_call_waits_for_a_stream_of_its_model_and_not_for_another_models() -> None:
    async with a_scene() as scene:
        stream = await scene.opens()
        await answered(stream)
        call = scene.stage.ask(INFER, MESSAGE)
        await until(lambda: scene.figures() == (1, 1))
        assert await scene.stage.ask(INFER, field(1, "b")) == field(1, "b")
        await ends(stream)
        assert await call == MESSAGE


async def test_stream_that_waits_as_long_as_it_may_is_refused_with_nothing_sent() -> None:
    async with a_scene() as scene:
        first = await scene.opens()
        await answered(first)
        late = await scene.opens(x_timeout_seconds="0.05")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await late.read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        trailing = dict(refused.value.trailing_metadata())
        assert (trailing["code"], trailing["x-queue-position"]) == ("model-queue-timeout", "1")
        assert scene.heard.messages == [MESSAGE]
        assert scene.figures() == (1, 0)
        await ends(first)


async def test_a_client_that_leaves_gives_its_place_back_and_its_slot() -> None:
    async with a_scene() as scene:
        first = await scene.opens()
        await answered(first)
        late = await scene.waits(1)
        late.cancel()
        await until(lambda: scene.figures() == (1, 0))
        first.cancel()
        await until(lambda: scene.figures() == (0, 0))


async def test_a_server_that_breaks_off_gives_the_slot_back() -> None:
    async def breaks_off(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.write(await anext(messages))
        await context.abort(grpc.StatusCode.INTERNAL, "broke")

    lanes = Lanes(LaneOptions(slots={b"a": 1}))
    async with a_stage(breaks_off, lanes=lanes) as stage:
        scene = Scene(stage, Heard(), lanes)
        for _ in range(2):
            call = await scene.opens()
            await answered(call)
            with pytest.raises(grpc.aio.AioRpcError, match="broke"):
                await call.read()
            await until(lambda: scene.figures() == (0, 0))


async def test_model_is_drained_when_its_stream_ends_whatever_stream_still_waits() -> None:
    async with a_scene() as scene, asyncio.timeout(PATIENCE_SECONDS):
        first = await scene.opens()
        await answered(first)
        at = scene.lanes.now()
        assert scene.lanes.has_older("a", at)
        late = await scene.waits(1)
        await ends(first)
        await answered(late)
        assert not scene.lanes.has_older("a", at)
        assert scene.lanes.has_older("a", scene.lanes.now())
        await ends(late)


async def test_a_stream_without_a_message_takes_no_slot() -> None:
    async with a_scene() as scene:
        first = await scene.opens()
        await answered(first)
        empty = scene.stage.open()
        assert "request-id" in await ends(empty)
        await ends(first)


SHORT = Seconds(0.05)
"""Until a stream is idle."""


async def test_idle_stream_frees_its_slot_and_takes_one_for_its_next_message() -> None:
    async with a_scene(idle_seconds=SHORT, tenant_requests=1) as scene, asyncio.timeout(PATIENCE_SECONDS):
        idle = await scene.opens()
        await answered(idle)
        await until(lambda: scene.figures() == (0, 0))
        other = await scene.opens()
        await answered(other)
        await ends(other)
        await idle.write(MESSAGE)
        await answered(idle)
        await idle.write(MESSAGE)
        await answered(idle)
        assert "request-id" in await ends(idle)
        assert len(scene.heard.metadata) == 3  # streams to the server
        assert scene.figures() == (0, 0)
    assert [dict(metadata).get("authorization") for metadata in scene.heard.metadata] == ["Bearer theirs"] * 3


async def test_a_stream_that_is_owed_an_answer_keeps_its_slot() -> None:
    may_answer = asyncio.Event()
    has_ended: list[bool] = []

    async def answers_late(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for message in messages:
            await may_answer.wait()
            await context.write(message)
        has_ended.append(True)

    lanes = Lanes(LaneOptions(slots={b"a": 1}))
    async with a_stage(answers_late, lanes=lanes, idle_seconds=SHORT) as stage:
        scene = Scene(stage, Heard(), lanes)
        call = await scene.opens()
        await until(lambda: scene.figures() == (1, 0))
        late = await scene.waits(1)
        await asyncio.sleep(4 * SHORT)  # it has looked several times
        assert (scene.figures(), has_ended) == ((1, 1), [])
        may_answer.set()
        await answered(call)
        await answered(late)
        await ends(call)
        await ends(late)


async def test_a_decoupled_model_keeps_the_slot_until_it_is_done() -> None:
    """It has answered once, and nobody but it knows that more is to come."""
    is_asked_no_more, may_end = asyncio.Event(), asyncio.Event()

    async def answers_twice(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for message in messages:
            await context.write(message)
        is_asked_no_more.set()
        await may_end.wait()
        await context.write(MESSAGE)

    lanes = Lanes(LaneOptions(slots={b"a": 1}))
    async with a_stage(answers_twice, lanes=lanes, idle_seconds=SHORT) as stage:
        scene = Scene(stage, Heard(), lanes)
        call = await scene.opens()
        await answered(call)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await is_asked_no_more.wait()
        assert scene.figures() == (1, 0)
        await call.write(MESSAGE)  # waits until the answer before it is complete
        may_end.set()
        for _ in range(3):
            await answered(call)
        await until(lambda: scene.figures() == (0, 0))
        await ends(call)


async def test_a_stream_that_was_idle_goes_where_its_next_message_belongs() -> None:
    async with a_scene(idle_seconds=SHORT) as scene, asyncio.timeout(PATIENCE_SECONDS):
        stream = await scene.opens()
        await answered(stream)
        await until(lambda: scene.figures() == (0, 0))
        other = await scene.opens()
        await answered(other)
        await stream.write(field(1, "b"))
        assert await stream.read() == field(1, "b")  # another model, whose slots are free
        await ends(stream)
        await ends(other)


async def test_idle_stream_ends_with_its_client_and_a_later_one_may_wait_in_vain() -> None:
    async with a_scene(idle_seconds=SHORT) as scene, asyncio.timeout(PATIENCE_SECONDS):
        gone = await scene.opens()
        await answered(gone)
        await until(lambda: scene.figures() == (0, 0))
        refused = await scene.opens(x_timeout_seconds="0.05")
        await answered(refused)
        await until(lambda: scene.figures() == (0, 0))
        gone.cancel()
        holder = scene.lanes.enter(b"a", Identity("other", "other", (), 50), NO_WISH)
        await refused.write(MESSAGE)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await refused.read()
        assert dict(error.value.trailing_metadata())["code"] == "model-queue-timeout"
        holder.leave()
        assert len(scene.heard.messages) == 2


async def test_a_stream_that_was_idle_goes_to_the_server_that_it_was_at() -> None:
    """Servers take turns with new streams; a sequence of a stateful model has to stay."""
    heard, other = Heard(), Heard()
    lanes = Lanes(LaneOptions(slots={b"a": 1}))
    async with a_stage(heard, others=[other], lanes=lanes, idle_seconds=SHORT) as stage:
        scene = Scene(stage, heard, lanes)
        stream = await scene.opens()
        for _ in range(4):
            await answered(stream)
            await until(lambda: scene.figures() == (0, 0))
            await stream.write(MESSAGE)
        await answered(stream)
        await ends(stream)
    assert sorted([len(heard.metadata), len(other.metadata)]) == [0, 5]
