"""What requests that wait for a model may hold of the gateway's memory."""

import asyncio
from collections.abc import AsyncIterator

import grpc
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.inference.lanes import LaneOptions, Lanes

from tests.gateway.call_stage import INFER as CALL
from tests.gateway.call_stage import STREAM, Heard
from tests.gateway.call_stage import a_stage as a_call_stage
from tests.gateway.harness import until
from tests.gateway.inference_stage import INFER, OK, a_stage
from tests.gateway.inference_stage import Heard as HeardOverHttp
from tests.gateway.protobuf import field
from tests.gateway.resident_models import resident_models
from tests.gateway.test_cold_calls import a_host, brought
from tests.gateway.test_exchange_refusals import refused
from tests.gateway.test_lanes import Scene
from tests.gateway.test_returning_models import GONE, resident


class Held(Heard):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.begun = 0

    async def __call__(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        self.begun += 1
        await self.go.wait()
        await super().__call__(messages, context)


async def test_calls_that_wait_in_lanes_hold_no_more_than_they_may() -> None:
    lanes = Lanes(LaneOptions(slots={b"any": 1, b"other": 1}))
    first, large = field(1, "any"), field(1, "other") + field(5, bytes(800))
    async with a_call_stage(held := Held(), lanes=lanes, most_waiting_bytes=1000) as stage:
        calls = [asyncio.ensure_future(stage.ask(CALL, message)) for message in (first, large)]
        await until(lambda: held.begun == 2)
        calls += [asyncio.ensure_future(stage.ask(CALL, large))]
        await until(lambda: sum(one.waiting for one in lanes.figures()) == 1)
        error = await stage.refusal(CALL, first + field(5, bytes(400)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "triton.waiting_bytes" in str(error.details())
        told = dict(error.trailing_metadata() or ())
        assert (told["code"], told["retry-after"]) == ("model-queue-full", "1")
        assert sum(one.waiting for one in lanes.figures()) == 1
        held.go.set()
        await asyncio.gather(*calls)
        assert await stage.ask(CALL, first + field(5, bytes(2000))), (
            "nothing waits: it goes at once, whatever its size"
        )


async def test_calls_waiting_for_their_model_hold_no_more_bytes_than_allowed() -> None:
    rules, host = a_host()
    message = field(1, "any") + field(5, bytes(600))
    async with a_call_stage(Heard(), served=(rules, host), most_waiting_bytes=500) as stage:
        alone = asyncio.ensure_future(stage.ask(CALL, message))
        await until(lambda: stage.gateway.world.models.of(ModelKey("main", "any")) is not None)
        error = await stage.refusal(CALL, message)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stream = stage.open(STREAM)
        await stream.write(message)
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await brought(stage.gateway, host, alone) == message


async def test_a_message_above_the_largest_body_is_refused_unread() -> None:
    async with a_call_stage(heard := Heard(), most_body_bytes=1000) as stage:
        error = await stage.refusal(CALL, bytes(1001))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await stage.ask(CALL, bytes(1000)) == bytes(1000)
    assert len(heard.messages) == 1


async def test_bodies_that_wait_hold_no_more_than_they_may() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes, most_waiting_bytes=1000) as stage:
        [first] = await scene.busy(stage, b"first")
        second = await scene.waits(stage, bytes(800))
        document = refused(await stage.ask("POST", INFER, bytes(400)), 429, "model-queue-full")
        assert "800 bytes of the 1000" in document["error"]
        assert scene.figures() == 1
        await second.close()
        await until(lambda: scene.figures() == 0)
        scene.waiting = 0
        third = await scene.waits(stage, bytes(400))
        await scene.ends(b"first", first)
        await scene.ends(bytes(400), third)


async def test_one_tenant_leaves_room_for_others() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes, most_waiting_bytes=1000) as stage:
        await scene.busy(stage, b"first")
        await scene.waits(stage, bytes(500))
        document = refused(await stage.ask("POST", INFER, bytes(300)), 429, "model-queue-share")
        assert 'tenant "default"' in document["error"]
        assert "500 bytes of the 750" in document["error"]
        await scene.waits(stage, bytes(300), Authorization=await stage.of_tenant("b"))


async def test_a_request_that_gave_up_holds_nothing() -> None:
    scene = Scene(queue_seconds=Seconds(0.01))
    async with a_stage(scene.model, lanes=scene.lanes, most_waiting_bytes=1000) as stage:
        await scene.busy(stage, b"first")
        for _ in range(3):
            refused(await stage.ask("POST", INFER, bytes(800)), 503, "model-queue-timeout")


async def test_a_body_that_waits_for_a_model_that_left_counts_as_well() -> None:
    async with resident_models(heard := HeardOverHttp(), most_waiting_bytes=1000) as there:
        await resident(there)
        heard.answer = GONE
        there.host.restart()
        first = await there.stage.connect()
        first.ask("POST", INFER, bytes(800))
        await until(lambda: len(heard.bodies) == 2)
        refused(await there.stage.ask("POST", INFER, bytes(400)), 429, "model-queue-full")
        heard.answer = OK
        await there.index()
        await there.load()
        assert (await first.answer())[0] == 200
        assert heard.bodies[1:] == [bytes(800), bytes(400), bytes(800)]
