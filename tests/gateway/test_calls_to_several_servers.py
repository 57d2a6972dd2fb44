"""Several servers of models over gRPC."""

from collections.abc import AsyncIterator

import grpc
import pytest
from gpubroker_server.inference.health_checks import HealthChecks
from gpubroker_server.inference.servers import Contents, Server
from tritonclient.grpc import service_pb2 as messages

from tests.gateway.call_stage import INFER, SERVICE, STREAM, Handler, Heard, Stage, a_stage
from tests.gateway.protobuf import field
from tests.gateway.test_several_servers import SHORT

Status = grpc.StatusCode
ANY = field(1, "any") + field(2, "2")


def ending(status: grpc.StatusCode) -> Handler:
    async def ends(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await anext(messages, None)
        await context.abort(status, "for a reason")

    return ends


def answering(message: bytes) -> Handler:
    async def answers(_messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.write(message)

    return answers


def have(stage: Stage, *ready: set[bytes]) -> list[Server]:
    for server, models in zip(stage.fleet.servers, ready, strict=True):
        server.contents = Contents(frozenset(models), frozenset(models))
    return [*stage.fleet.servers]


async def test_calls_and_streams_go_where_the_model_is_that_they_name() -> None:
    async with a_stage(main := Heard(), others=[b := Heard()]) as stage:
        have(stage, {b"other"}, {b"any", b"any/2"})
        assert await stage.ask(INFER, ANY) == ANY
        assert await stage.ask(SERVICE + "ModelConfig", field(1, "any")) == field(1, "any")
        call = stage.open()
        for message in (ANY, field(1, "other")):  # a stream stays where it was opened
            await call.write(message)
            assert await call.read() == message
        assert stage.fleet.servers[1].in_flight == 1
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert (len(main.messages), len(b.messages)) == (0, 4)
        assert stage.fleet.servers[1].in_flight == 0


async def test_a_stream_that_says_nothing_is_opened_at_a_server_that_answers() -> None:
    async with a_stage(main := Heard(), others=[Heard()]) as stage:
        call = stage.open()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert len(main.metadata) == 1


async def test_a_call_that_was_not_sent_goes_to_the_next_server() -> None:
    async with a_stage(None, others=[b := Heard()]) as stage:
        main, other = have(stage, {b"any"}, {b"any"})
        other.in_flight = 1
        assert await stage.ask(INFER, field(1, "any")) == field(1, "any")
        assert len(b.messages) == 1
        assert (main.grpc.faults, main.http.faults, main.in_flight) == (1, 0, 0)


async def test_broken_off_call_goes_to_another_server_only_if_it_may_be_repeated() -> None:
    async with a_stage(ending(Status.UNAVAILABLE), others=[b := Heard()]) as stage:
        _, other = have(stage, {b"any"}, {b"any"})
        other.in_flight = 1
        error = await stage.refusal(INFER, field(1, "any"))
        assert (error.code(), error.details()) == (Status.UNAVAILABLE, "for a reason")
        assert b.messages == []
        for method, metadata in ((SERVICE + "ModelConfig", ()), (INFER, (("x-idempotent", "true"),))):
            assert await stage.ask(method, field(1, "any"), (*stage.own, *metadata)) == field(1, "any")
        assert ["x-idempotent" in got for got in b.metadata] == [False, False]
        error = await stage.refusal(STREAM, field(1, "any"))
        assert error.code() is Status.UNAVAILABLE


async def test_an_error_of_a_server_is_passed_on_without_asking_another() -> None:
    async with a_stage(ending(Status.NOT_FOUND), others=[b := Heard()]) as stage:
        have(stage, set(), set())
        error = await stage.refusal(INFER, field(1, "any"), metadata=(*stage.own, ("x-idempotent", "true")))
        assert error.code() is Status.NOT_FOUND
        assert b.messages == []


async def test_model_is_called_where_it_was_just_loaded_until_it_is_unloaded() -> None:
    async with a_stage(main := Heard(), others=[b := Heard()]) as stage:
        have(stage, set(), set())
        stage.fleet.servers[1].contents = Contents(frozenset({b"any"}))
        for name in ("RepositoryModelLoad", "ModelInfer", "RepositoryModelUnload", "ModelInfer"):
            await stage.ask(SERVICE + name, field(1 if name == "ModelInfer" else 2, "any"))
        assert (len(main.messages), len(b.messages)) == (1, 3)


async def test_one_server_that_lives_is_enough() -> None:
    dead = messages.ServerLiveResponse(live=False).SerializeToString()
    live = messages.ServerLiveResponse(live=True).SerializeToString()
    async with a_stage(answering(dead), others=[answering(live), None]) as stage:
        for name in (SERVICE + "ServerLive", SERVICE + "ServerReady", "/grpc.health.v1.Health/Check"):
            assert await stage.ask(name, metadata=()) == live
    async with a_stage(None, others=[None]) as stage:
        assert (await stage.refusal(SERVICE + "ServerLive")).code() is Status.UNAVAILABLE


async def test_settings_of_a_model_go_where_it_is() -> None:
    setting = field(1, field(1, "trace_level")) + field(2, "any")
    async with a_stage(main := Heard(), others=[b := Heard()]) as stage:
        have(stage, set(), {b"any"})
        for message in (setting, field(2, "any")):
            assert await stage.ask(SERVICE + "TraceSetting", message) == message
        assert (len(main.messages), len(b.messages)) == (0, 2)


async def test_settings_and_unloads_go_to_all() -> None:
    setting = field(1, field(1, "log_verbose_level"))
    async with a_stage(main := Heard(), others=[b := Heard()]) as stage:
        servers = have(stage, {b"any"}, {b"any"})
        assert await stage.ask(SERVICE + "RepositoryModelUnload", field(2, "any")) == field(2, "any")
        assert await stage.ask(SERVICE + "LogSettings", setting) == setting
        assert (len(main.messages), len(b.messages)) == (2, 2)
        assert await stage.ask(SERVICE + "LogSettings", b"") == b""
        assert (len(main.messages), len(b.messages)) == (3, 2)
        assert [server.in_flight for server in servers] == [0, 0]


async def test_the_index_is_that_of_all() -> None:
    response, row = messages.RepositoryIndexResponse, messages.RepositoryIndexResponse.ModelIndex
    gone = row(name="m", version="1", state="UNAVAILABLE", reason="unloaded")
    ready, cold = row(name="m", version="1", state="READY"), row(name="n")
    told = [response(models=models).SerializeToString() for models in ([gone], [ready, cold, row(name="m")])]
    async with a_stage(answering(told[0]), others=[answering(told[1]), None]) as stage:
        answer = response.FromString(await stage.ask(SERVICE + "RepositoryIndex"))
        assert list(answer.models) == [ready, cold]


async def test_a_server_is_checked_over_grpc_as_well() -> None:
    live = messages.ServerLiveResponse(live=True).SerializeToString()
    async with a_stage(answering(live), others=[None]) as stage:
        watch = HealthChecks(stage.fleet.servers, SHORT)
        for _ in range(3):
            await watch.check_all()
        assert [server.grpc.breaker.is_open for server in stage.fleet.servers] == [False, True]
        assert [server.is_up for server in stage.fleet.servers] == [True, False]


async def test_model_that_was_just_loaded_is_found_before_the_next_check() -> None:
    async def unknown(_messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.abort(Status.NOT_FOUND, "Request for unknown model: 'any' is not found")

    async with a_stage(unknown, others=[heard := Heard()]) as stage:
        have(stage, set(), set())
        assert await stage.ask(INFER, ANY) == ANY
    assert heard.messages == [ANY]


DENIAL = messages.ModelStreamInferResponse(
    error_message="Request for unknown model: 'any' is not found"
).SerializeToString()


class Restarted(Heard):
    """Denies after so many messages that it has the model, in the words and the form of Triton."""

    def __init__(self, *, after: int = 1, echoes: int = 0) -> None:
        """`echoes`: how many messages it answers before."""
        super().__init__()
        self._after = after
        self._echoes = echoes

    async def __call__(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for message in messages:
            self.messages.append(message)
            if len(self.messages) <= self._echoes:
                await context.write(message)
            elif len(self.messages) >= self._after:
                await context.write(DENIAL)


def both_have(stage: Stage) -> Server:
    """The second server is busier, so that the first one is asked. Returns the first."""
    first, second = have(stage, {b"any", b"any/2"}, {b"any", b"any/2"})
    second.in_flight = 1
    return first


async def test_stream_goes_to_another_server_if_one_denies_its_model() -> None:
    async with a_stage(main := Restarted(), others=[b := Heard()]) as stage:
        first = both_have(stage)
        call = stage.open()
        for _ in range(2):
            await call.write(ANY)
            assert await call.read() == ANY
        assert dict(await call.initial_metadata())["x-first"] == "1"
        assert first.in_flight == 0
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    assert (main.messages, b.messages) == ([ANY], [ANY, ANY])


async def test_denied_stream_whose_client_is_done_ends_after_its_answer() -> None:
    async with a_stage(Restarted(), others=[b := Heard()]) as stage:
        both_have(stage)
        call = stage.open()
        await call.write(ANY)
        await call.done_writing()
        assert await call.read() == ANY
        assert await call.read() is grpc.aio.EOF
    assert b.messages == [ANY]


async def test_denial_is_passed_on_when_the_stream_had_several_messages() -> None:
    async with a_stage(Restarted(after=2), others=[b := Heard()]) as stage:
        both_have(stage)
        call = stage.open()
        await call.write(ANY)
        await call.write(ANY)
        assert await call.read() == DENIAL
        call.cancel()
    assert b.messages == []


async def test_denial_is_passed_on_when_the_stream_has_had_an_answer() -> None:
    async with a_stage(Restarted(echoes=1), others=[b := Heard()]) as stage:
        both_have(stage)
        call = stage.open()
        for answer in (ANY, DENIAL):
            await call.write(ANY)
            assert await call.read() == answer
        call.cancel()
    assert b.messages == []


async def test_denial_is_passed_on_when_no_other_server_is_left() -> None:
    async with a_stage(Restarted(), others=[Restarted()]) as stage:
        both_have(stage)
        call = stage.open()
        await call.write(ANY)
        assert await call.read() == DENIAL
        call.cancel()


async def test_broken_off_stream_goes_to_another_server_if_it_may_be_repeated() -> None:
    async with a_stage(ending(Status.UNAVAILABLE), others=[b := Heard()]) as stage:
        first = both_have(stage)
        call = stage.open()
        await call.write(ANY)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert (refused.value.code(), refused.value.details()) == (Status.UNAVAILABLE, "for a reason")
        assert b.messages == []
        call = stage.open(metadata=(("x-idempotent", "true"),))
        await call.write(ANY)
        assert await call.read() == ANY
        assert (first.in_flight, first.passed_on) == (0, 1)
        call.cancel()


async def test_stream_that_reaches_no_server_goes_to_the_next() -> None:
    async with a_stage(None, others=[Heard()]) as stage:
        both_have(stage)
        call = stage.open()
        await call.write(ANY)
        assert await call.read() == ANY
        call.cancel()
