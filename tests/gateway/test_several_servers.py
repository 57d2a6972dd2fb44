"""Several servers of models: which one is asked, and what becomes of a request when it breaks off."""

import asyncio
import json
import ssl
from pathlib import Path

import pytest
from gpubroker_server.adapters.triton.http_backend import HttpBackend
from gpubroker_server.inference.health_checks import CheckRules, HealthChecks
from gpubroker_server.inference.protocols.triton.checks import models_in
from gpubroker_server.inference.servers import Contents, Server
from gpubroker_server.telemetry.exposition import text_of
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.gateway.harness import problem, until
from tests.gateway.inference_stage import INFER, OK, Handler, Heard, Stage, a_request, a_stage

CERTIFICATE = Path(__file__).with_name("self_signed.pem")
SHORT = CheckRules(every_seconds=0.0, rest_seconds=0.0, doubt_seconds=0.0, answer_seconds=5.0)  # type: ignore[arg-type]


def answering(body: bytes, status: bytes = b"200 OK") -> Heard:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return Heard(head % (status, len(body)) + body)


def breaking_off(after: bytes = b"", times: int = 10**6) -> Handler:
    """It takes the request, says this, and closes the connection; and answers from a later time on."""
    left = [times]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await a_request(reader)
            left[0] -= 1
            if left[0] >= 0:
                writer.write(after)
                return
            writer.write(OK)

    return handle


def have(stage: Stage, *ready: set[bytes]) -> None:
    """What each server says that it has in memory."""
    for server, models in zip(stage.fleet.servers, ready, strict=True):
        server.contents = Contents(frozenset(models | {b"cold"}), frozenset(models))


def server(stage: Stage, name: str) -> Server:
    return next(one for one in stage.fleet.servers if one.name == name)


async def test_a_request_goes_to_the_server_that_has_the_model() -> None:
    async with a_stage(main := Heard(), others=[b := Heard()]) as stage:
        have(stage, {b"other"}, {b"any", b"any/2"})
        for path in (INFER, "/v2/models/any/versions/2/infer"):
            assert (await stage.ask("POST", path, b"{}"))[0] == 200
        assert (len(main.heads), len(b.heads)) == (0, 2)


async def test_server_with_fewest_requests_is_asked_and_equal_ones_take_turns() -> None:
    async with a_stage(main := Heard(), others=[b := Heard()]) as stage:
        have(stage, {b"any"}, {b"any"})
        for _ in range(4):
            await stage.ask("POST", INFER, b"{}")
        assert (len(main.heads), len(b.heads)) == (2, 2)
        server(stage, "main").in_flight = 2
        for _ in range(4):
            await stage.ask("POST", INFER, b"{}")
        assert (len(main.heads), len(b.heads)) == (2, 6)
        assert server(stage, "b").in_flight == 0


async def test_a_model_that_no_server_has_is_answered_by_the_first() -> None:
    async with a_stage(main := answering(b"{}", b"404 Not Found"), others=[b := Heard()]) as stage:
        have(stage, set(), set())
        watched = server(stage, "b").http
        assert (await stage.ask("POST", INFER, b"{}"))[0] == 404
        assert (len(main.heads), len(b.heads)) == (1, 0)
        assert watched.check_wanted.is_set(), "it may have been loaded a moment ago"


async def test_server_that_lists_no_models_gets_requests_for_unknown_models() -> None:
    async with a_stage(main := Heard(), others=[b := Heard()]) as stage:
        server(stage, "main").contents = Contents(frozenset(), frozenset({b"other"}))
        await stage.ask("POST", INFER, b"{}")
        await stage.ask("POST", "/v2/models/other/infer", b"{}")
        assert (len(main.heads), len(b.heads)) == (1, 1)


async def test_a_load_goes_where_the_model_is_in_the_repository() -> None:
    async with a_stage(main := Heard(), others=[b := Heard()]) as stage:
        have(stage, set(), set())
        server(stage, "main").contents = Contents()
        await stage.ask("POST", "/v2/repository/models/cold/load", b"")
        assert (len(main.heads), len(b.heads)) == (0, 1)


