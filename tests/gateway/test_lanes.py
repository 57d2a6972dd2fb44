"""Requests to a model wait for a slot: who goes first, who is told to come again; no slot is lost."""

import asyncio
import time

import pytest
from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.lane import LaneRules
from gpubroker_server.http.identity import Identity
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.body_buffer import BUFFER_BYTES
from gpubroker_server.inference.lanes import MAX_LANES, NO_WISH, LaneOptions, Lanes, QueueWish

from tests.gateway.harness import until
from tests.gateway.inference_stage import INFER, OK, Connection, Stage, a_request, a_stage
from tests.gateway.test_exchange_refusals import refused


class Model:
    """A server that answers a request when it is told to, known by its body."""

    def __init__(self) -> None:
        self.working: dict[bytes, asyncio.Event] = {}
        self.began: list[bytes] = []
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await a_request(reader)
            self.heads.append(head)
            end = self.working[body] = asyncio.Event()
            self.began.append(body)
            await end.wait()
            writer.write(OK)

    async def begins(self, body: bytes) -> None:
        await until(lambda: body in self.began)

    def end(self, body: bytes) -> None:
        self.working[body].set()


class Scene:
    """One model behind a stage, and clients that each send one request."""

    def __init__(self, slots: int = 1, *, places: int = 8, queue_seconds: float = 60.0) -> None:
        self.model = Model()
        options = LaneOptions(
            LaneRules(places, queue_seconds=Seconds(queue_seconds)),
            slots={b"any": slots},
            type_priorities={"llm": 20},
        )
        self.lanes = Lanes(options)
        self.waiting = 0

    async def busy(self, stage: Stage, *bodies: bytes) -> list[Connection]:
        """Each has a slot."""
        clients = []
        for body in bodies:
            clients.append(await stage.connect())
            clients[-1].ask("POST", INFER, body)
            await self.model.begins(body)
        return clients

    async def waits(self, stage: Stage, body: bytes, path: str = INFER, **headers: str) -> Connection:
        client = await stage.connect()
        client.ask("POST", path, body, **headers)
        await self.someone_more_waits()
        return client

    async def someone_more_waits(self) -> None:
        self.waiting += 1
        await until(lambda: self.figures() == self.waiting)

    def figures(self) -> int:
        return sum(figures.waiting for figures in self.lanes.figures())

    async def ends(self, body: bytes, client: Connection) -> dict[str, str]:
        """Headers of the answer."""
        await self.model.begins(body)
        self.model.end(body)
        status, headers, _ = await client.answer()
        assert status == 200
        return headers


async def test_higher_priority_goes_first_and_the_answer_says_how_long_it_waited() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        [first] = await scene.busy(stage, b"first")
        began_at = time.monotonic()
        late = [
            await scene.waits(stage, b"low", x_priority="10"),
            await scene.waits(stage, b"band", X_Priority="background"),
            await scene.waits(stage, b"high", x_priority="50"),
            await scene.waits(stage, b"none"),
        ]
        queued_at = time.monotonic()
        await until(lambda: time.monotonic() > queued_at + 0.002)  # the answers count in thousandths
        headers = await scene.ends(b"first", first)
        assert not [name for name in headers if name.startswith("x-")]
        waited = []
        for body, client in zip((b"high", b"none", b"band", b"low"), (2, 3, 1, 0), strict=True):
            waited.append(float((await scene.ends(body, late[client]))["x-queue-seconds"]))
        # The last three left in the reverse of the order in which they had come.
        # Told in whole milliseconds.
        assert 0.0 < waited[1] <= waited[2] <= waited[3] < time.monotonic() - began_at + 0.001
    assert scene.model.began == [b"first", b"high", b"none", b"band", b"low"]
    assert not list(scene.lanes.figures())


