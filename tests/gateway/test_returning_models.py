"""Requests that were sent to a model that had just left: they wait for it again, and nobody reads of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState, ServerIndex
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.http.identity import Identity
from gpubroker_server.inference.draining import Draining
from gpubroker_server.inference.lanes import NO_WISH, LaneOptions, Lanes
from gpubroker_server.ports.backends import Trouble
from msgspec.structs import replace

from tests.builders import a_device, a_node, a_sample, key
from tests.gateway.harness import Gateway, until
from tests.gateway.inference_stage import INFER, OK, Heard, a_request, a_stage
from tests.gateway.resident_models import RULES, ResidentModels, doubts_told, resident_models
from tests.gateway.test_several_servers import have
from tests.simulated_host import SimulatedHost, SimulatedModel


def saying(text: str, status: str = "404 Not Found") -> bytes:
    body = json.dumps({"error": text}, separators=(",", ":")).encode()
    head = b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % (
        status.encode(),
        len(body),
    )
    return head + body


GONE = saying("Request for unknown model: 'any' has no available versions")
NOT_THERE = saying("Request for unknown model: 'any' is not found")
NOT_READY = saying(
    "Request for unknown model: 'any' version 1 is not at ready state", "503 Service Unavailable"
)
NO_VERSION = saying("Request for unknown model: 'any' version 9 is not found")


async def resident(there: ResidentModels) -> None:
    """Somebody has asked for it, it is there, and it has answered."""
    client = await there.stage.connect()
    client.ask("POST", INFER, b"first")
    await there.load()
    assert (await client.answer())[0] == 200


async def test_request_that_finds_its_model_gone_waits_until_it_is_loaded_again() -> None:
    async with resident_models(heard := Heard()) as there:
        await resident(there)
        for gone, asked in ((GONE, 2), (NOT_THERE, 4), (NOT_READY, 6)):
            heard.answer = gone
            client = await there.stage.connect()
            there.host.restart()
            client.ask("POST", INFER, b"xyz")
            await until(lambda asked=asked: len(heard.bodies) == asked)  # type: ignore[misc]
            heard.answer = OK
            await there.index()
            await there.load()
            status, headers, body = await client.answer()
            assert (status, body, "request-id" in headers) == (200, b"{}", True)
        assert heard.bodies == [b"first", *[b"xyz"] * 6]


async def test_model_back_before_the_leader_has_missed_it_is_asked_again_at_once() -> None:
    async with resident_models(heard := Heard()) as there:
        await resident(there)
        there.host.restart()
        heard.answer = GONE
        client = await there.stage.connect()
        client.ask("POST", INFER, b"xyz")
        await until(lambda: len(heard.bodies) == 2)
        heard.answer = OK
        await there.host.load("any", (), Seconds(1.0))
        assert (await client.answer())[0] == 200


async def test_a_server_that_says_so_again_and_again_is_believed() -> None:
    async with resident_models(heard := Heard()) as there:
        await resident(there)
        heard.answer = GONE
        status, headers, body = await there.stage.ask("POST", INFER, b"xyz")
        assert (status, headers["content-type"], body) == (404, "text/plain", GONE[-len(body) :])
        assert heard.bodies == [b"first", *[b"xyz"] * 4]


async def test_a_name_that_triton_does_not_decode_is_not_asked_for_again() -> None:
    async with resident_models(heard := Heard()) as there:
        await resident(there)
        heard.answer = NOT_THERE
        status, _, _ = await there.stage.ask("POST", "/v2/models/%61ny/infer", b"xyz")
        assert (status, heard.bodies) == (404, [b"first", b"xyz"])


async def test_other_errors_of_the_server_are_passed_on() -> None:
    async with resident_models(heard := Heard()) as there:
        await resident(there)
        for answer in (NO_VERSION, saying("no such tensor"), saying("x" * 5000), saying("")):
            heard.answer = answer
            status, _, body = await there.stage.ask("POST", INFER, b"xyz")
            assert (status, answer.endswith(body)) == (404, True)
        assert heard.bodies == [b"first", *[b"xyz"] * 4]


async def test_a_body_that_was_too_long_to_be_kept_is_not_sent_again() -> None:
    async with resident_models(heard := Heard()) as there:
        await resident(there)
        heard.answer = GONE
        status, _, _ = await there.stage.ask("POST", INFER, b"x" * (1024 * 1024 + 1))
        assert status == 404


async def test_request_waiting_too_long_for_a_model_that_left_is_told_to_retry() -> None:
    async with resident_models(heard := Heard(), cold_seconds=Seconds(0.0)) as there:
        assert (await there.stage.ask("POST", INFER, b"x"))[0] == 503
        await there.load()
        there.host.restart()
        heard.answer = GONE
        status, _, body = await there.stage.ask("POST", INFER, b"xyz")
        assert (status, json.loads(body)["code"]) == (503, "model-not-ready")


async def test_model_whose_process_is_gone_is_reported_to_the_leader_regularly() -> None:
    dead = saying("Stub process 'any_0_0' is not healthy.", "500 Internal Server Error")
    async with resident_models(heard := Heard()) as there:
        await resident(there)
        doubts = doubts_told(there.gateway)
        for answer, told in ((saying("no such tensor", "500 No"), 0), (dead, 1), (dead, 1)):
            heard.answer = answer
            status, _, body = await there.stage.ask("POST", INFER, b"x")
            assert (status, answer.endswith(body)) == (500, True)
            await until(lambda told=told: len(doubts) == told)  # type: ignore[misc]
        there.gateway.clock.advance(5.0)
        await there.stage.ask("POST", INFER, b"x")
        await until(lambda: len(doubts) == 2)


STREAM = "/v2/models/any/generate_stream"
DEAD = b'{"error":"Stub process \'any_0_0\' is not healthy."}'


def a_stream(*events: bytes, status: str = "200 OK") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )
    chunks = [b"data: %b\n\n" % event for event in events]
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


async def test_model_that_dies_in_a_stream_or_before_it_is_reported() -> None:
    said = b'{"text_output":"my process is not healthy"}'
    async with resident_models(heard := Heard()) as there:
        await resident(there)
        doubts = doubts_told(there.gateway)
        answers = [
            (a_stream(said), 0),
            (a_stream(b'{"error":"no such tensor"}'), 0),
            (a_stream(said, DEAD), 1),
            (a_stream(DEAD, status="400 Bad Request"), 2),
            (saying("Stub process 'any_0_0' is not healthy.", "400 Bad Request"), 3),
        ]
        for answer, told in answers:
            heard.answer = answer
            there.gateway.clock.advance(5.0)
            await there.stage.ask("POST", STREAM, b"{}")
            await until(lambda told=told: len(doubts) == told)  # type: ignore[misc]


class Slow(Heard):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            self.bodies.append((await a_request(reader))[1])
            await self.may_answer.wait()
            writer.write(self.answer)


async def test_a_model_is_drained_when_its_earlier_requests_are_answered() -> None:
    async with resident_models(heard := Slow()) as there:
        draining = Draining(there.gateway.world, there.lanes, Policy())
        await resident(there)
        assert draining.drained() == frozenset()
        heard.may_answer.clear()
        client = await there.stage.connect()
        client.ask("POST", INFER, b"1")
        await until(lambda: heard.bodies[-1] == b"1")
        await there.unload()
        task = await there.wanted()
        assert draining.drained() == frozenset()
        heard.may_answer.set()
        assert (await client.answer())[0] == 200
        await until(lambda: draining.drained() == {f"{task.id}:{task.fence}"})
        await there.index()
        assert draining.drained() == frozenset()


async def test_requests_to_a_copy_elsewhere_keep_no_model_from_leaving() -> None:
    async with resident_models(Heard()) as there:
        draining = Draining(there.gateway.world, there.lanes, Policy())
        await resident(there)
        await there.unload()
        task = await there.wanted()
        assert draining.drained() == {f"{task.id}:{task.fence}"}
        turn = there.lanes.enter(b"any", Identity("me", "default", (), 50), NO_WISH)
        assert draining.drained() == {f"{task.id}:{task.fence}"}
        turn.leave()


async def test_queued_request_waits_again_if_its_model_leaves_meanwhile() -> None:
    async with resident_models(heard := Slow(), slots=1) as there:
        await resident(there)
        heard.may_answer.clear()
        first, second = await there.stage.connect(), await there.stage.connect()
        first.ask("POST", INFER, b"1")
        await until(lambda: heard.bodies[-1] == b"1")
        second.ask("POST", INFER, b"2")
        await until(lambda: any(lane.waiting for lane in there.lanes.figures()))
        await there.unload()
        heard.may_answer.set()
        assert (await first.answer())[0] == 200
        await there.index()
        await until(lambda: (task := there.of()) is not None and task.state is TaskState.PENDING)
        assert heard.bodies == [b"first", b"1"]
        await there.load()
        assert (await second.answer())[0] == 200


async def test_model_that_was_just_loaded_is_found_before_the_next_check() -> None:
    unknown = Heard(NOT_THERE)
    async with a_stage(unknown, others=[b := Heard(), Heard()]) as stage:
        have(stage, set(), set(), set())
        assert (await stage.ask("POST", INFER, b"{}"))[0] == 200
        assert (len(unknown.heads), b.bodies) == (1, [b"{}"])
    async with a_stage(unknown, others=[unknown]) as stage:
        have(stage, set(), set())
        status, _, body = await stage.ask("POST", INFER, b"{}")
        assert (status, b"unknown model" in body) == (404, True), "neither has it"
        assert [one.in_flight for one in stage.fleet.servers] == [0, 0]
    assert len(unknown.heads) == 3


@asynccontextmanager
async def two_copies(at_main: bytes) -> AsyncIterator[tuple[ResidentModels, Heard]]:
    """Servers main and b have the model in the ledger, each on a device of its own. `at_main` is what main
    answers from now on; what b hears comes as well."""
    main, b = SimulatedHost("main", [SimulatedModel("any")]), SimulatedHost("b", [SimulatedModel("any")])
    heard = Heard()
    async with a_stage(
        Heard(at_main),
        served=(RULES, main),
        also_served=[(replace(RULES, name="b", node="n2"), b)],
        others=[heard],
    ) as stage:
        there, gateway = ResidentModels(stage, main, Lanes(LaneOptions())), stage.gateway
        device = a_device("gpu9", node="n2")
        await gateway.join(device, node=a_node("n2"))
        for residency in gateway.residencies or ():
            task = await residency.want("any", 50)
            gateway.world.measure([a_sample("gpu0"), a_sample(key("gpu9", "n2"))])
            await gateway.plan(task.id)
            await in_ledger(gateway, residency.rules.name, ModelState.READY)
        yield there, heard


async def in_ledger(gateway: Gateway, server: str, stage: ModelState) -> None:
    """The leader has read that the server has the model in this state."""
    await gateway.hear(ServerIndex(server, gateway.clock.now(), {"any": IndexedModel("any", stage)}))


async def test_request_denied_by_a_restarted_server_goes_to_one_with_the_model() -> None:
    """The leader has not noticed yet that the first server has lost the model."""
    async with two_copies(NOT_THERE) as (there, heard):
        clients = [await there.stage.connect() for _ in range(12)]
        for client in clients:
            client.ask("POST", INFER, b"xyz")
        assert [(await client.answer())[0] for client in clients] == [200] * 12
        assert heard.bodies == [b"xyz"] * 12


async def test_model_is_asked_of_the_server_that_has_it_not_where_it_waits() -> None:
    async with two_copies(NOT_THERE) as (there, _):
        await in_ledger(there.gateway, "main", ModelState.ABSENT)
        assert there.of() is not None
        residencies = there.gateway.residencies
        assert residencies is not None
        residency, _ = await residencies.want("any", 50)
        assert residency.rules.name == "b"


async def test_request_waiting_at_one_server_goes_to_another_that_gets_the_model() -> None:
    async with two_copies(NOT_THERE) as (there, heard):
        for server in ("main", "b"):
            await in_ledger(there.gateway, server, ModelState.ABSENT)
        client = await there.stage.connect()
        client.ask("POST", INFER, b"xyz")
        await until(lambda: there.gateway.parts.waiters)
        b = there.gateway.world.models.of(ModelKey("b", "any"))
        assert b is not None
        there.gateway.clock.advance(0.1)
        now = there.gateway.clock.now()
        there.gateway.world.measure([a_sample("gpu0", now), a_sample(key("gpu9", "n2"), now)])
        await there.gateway.plan(b.id)
        await in_ledger(there.gateway, "b", ModelState.READY)
        assert (await client.answer())[0] == 200
        assert heard.bodies == [b"xyz"]


class NoCalls:
    """Stands for the gRPC side of a server that nothing is asked over."""

    async def close(self) -> None:
        return


async def test_request_waits_for_another_copy_while_its_server_is_away_over_http() -> None:
    """The same server still counts as there over gRPC, because nobody has asked anything over it."""
    main, b = SimulatedHost("main", [SimulatedModel("any")]), SimulatedHost("b", [SimulatedModel("any")])
    heard, also_served = Heard(), [(replace(RULES, name="b", node="n2"), b)]
    async with a_stage(None, served=(RULES, main), also_served=also_served, others=[heard]) as stage:
        there, gateway = ResidentModels(stage, main, Lanes(LaneOptions())), stage.gateway
        await gateway.join(a_device("gpu9", node="n2"), node=a_node("n2"))
        assert gateway.residencies is not None
        await gateway.residencies.at("main").want("any", 50)  # type: ignore[union-attr]
        await there.load()
        away = stage.fleet.servers[0]
        away.calls = NoCalls()  # type: ignore[assignment]
        for _ in range(3):
            away.http.failed(Trouble.UNREACHABLE, "Connection refused")
        client = await stage.connect()
        client.ask("POST", INFER, b"xyz")
        await until(lambda: gateway.world.models.of(ModelKey("b", "any")) is not None)
        gateway.world.measure([a_sample(key("gpu9", "n2"), gateway.clock.now())])
        await gateway.plan(gateway.world.models.of(ModelKey("b", "any")).id)  # type: ignore[union-attr]
        await in_ledger(gateway, "b", ModelState.READY)
        assert (await client.answer())[0] == 200