async def test_model_is_asked_where_it_was_just_loaded_until_it_is_unloaded() -> None:
    async with a_stage(main := Heard(), others=[b := Heard()]) as stage:
        have(stage, set(), set())
        server(stage, "main").contents = Contents()
        await stage.ask("POST", "/v2/repository/models/cold/load", b"")
        await stage.ask("POST", "/v2/models/cold/infer", b"{}")
        await stage.ask("POST", "/v2/repository/models/cold/unload", b"")
        assert (len(main.heads), len(b.heads)) == (0, 3)
        await stage.ask("POST", "/v2/models/cold/infer", b"{}")
        assert (len(main.heads), len(b.heads)) == (1, 3), "the first one says that it has no such model"


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_unsent_request_goes_to_the_next_server_with_all_of_its_body(chunked: bool) -> None:
    async with a_stage(None, others=[b := Heard()]) as stage:
        have(stage, {b"any"}, {b"any"})
        server(stage, "b").in_flight = 1
        client = await stage.connect()
        if chunked:
            client.send(client.head("POST", INFER, Transfer_Encoding="chunked"), "3\r\nxyz\r\n0\r\n\r\n")
        else:
            client.ask("POST", INFER, b"xyz")
        assert (await client.answer())[0] == 200
        assert b.bodies == [b"3\r\nxyz\r\n0\r\n\r\n" if chunked else b"xyz"]
        assert [one.in_flight for one in stage.fleet.servers] == [0, 1]
        assert server(stage, "main").http.faults == 1


async def test_large_body_goes_on_at_the_next_server_when_the_first_is_not_there() -> None:
    body = bytes(range(256)) * 4096 * 3
    async with a_stage(None, others=[b := Heard()]) as stage:
        have(stage, {b"any"}, {b"any"})
        server(stage, "b").in_flight = 1
        assert (await stage.ask("POST", INFER, body))[0] == 200
        assert b.bodies == [body]


async def test_a_request_that_changes_nothing_is_sent_again_if_no_answer_came() -> None:
    async with a_stage(breaking_off(), others=[b := Heard()]) as stage:
        assert (await stage.ask("GET", "/v2"))[0] == 200
        assert len(b.heads) == 1


async def test_broken_off_inference_is_repeated_only_if_its_client_allows_it() -> None:
    async with a_stage(breaking_off(), others=[b := Heard()]) as stage:
        have(stage, {b"any"}, {b"any"})
        server(stage, "b").in_flight = 1
        status, _, told = await stage.ask("POST", INFER, b"{}")
        assert (status, json.loads(told)["code"]) == (502, "model-server-failed")
        assert "server main broke off" in json.loads(told)["error"]
        assert b.heads == []
        assert (await stage.ask("POST", INFER, b"{}", x_idempotent="true"))[0] == 200
        assert b"x-idempotent" not in b.heads[0].lower()


async def test_a_request_whose_answer_has_begun_is_never_sent_again() -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"
    async with a_stage(breaking_off(half), others=[b := Heard()]) as stage:
        have(stage, {b"any"}, {b"any"})
        server(stage, "b").in_flight = 1
        client = await stage.connect()
        client.ask("POST", INFER, b"{}", x_idempotent="true")
        assert (await client.reader.read()).endswith(b"half")
        assert b.heads == []


async def test_each_server_has_its_own_trust_and_credentials_even_on_a_retry() -> None:
    async with a_stage(main := Heard(), others=[b := Heard()], certificate=CERTIFICATE, plain=["b"]) as stage:
        have(stage, {b"one"}, {b"other"})
        for model in ("one", "other"):
            assert (await stage.ask("POST", f"/v2/models/{model}/infer", b"{}"))[0] == 200
        assert (b"Bearer theirs" in main.heads[0], b"Bearer of-b" in b.heads[0]) == (True, True)
    async with a_stage(None, others=[b := Heard()], certificate=CERTIFICATE, plain=["b"]) as stage:
        assert (await stage.ask("GET", "/v2"))[0] == 200
        assert b"theirs" not in b.heads[0]


