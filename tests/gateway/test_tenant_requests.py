"""What one tenant may have under way at the models, over HTTP and gRPC: so many requests and no more."""

import grpc
import pytest

from tests.gateway import call_stage
from tests.gateway.harness import until
from tests.gateway.inference_stage import INFER, a_stage
from tests.gateway.protobuf import field
from tests.gateway.test_exchange_refusals import refused
from tests.gateway.test_lanes import Scene


async def test_http_request_beyond_the_tenant_limit_is_refused() -> None:
    """A request of another tenant is answered."""
    scene = Scene(slots=1)
    async with a_stage(scene.model, lanes=scene.lanes, tenant_requests=2) as stage:
        [first] = await scene.busy(stage, b"first")
        second = await scene.waits(stage, b"second")
        answer = await stage.ask("POST", INFER, b"third")
        told = refused(answer, 429, "tenant-requests")
        assert '"default" has 2 requests to models under way' in told["error"]
        assert answer[1]["retry-after"] == "1"
        theirs = await stage.connect()
        theirs.ask("POST", INFER, b"theirs", Authorization=await stage.of_tenant("speech"))
        await scene.someone_more_waits()
        for body, client in ((b"first", first), (b"second", second), (b"theirs", theirs)):
            await scene.ends(body, client)
    assert scene.model.began == [b"first", b"second", b"theirs"]


async def test_a_client_that_leaves_its_place_makes_room_for_another_request() -> None:
    scene = Scene(slots=1)
    async with a_stage(scene.model, lanes=scene.lanes, tenant_requests=2) as stage:
        [first] = await scene.busy(stage, b"first")
        left = await scene.waits(stage, b"left")
        await left.close()
        await until(lambda: scene.figures() == 0)
        scene.waiting = 0
        third = await scene.waits(stage, b"third")
        for body, client in ((b"first", first), (b"third", third)):
            await scene.ends(body, client)


async def test_grpc_calls_and_streams_count_alike_and_are_refused_as_exhausted() -> None:
    heard = call_stage.Heard()
    async with call_stage.a_stage(heard, tenant_requests=1) as stage:
        stream = stage.open()
        await stream.write(field(1, "a"))
        assert await stream.read() == field(1, "a")
        error = await stage.refusal(call_stage.INFER, field(1, "b"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        told = dict(error.trailing_metadata())
        assert (told["code"], told["retry-after"]) == ("tenant-requests", "1")
        other = stage.open()
        await other.write(field(1, "b"))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await other.read()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stage.ask(call_stage.INFER, field(1, "b")) == field(1, "b")
    assert heard.messages == [field(1, "a"), field(1, "b")]
