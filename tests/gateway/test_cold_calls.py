"""Calls over gRPC for models that are not in memory: they wait, or are told when to come again."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState, ServerIndex
from gpubroker_server.core.domain.models import ModelKey, ModelRules
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.inference.lanes import LaneOptions, Lanes
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

from tests.builders import GIB, a_sample
from tests.gateway.call_stage import INFER, Heard, a_stage
from tests.gateway.harness import Gateway, until
from tests.gateway.protobuf import field
from tests.gateway.resident_models import doubts_told
from tests.simulated_host import SimulatedHost, SimulatedModel

LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
UNLOAD = "/inference.GRPCInferenceService/RepositoryModelUnload"


def a_host(cold_seconds: float = 55.0) -> tuple[ServerRules, SimulatedHost]:
    models = {"any": ModelRules(Mib(50 * GIB))}
    rules = ServerRules("main", "n1", models=models, cold_seconds=Seconds(cold_seconds))
    return rules, SimulatedHost("main", (SimulatedModel("any"),))


async def index(gateway: Gateway, stage: ModelState) -> None:
    await gateway.hear(ServerIndex("main", gateway.clock.now(), {"any": IndexedModel("any", stage)}))


async def test_calls_wait_for_their_model_to_come_and_for_its_end() -> None:
    async with a_stage(heard := Heard(), served=a_host()) as stage:
        gateway, home = stage.gateway, ModelKey("main", "any")
        call = asyncio.ensure_future(stage.ask(INFER, field(1, "any"), (*stage.own, ("x-priority", "20"))))
        await until(lambda: gateway.world.models.of(home) is not None)
        task = gateway.world.models.of(home)
        assert task is not None
        assert (task.priority, heard.messages) == (20, [])
        await gateway.plan(task.id)
        await index(gateway, ModelState.READY)
        assert await call == field(1, "any")
        assert await stage.ask(LOAD, field(2, "any")) == field(2, "any")
        leaving = asyncio.ensure_future(stage.ask(UNLOAD, field(2, "any")))
        await until(lambda: gateway.task(task.id).stop_reason is not None)
        await index(gateway, ModelState.ABSENT)
        assert await leaving == field(2, "any")
        assert gateway.world.models.of(home) is None


async def test_a_request_that_has_waited_long_enough_says_when_to_retry() -> None:
    async with a_stage(Heard(), served=a_host(cold_seconds=0.0)) as stage:
        error = await stage.refusal(INFER, field(1, "any"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        told = dict(error.trailing_metadata() or ())
        assert (told["code"], told["retry-after"]) == ("model-not-ready", "5")


async def test_stream_waits_for_the_model_of_its_first_message_and_then_counts() -> None:
    """It counts as under way until it ends."""
    rules, host = a_host()
    async with a_stage(
        heard := Heard(), served=(rules, host), lanes=(lanes := Lanes(LaneOptions()))
    ) as stage:
        call, message = stage.open(), field(1, "any")
        await call.write(message)
        reading = asyncio.ensure_future(call.read())
        assert await brought(stage.gateway, host, reading) == message
        assert lanes.has_older("any", lanes.now())
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await until(lambda: not lanes.has_older("any", lanes.now()))
    assert heard.messages == [message]


async def test_a_stream_that_has_waited_long_enough_says_when_to_retry() -> None:
    async with a_stage(heard := Heard(), served=a_host(cold_seconds=0.0)) as stage:
        call = stage.open()
        await call.write(field(1, "any"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert dict(refused.value.trailing_metadata() or ())["code"] == "model-not-ready"
    assert heard.messages == []


async def test_a_message_that_names_no_model_is_passed_on() -> None:
    async with a_stage(heard := Heard(), served=a_host()) as stage:
        for message in (b"", b"\xff", field(1, 7)):
            assert await stage.ask(INFER, message) == message
    assert len(heard.messages) == 3


class Leaving(Heard):
    """Says that it has no such model while `gone` is true."""

    gone = False
    refused = 0
    detail = "Request for unknown model: 'any' has no available versions"

    async def __call__(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        if self.gone:
            self.refused += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.detail)
        await super().__call__(messages, context)


class LeavingStream(Leaving):
    """Says so in an answer, as Triton does in a stream."""

    async def __call__(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        if not self.gone:
            await super().__call__(messages, context)
            return
        async for _ in messages:
            self.refused += 1
            await context.write(ModelStreamInferResponse(error_message=self.detail).SerializeToString())


async def test_a_call_that_finds_its_model_gone_waits_until_it_is_loaded_again() -> None:
    rules, host = a_host()
    async with a_stage(heard := Leaving(), served=(rules, host)) as stage:
        gateway, message = stage.gateway, field(1, "any")
        await brought(gateway, host, asyncio.ensure_future(stage.ask(INFER, message)))
        heard.gone = True
        host.restart()
        call = asyncio.ensure_future(stage.ask(INFER, message))
        await until(lambda: heard.refused == 1)
        heard.gone = False
        await index(gateway, ModelState.ABSENT)
        assert await brought(gateway, host, call) == message
        heard.gone = True
        error = await stage.refusal(INFER, message)
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, heard.detail)
        assert heard.refused == 5
        heard.detail = "Stub process 'any_0_0' is not healthy."
        doubts = doubts_told(gateway)
        await stage.refusal(INFER, message)
        await until(lambda: len(doubts) == 1)


@pytest.mark.parametrize("is_told_in_answer", [True, False])
async def test_stream_that_finds_its_model_gone_waits_until_it_is_loaded_again(
    is_told_in_answer: bool,
) -> None:
    rules, host = a_host()
    heard = LeavingStream() if is_told_in_answer else Leaving()
    lanes = Lanes(LaneOptions())
    async with a_stage(heard, served=(rules, host), lanes=lanes) as stage:
        gateway, message = stage.gateway, field(1, "any")
        await brought(gateway, host, asyncio.ensure_future(stage.ask(INFER, message)))
        heard.gone = True
        host.restart()
        call = stage.open()
        await call.write(message)
        await call.done_writing()
        await until(lambda: heard.refused == 1)
        heard.gone = False
        await index(gateway, ModelState.ABSENT)
        assert await brought(gateway, host, asyncio.ensure_future(call.read())) == message
        assert await call.read() is grpc.aio.EOF
        assert heard.messages == [message, message]
        assert not lanes.has_older("any", lanes.now())
        assert [server.in_flight for server in stage.fleet.servers] == [0]


async def test_streams_that_gave_up_waiting_leave_room_for_others() -> None:
    async with a_stage(Heard(), served=a_host(cold_seconds=0.0), most_waiting_bytes=1) as stage:
        for _ in range(2):
            call = stage.open()
            await call.write(field(1, "any"))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert dict(refused.value.trailing_metadata() or ())["code"] == "model-not-ready"


async def brought(gateway: Gateway, host: SimulatedHost, call: asyncio.Future[bytes]) -> bytes:
    """Its answer, once its model is there."""
    home = ModelKey("main", "any")
    await until(lambda: (task := gateway.world.models.of(home)) is not None and not task.is_active)
    task = gateway.world.models.of(home)
    assert task is not None
    gateway.clock.advance(0.1)
    gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
    await gateway.plan(task.id)
    await host.load("any", (), Seconds(1.0))
    await index(gateway, ModelState.READY)
    return await call