async def test_a_server_with_an_untrusted_certificate_gets_nothing() -> None:
    async with a_stage(Heard(), others=[b := Heard()], certificate=CERTIFICATE) as stage:
        have(stage, {b"any"}, {b"any"})
        stage.fleet.servers[0].backend = HttpBackend(
            replace(stage.backend._server, tls=ssl.create_default_context())
        )
        server(stage, "b").in_flight = 1
        assert (await stage.ask("POST", INFER, b"{}"))[0] == 200
        assert len(b.heads) == 1
        assert "CERTIFICATE_VERIFY_FAILED" in server(stage, "main").http.breaker.fault


async def test_if_no_server_answers_the_last_failure_is_reported() -> None:
    async with a_stage(None, others=[None]) as stage:
        have(stage, {b"any"}, {b"any"})
        status, _, told = await stage.ask("POST", INFER, b"{}")
        assert (status, json.loads(told)["code"]) == (503, "model-server-unavailable")
        assert [one.http.faults for one in stage.fleet.servers] == [1, 1]


async def test_server_that_failed_three_times_gets_nothing_until_it_answers() -> None:
    async with a_stage(breaking_off(times=3), others=[b := Heard()]) as stage:
        have(stage, {b"any"}, {b"any"})
        with capture_logs() as logs:
            for _ in range(3):
                server(stage, "b").in_flight = 1
                assert (await stage.ask("POST", INFER, b"{}"))[0] == 502
            server(stage, "b").in_flight = 0
            for _ in range(4):
                assert (await stage.ask("POST", INFER, b"{}"))[0] == 200
            assert len(b.heads) == 4
            watch = asyncio.create_task(HealthChecks([server(stage, "main")], SHORT).keep())
            await until(lambda: server(stage, "main").is_up)
            watch.cancel()
        told = [log["event"] for log in logs if log["event"].startswith("a model server")]
        assert told == ["a model server does not answer", "a model server answers again"]


async def test_model_is_not_asked_elsewhere_when_its_only_server_is_silent() -> None:
    async with a_stage(None, others=[b := Heard()]) as stage:
        have(stage, {b"any"}, {b"other"})
        for _ in range(5):
            assert (await stage.ask("POST", INFER, b"{}"))[0] == 503
        assert not server(stage, "main").is_up
        assert b.heads == []


async def test_a_service_that_ends_reports_no_faults_of_its_servers() -> None:
    began: list[bytes] = []

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        began.append((await a_request(reader))[0])
        await reader.read()

    async with a_stage(silent) as stage:
        clients = [await stage.connect() for _ in range(4)]
        for client in clients:
            client.ask("POST", INFER, b"{}")
        await until(lambda: len(began) == 4)
        await server(stage, "main").close()
        assert [(await client.answer())[0] for client in clients] == [502] * 4
        assert (server(stage, "main").http.faults, server(stage, "main").is_up) == (0, True)


@pytest.mark.parametrize("others", [(), (None,)])
async def test_a_request_whose_client_leaves_is_no_longer_counted(others: tuple[None, ...]) -> None:
    began = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        began.set()
        await reader.read()

    async with a_stage(silent, others=others) as stage:
        have(stage, {b"any"}, *(set[bytes]() for _ in others))
        client = await stage.connect()
        client.ask("POST", INFER, b"{}")
        await began.wait()
        assert server(stage, "main").in_flight == 1
        await client.close()
        await until(lambda: server(stage, "main").in_flight == 0)