async def test_a_model_type_has_its_priority_and_the_header_is_not_passed_on() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        [first] = await scene.busy(stage, b"first")
        plain = await scene.waits(stage, b"plain", x_priority="10")
        typed = await scene.waits(stage, b"typed", x_model_type="llm")
        await scene.ends(b"first", first)
        assert "x-priority" not in await scene.ends(b"typed", typed)
        await scene.ends(b"plain", plain)
    assert scene.model.began == [b"first", b"typed", b"plain"]
    assert not [head for head in scene.model.heads if b"x-model-type" in head.lower()]


async def test_only_requests_that_make_a_model_work_take_a_slot() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        await scene.busy(stage, b"first")
        for method, path in (
            ("GET", "/v2/models/any/ready"),
            ("GET", "/v2/health/live"),
            ("GET", INFER),
            ("POST", "/v2/models/other/infer"),
        ):
            client = await stage.connect()
            client.ask(method, path, path.encode() + method.encode())
            await scene.ends(path.encode() + method.encode(), client)
        for action in ("infer", "generate", "generate_stream", "versions/1/infer"):
            await scene.waits(stage, action.encode(), f"/v2/models/any/{action}")


async def test_however_its_name_is_encoded_a_model_has_one_lane() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        await scene.busy(stage, b"first")
        await scene.waits(stage, b"second", "/v2/models/a%6Ey/infer")
        await scene.waits(stage, b"third", "/v2/models/%61%6e%79/infer")
        assert [(one.model, one.waiting) for one in scene.lanes.figures()] == [("any", 2)]


async def test_a_request_that_has_waited_as_long_as_it_may_says_when_to_retry() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        [first] = await scene.busy(stage, b"first")
        await scene.ends(b"first", first)
        [again] = await scene.busy(stage, b"again")
        await scene.waits(stage, b"before", x_priority="50")
        late = await stage.connect()
        late.ask("POST", INFER, b"late", x_timeout_seconds="0.01", x_priority="1")
        status, headers, body = await late.answer()
        document = refused((status, headers, body), 503, "model-queue-timeout")
        assert document["queue_position"] == 2
        assert headers["x-queue-position"] == "2"
        assert document["queue_eta_seconds"] == float(headers["x-queue-eta-seconds"]) > 0
        assert int(headers["retry-after"]) >= document["queue_eta_seconds"]
        late.ask("GET", "/healthz")
        assert (await late.answer())[0] == 200
        await scene.ends(b"again", again)
    assert b"late" not in scene.model.began


async def test_no_request_waits_longer_than_the_operator_allows() -> None:
    scene = Scene(queue_seconds=0.01)
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        await scene.busy(stage, b"first")
        answered = await stage.ask("POST", INFER, b"late", x_timeout_seconds="1000")
        refused(answered, 503, "model-queue-timeout")


@pytest.mark.parametrize("has_slot", [True, False])
async def test_the_place_of_a_client_that_goes_is_free(has_slot: bool) -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        [first] = await scene.busy(stage, b"first")
        second = await scene.waits(stage, b"second")
        third = await scene.waits(stage, b"third")
        await (first if has_slot else second).close()
        await until(lambda: scene.figures() == 1)
        if has_slot:
            await scene.ends(b"second", second)
        else:
            await scene.ends(b"first", first)
        await scene.ends(b"third", third)
        assert not list(scene.lanes.figures())


async def test_a_full_lane_and_a_full_share_are_refused_at_once() -> None:
    scene = Scene(places=4)
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        other = await stage.of_tenant("c")
        busy = await stage.connect()
        busy.ask("POST", INFER, b"first", Authorization=other)
        await scene.model.begins(b"first")
        for number in range(3):
            await scene.waits(stage, b"%d" % number)
        answered = await stage.ask("POST", INFER, b"{}")
        document = refused(answered, 429, "model-queue-share")
        assert 'tenant "default"' in document["error"]
        assert (document["queue_position"], document["queue_eta_seconds"]) == (4, None)
        assert answered[1]["retry-after"] == "1"
        await scene.waits(stage, b"of b", Authorization=await stage.of_tenant("b"))
        refused(await stage.ask("POST", INFER, b"{}", Authorization=other), 429, "model-queue-full")