async def test_one_server_that_is_ready_is_enough() -> None:
    async with a_stage(answering(b"", b"400 Bad Request"), others=[Heard(), None]) as stage:
        assert (await stage.ask("GET", "/v2/health/ready", Authorization=""))[0] == 200
    async with a_stage(answering(b"", b"400 Bad Request"), others=[None]) as stage:
        assert (await stage.ask("GET", "/v2/health/ready", Authorization=""))[0] == 400
    async with a_stage(None, others=[None]) as stage:
        assert (await stage.ask("GET", "/v2/health/live", Authorization=""))[0] == 503


async def test_the_index_is_that_of_all() -> None:
    cold, ready = {"name": "m"}, {"name": "m", "version": "1", "state": "READY"}
    gone = {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    only = {"name": "n"}
    async with a_stage(
        answering(json.dumps([gone, only]).encode()),
        others=[answering(json.dumps([cold]).encode()), b := answering(json.dumps([ready]).encode())],
    ) as stage:
        asked = b'{"ready": true}'
        status, headers, body = await stage.ask("POST", "/v2/repository/index", asked, Accept_Encoding="gzip")
        assert (status, headers["content-type"]) == (200, "application/json")
        assert json.loads(body) == [ready, only]
        assert b.bodies == [asked]
        assert b"gzip" not in b.heads[0]


async def test_answers_that_cannot_be_merged_are_reported_as_the_servers_fault() -> None:
    async with a_stage(answering(b"nonsense"), others=[answering(b"[]")]) as stage:
        status, _, body = await stage.ask("POST", "/v2/repository/index", b"")
        assert (status, json.loads(body)["code"]) == (502, "model-server-failed")


async def test_unload_goes_to_every_server_with_the_model_and_settings_to_all() -> None:
    async with a_stage(main := Heard(), others=[b := Heard(), c := Heard()]) as stage:
        have(stage, {b"any"}, {b"any"}, set())
        assert (await stage.ask("POST", "/v2/repository/models/any/unload", b""))[0] == 200
        assert [len(one.heads) for one in (main, b, c)] == [1, 1, 0]
        assert (await stage.ask("POST", "/v2/logging", b"{}"))[0] == 200
        assert [len(one.heads) for one in (main, b, c)] == [2, 2, 1]
        have(stage, {b"any"}, {b"any"}, set())
        assert (await stage.ask("POST", "/v2/models/any/trace/setting", b"{}"))[0] == 200
        assert [len(one.heads) for one in (main, b, c)] == [3, 3, 1]
        b.answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
        assert (await stage.ask("POST", "/v2/logging", b"{}"))[0] == 400
        assert (await stage.ask("GET", "/v2/logging"))[0] == 200
        assert [len(one.heads) for one in (main, b, c)] == [5, 4, 2]


async def test_a_request_to_all_servers_may_not_be_large() -> None:
    async with a_stage(Heard(), others=[Heard()]) as stage:
        assert (await stage.ask("POST", "/v2/logging", b"x" * (1024 * 1024 + 1)))[0] == 413


async def test_a_server_is_checked_with_its_credentials_and_says_what_it_has() -> None:
    index = [{"name": "m", "version": "1", "state": "READY"}, {"name": "n"}]
    async with a_stage(main := answering(json.dumps(index).encode()), others=[None]) as stage:
        watch = HealthChecks(stage.fleet.servers, SHORT)
        for _ in range(3):
            await watch.check_all()
        assert [b"Bearer theirs" in head for head in main.heads] == [True] * len(main.heads) != []
        assert server(stage, "main").contents == Contents(frozenset({b"m", b"n"}), frozenset({b"m", b"m/1"}))
        assert [one.is_up for one in stage.fleet.servers] == [True, False]
        main.answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
        for _ in range(3):
            await watch.check_all()
        assert server(stage, "main").http.breaker.fault == "GET /v2/health/live was answered 401"
        assert not server(stage, "main").is_up
        assert server(stage, "main").http.refusal == "it answered GET /v2/health/live with 401"


@pytest.mark.parametrize("value", ["maybe", "yes"])
async def test_a_request_that_is_idempotent_or_not_says_so_with_true_or_false(value: str) -> None:
    async with a_stage(heard := Heard()) as stage:
        status, _, body = await stage.ask("POST", INFER, b"{}", x_idempotent=value)
        told = json.loads(body)
        assert (status, told["code"]) == (400, "header-invalid")
        assert f'the header x-idempotent is "{value}"; write true or false' in told["error"]
        assert heard.bodies == []
        assert (await stage.ask("POST", INFER, b"{}", x_idempotent="FALSE"))[0] == 200


async def test_a_server_whose_connections_are_all_in_use_is_not_down() -> None:
    """Long answers and streams keep them for minutes."""
    ended, asked = asyncio.Event(), []

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, _ = await a_request(reader)
            if head.startswith(b"POST /v2/models"):
                asked.append(head)
                await ended.wait()
            writer.write(OK)

    async with a_stage(slow, connections=1) as stage:
        clients = [await stage.connect() for _ in range(2)]
        for client in clients:
            client.ask("POST", INFER, b"{}")
        await until(lambda: len(stage.backend._waiting) == 1 and len(asked) == 1)
        for _ in range(4):
            await HealthChecks(stage.fleet.servers, SHORT).check_all()
        assert (server(stage, "main").http.faults, server(stage, "main").is_up) == (0, True)
        await until(lambda: len(stage.backend._connections) == 1)
        assert len(asked) == 1, "the other request has waited for its own connection"
        ended.set()
        assert [(await client.answer())[0] for client in clients] == [200, 200]


def test_a_body_that_is_no_index_says_nothing() -> None:
    for body in (b"", b"{}", b"[1]", b'[{"name": 1}]'):
        assert models_in(body) is None


async def test_models_of_all_servers_are_listed_and_servers_with_their_health() -> None:
    index = [{"name": "m", "version": "1", "state": "READY"}, {"name": "m", "version": "2"}, {"name": "n"}]
    gone = [{"name": "n", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]
    async with a_stage(
        answering(json.dumps(index).encode()), others=[answering(json.dumps(gone).encode()), None]
    ) as stage:
        stage.gateway.change(servers=stage.fleet.servers)
        boss = await stage.gateway.client("boss")
        items = (await boss.get("/models")).json()["items"]
        assert [(one["server"], one["name"], one["state"]) for one in items] == [
            ("main", "m", "resident"), ("b", "n", "cold"), ("main", "n", "cold"),
        ]  # fmt: skip
        assert (await boss.get("/models/m")).json()["server"] == "main"
        assert (await boss.get("/models/n?server=b")).json()["reason"] == "unloaded"
        problem(await boss.get("/models/x"), 404, "not-found")
        problem(await boss.get("/models/m?server=b"), 404, "not-found")
        for _ in range(3):
            await HealthChecks(stage.fleet.servers, SHORT).check_all()
        told = (await boss.get("/stats")).json()["model_servers"]
        assert [(one["name"], one["node"], one["grpc"]) for one in told] == [
            ("main", None, None), ("b", None, None), ("c", None, None),
        ]  # fmt: skip
        assert [one["http"]["up"] for one in told] == [True, True, False]
        assert told[2]["http"]["fault"].startswith("[Errno 111]")


async def test_metrics_show_servers_and_what_was_passed_on() -> None:
    async with a_stage(None, others=[Heard()]) as stage:
        have(stage, {b"any"}, {b"any"})
        stage.gateway.app.state.telemetry.show_servers(stage.fleet.rows)
        for _ in range(3):
            server(stage, "b").in_flight = 1
            await stage.ask("POST", INFER, b"{}")
        told = text_of(stage.gateway.app.state.telemetry.metrics()).decode()
        for line in (
            'up{protocol="http",server="main"} 0.0',
            'up{protocol="http",server="b"} 1.0',
            'faults_total{protocol="http",server="main"} 3.0',
            'requests_passed_on_total{server="main"} 3.0',
            'requests_in_flight{server="b"} 1.0',
        ):
            assert f"gpubroker_model_server_{line}" in told