async def test_in_a_full_lane_the_least_important_loses_its_place() -> None:
    scene = Scene(places=1)
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        [first] = await scene.busy(stage, b"first")
        low = await scene.waits(stage, b"low", x_priority="1")
        high = await stage.connect()
        high.ask("POST", INFER, b"high")
        refused(await low.answer(), 429, "model-queue-full")
        await scene.ends(b"first", first)
        await scene.ends(b"high", high)


async def test_a_priority_above_the_tokens_is_lowered_and_the_answer_says_so() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        weak = await stage.of_tenant("weak", max_priority=20)
        [first] = await scene.busy(stage, b"first")
        asked = await scene.waits(stage, b"asked", x_priority="critical", Authorization=weak)
        unsaid = await scene.waits(stage, b"unsaid", Authorization=weak)
        over = await scene.waits(stage, b"over", x_priority="21")
        await scene.ends(b"first", first)
        assert "x-priority" not in await scene.ends(b"over", over)
        assert (await scene.ends(b"asked", asked))["x-priority"] == "20"
        assert "x-priority" not in await scene.ends(b"unsaid", unsaid)


def test_a_request_without_a_priority_has_that_of_its_model_type() -> None:
    lanes = Lanes(LaneOptions(type_priorities={"llm": 79, "chat": 100}))
    weak = Identity("weak", "weak", (), 90)
    assert lanes.wish_in(weak, None, None, "llm") == QueueWish(79)
    assert lanes.wish_in(weak, "10", None, "llm") == QueueWish(10)
    assert lanes.wish_in(weak, None, "2", "other") == QueueWish(None, 2.0)
    assert lanes.wish_in(weak, None, None, "chat") == QueueWish(90), (
        "it asked for none, so that none is told of it"
    )


@pytest.mark.parametrize("text", ["101", "-1", "high", "", "1.5", "٣", "0000"])
async def test_a_priority_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Problem) as found:
        Lanes(LaneOptions()).wish_in(SOMEBODY, text, None, None)
    assert found.value.code == "header-invalid"
    assert "critical, interactive" in found.value.detail


@pytest.mark.parametrize("text", ["0", "-1", "soon", "", "nan", "inf"])
async def test_a_time_that_is_none_is_refused(text: str) -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        client = await stage.connect()
        client.send(
            client.head("POST", INFER, 2).replace("\r\n\r\n", f"\r\nx-timeout-seconds: {text}\r\n\r\n")
        )
        client.send(b"{}")
        document = refused(await client.answer(), 400, "header-invalid")
        assert "x-timeout-seconds" in document["error"]


async def test_of_a_large_body_that_waits_only_a_part_is_taken_until_its_turn() -> None:
    scene = Scene()
    sent = bytes(range(256)) * 100_000
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        [first] = await scene.busy(stage, b"first")
        large = await scene.waits(stage, sent)
        assert large.writer.transport.get_write_buffer_size() > len(sent) - 64 * BUFFER_BYTES
        await scene.ends(b"first", first)
        await scene.ends(sent, large)


async def test_chunked_body_that_grows_too_large_while_waiting_leaves_its_place() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes, most_body_bytes=1000) as stage:
        await scene.busy(stage, b"first")
        client = await stage.connect()
        client.send(client.head("POST", INFER, Transfer_Encoding="chunked"))
        await scene.someone_more_waits()
        client.send(b"7d0\r\n", bytes(2000), b"\r\n0\r\n\r\n")
        refused(await client.answer(), 413, "payload-too-large")
        assert scene.figures() == 0


async def test_the_slot_of_a_request_that_the_server_breaks_off_is_free() -> None:
    scene = Scene()

    async def breaks(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        _, body = await a_request(reader)
        end = scene.model.working[body] = asyncio.Event()
        scene.model.began.append(body)
        await end.wait()

    async with a_stage(breaks, lanes=scene.lanes) as stage:
        [first] = await scene.busy(stage, b"first")
        second = await scene.waits(stage, b"second")
        scene.model.end(b"first")
        refused(await first.answer(), 502, "model-server-failed")
        await scene.model.begins(b"second")
        scene.model.end(b"second")
        refused(await second.answer(), 502, "model-server-failed")
        assert not list(scene.lanes.figures())


async def test_internal_error_at_a_free_slot_is_reported_and_the_next_one_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        [first] = await scene.busy(stage, b"first")
        clients = [await scene.waits(stage, b"%d" % number) for number in range(3)]
        monkeypatch.setattr(stage.backend, "ask", None)
        await scene.ends(b"first", first)
        for client in clients:
            refused(await client.answer(), 500, "internal-error")
        assert not list(scene.lanes.figures())


async def test_slots_waiting_and_waits_are_measured() -> None:
    scene = Scene()
    async with a_stage(scene.model, lanes=scene.lanes) as stage:
        telemetry = stage.gateway.app.state.telemetry
        telemetry.show_lanes(scene.lanes.figures)
        [first] = await scene.busy(stage, b"first")
        second = await scene.waits(stage, b"second")
        told = (await stage.gateway.admin.get("/metrics")).text
        for name, value in (("slots", 1), ("requests_in_flight", 1), ("requests_waiting", 1)):
            assert f'gpubroker_model_{name}{{model="any"}} {value}.0' in told
        await scene.ends(b"first", first)
        await scene.ends(b"second", second)
        told = (await stage.gateway.admin.get("/metrics")).text
        assert 'model="any"' not in told


SOMEBODY = Identity("me", "default", ("*",), 50)


async def test_the_number_of_idle_lanes_is_limited() -> None:
    lanes = Lanes(LaneOptions())
    kept = lanes.enter(b"kept", SOMEBODY, NO_WISH)
    for number in range(MAX_LANES + 10):
        lanes.enter(b"%d" % number, SOMEBODY, NO_WISH).leave()
    assert len(lanes._lanes) < MAX_LANES
    assert [figures.model for figures in lanes.figures()] == ["kept"]
    kept.leave()
    kept.leave()
    assert not list(lanes.figures())


async def test_a_model_counts_as_used_lately_for_a_while_after_its_request() -> None:
    now = 0.0
    lanes = Lanes(LaneOptions(recent_seconds=Seconds(30.0)), now=lambda: now)
    asked, idle = frozenset({"m"}), frozenset[str]()
    entry = lanes.enter(b"m", SOMEBODY, NO_WISH)
    now = 100.0
    assert lanes.in_use() == ModelsInUse(asked, asked)
    entry.leave()
    now = 129.0
    assert lanes.in_use() == ModelsInUse(idle, asked)
    now = 130.0
    assert lanes.in_use() == ModelsInUse(idle, idle)


async def test_entry_that_leaves_as_it_starts_or_loses_frees_its_slot_once() -> None:
    lanes = Lanes(LaneOptions(LaneRules(1), slots={b"m": 1}))
    first = lanes.enter(b"m", SOMEBODY, NO_WISH)
    goes = lanes.enter(b"m", SOMEBODY, NO_WISH)
    asking = asyncio.ensure_future(goes.granted())
    await asyncio.sleep(0)
    first.leave()
    asking.cancel()
    goes.leave()
    goes.leave()
    again = lanes.enter(b"m", SOMEBODY, NO_WISH)
    loses = lanes.enter(b"m", SOMEBODY, QueueWish(priority=1))
    wins = lanes.enter(b"m", SOMEBODY, NO_WISH)
    loses.leave()
    with pytest.raises(Problem, match="a request of higher priority, or of a tenant"):
        await loses.granted()
    assert [figures[1:] for figures in lanes.figures()] == [(1, 1, 1)]
    again.leave()
    wins.leave()
    assert not list(lanes.figures())
