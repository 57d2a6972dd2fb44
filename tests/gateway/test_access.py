"""Host names, tokens and their scopes, health."""

import asyncio
from typing import Any

import pytest
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.http.identity import Tokens, hash_of, new_token
from gpubroker_server.ports.store import StoreUnavailable
from structlog.testing import capture_logs

from tests.gateway.harness import DOCUMENT, Client, Gateway, a_body, fault, problem, until

OPERATIONS = [
    (method.upper(), path, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]
OPEN = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/problems/{code}")}


def test_only_health_and_pages_of_problems_are_open() -> None:
    assert {(method, path) for method, path, operation in OPERATIONS if not operation.get("security")} == OPEN


def an_address(path: str) -> str:
    return path.replace("{task_id}", "task_" + "0" * 26).replace("{name}", "nobody")


async def test_every_other_operation_asks_for_a_token(gateway: Gateway) -> None:
    nobody = gateway.with_secret(None)
    for method, path, _ in OPERATIONS:
        if (method, path) not in OPEN:
            response = await nobody.request(method, an_address(path))
            assert "Authorization: Bearer" in problem(response, 401, "unauthenticated")["detail"], path
            assert response.headers["www-authenticate"] == 'Bearer realm="gpubroker"', path


async def test_every_operation_asks_for_its_scope_before_anything_else(gateway: Gateway) -> None:
    scopes = {
        "tasks:read",
        "tasks:write",
        "tasks:code",
        "tasks:command",
        "cluster:read",
        "metrics:read",
        "admin",
    }
    for number, (method, path, operation) in enumerate(OPERATIONS):
        if (method, path) not in OPEN:
            enough = [scope for each in operation["security"] for scope in each["token"]]
            without = await gateway.client(f"without-{number}", *(scopes - {*enough}))
            response = await without.request(method, an_address(path), content=b"{")
            detail = problem(response, 403, "forbidden")["detail"]
            assert f"lacks the scope {' or '.join(enough)}," in detail, f"{method} {path}"


@pytest.mark.parametrize(
    "header", ["Bearer", "Bearer ", "Bearer gpb_unknown", "bearer \xff", "Basic YTpi", "gpb_x", ""]
)
async def test_a_bad_token_is_refused(gateway: Gateway, header: str) -> None:
    response = await gateway.with_secret(None).get(
        "/tasks", headers=[(b"Authorization", header.encode("latin-1"))]
    )
    problem(response, 401, "unauthenticated")


async def test_an_expired_token_is_refused(gateway: Gateway) -> None:
    short = await gateway.client("short", expires_at=Instant(gateway.clock.now() + 10))
    assert (await short.get("/tasks")).status_code == 200
    gateway.clock.advance(10)
    assert 'error="invalid_token"' in (await short.get("/tasks")).headers["www-authenticate"]


async def test_an_unknown_path_is_404_only_for_a_client_with_a_token(gateway: Gateway, api: Client) -> None:
    problem(await gateway.with_secret(None).get("/secret"), 401, "unauthenticated")
    problem(await api.get("/secret"), 404, "not-found")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "", "127.0.0.1.evil.example", "localhost:80@evil", "[::2]", "broker.example.evil"],
)
@pytest.mark.parametrize("path", ["/tasks", "/healthz", "/nowhere"])
async def test_another_host_name_is_refused_on_every_path(gateway: Gateway, host: str, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        response = await gateway.admin.request(method, path, headers={"Host": host})
        problem(response, 421, "host-not-allowed")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:8470", "LOCALHOST", "[::1]:8470", "[::1]", "broker.example:443"]
)
async def test_loopback_and_configured_names_are_accepted(gateway: Gateway, host: str) -> None:
    assert (await gateway.admin.get("/tasks", headers={"Host": host})).status_code == 200


async def test_unsupported_method_of_a_path_is_refused_with_the_supported_ones(api: Client) -> None:
    for method, path, allowed in (
        ("DELETE", "/tasks", "GET, HEAD, POST"),
        ("PUT", f"/tasks/task_{'0' * 26}", "GET, HEAD, PATCH"),
        ("GET", "/shutdown", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
    ):
        response = await api.request(method, path)
        problem(response, 405, "method-not-allowed")
        assert response.headers["allow"] == allowed


async def test_an_internal_error_has_a_request_id_and_no_traceback(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_wanted: object) -> None:
        raise RuntimeError("secret internals")

    monkeypatch.setattr(gateway.store, "records", broken)
    with capture_logs() as lines:
        response = await api.get("/tasks")
    document = problem(response, 500, "internal-error")
    assert document["request_id"] in document["detail"]
    assert [(line["request"], line["path"]) for line in lines] == [(document["request_id"], "/tasks")]
    assert "secret internals" not in response.text
    assert "Traceback" not in response.text


async def test_an_unreachable_database_is_a_retryable_503(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_submission: object) -> None:
        raise StoreUnavailable("connection refused")

    monkeypatch.setattr(gateway.store, "submit", away)
    response = await api.post("/tasks", json=a_body())
    assert problem(response, 503, "store-unavailable")["retryable"] is True
    assert response.headers["retry-after"] == "1"


async def test_a_new_token_is_shown_once_and_kept_as_a_hash(gateway: Gateway, api: Client) -> None:
    wanted = {
        "name": "ci",
        "scopes": ["tasks:write", "tasks:read"],
        "max_priority": 60,
        "expires_in_seconds": 3600,
    }
    response = await api.post("/tokens", json=wanted)
    assert response.status_code == 201
    assert response.headers["cache-control"] == "no-store"
    token = response.json()
    assert token["token"].startswith("gpb_")
    assert (token["tenant"], token["expires_at"]) == ("default", "1970-01-12T14:46:40.000Z")
    rows = {row.name: row for row in await gateway.store.tokens()}
    assert rows["ci"].sha256 == hash_of(token["token"])
    assert token["token"] not in (await api.get("/tokens")).text
    assert (await gateway.with_secret(token["token"]).get("/tasks")).status_code == 200


async def test_a_deleted_token_is_refused_at_once(gateway: Gateway, api: Client) -> None:
    client = await gateway.client("ci")
    assert (await client.get("/tasks")).status_code == 200
    assert (await api.delete("/tokens/ci")).status_code == 204
    problem(await client.get("/tasks"), 401, "unauthenticated")
    problem(await api.delete("/tokens/ci"), 404, "not-found")


async def test_a_token_name_cannot_be_used_twice(gateway: Gateway, api: Client) -> None:
    before = {row.name: row for row in await gateway.store.tokens()}["admin"]
    problem(await api.post("/tokens", json={"name": "admin", "scopes": ["*"]}), 409, "token-exists")
    assert {row.name: row for row in await gateway.store.tokens()}["admin"] == before


async def test_a_band_s_name_may_stand_for_the_highest_priority_of_a_token(api: Client) -> None:
    wanted = {"name": "nightly", "scopes": ["tasks:write"], "max_priority": "background"}
    token = (await api.post("/tokens", json=wanted)).json()
    assert token["max_priority"] == 24
    refused = await api.post("/tokens", json={**wanted, "name": "other", "max_priority": "high"})
    assert "0 to 100 or one of critical, " in fault(refused, "/max_priority")


async def test_of_two_tokens_created_at_once_with_one_name_the_first_stays(
    gateway: Gateway, api: Client
) -> None:
    body = {"name": "ci", "scopes": ["tasks:read"]}
    first, second = await asyncio.gather(*(api.post("/tokens", json=body) for _ in range(2)))
    problem(second, 409, "token-exists")
    assert (await gateway.with_secret(first.json()["token"]).get("/tasks")).status_code == 200


async def test_a_token_cannot_grant_scopes_it_lacks(gateway: Gateway) -> None:
    limited = await gateway.client("limited", "admin", "tasks:read", max_priority=60)
    wanted: dict[str, Any] = {"name": "x", "scopes": ["tasks:code", "*"], "max_priority": 61}
    document = problem(await limited.post("/tokens", json=wanted), 403, "forbidden")
    assert [found["pointer"] for found in document["errors"]] == ["/scopes", "/scopes", "/max_priority"]
    allowed = await limited.post("/tokens", json={"name": "x", "scopes": ["tasks:read"]})
    assert (allowed.status_code, allowed.json()["max_priority"]) == (201, 60)


@pytest.mark.parametrize(
    ("pointer", "fields"),
    [
        ("/name", {"name": "a/b"}),
        ("/name", {"name": ""}),
        ("/scopes", {"scopes": []}),
        ("/scopes/0", {"scopes": ["tasks:everything"]}),
        ("/max_priority", {"max_priority": 101}),
        ("/expires_in_seconds", {"expires_in_seconds": 0}),
        ("/tenant", {"tenant": "a b"}),
        ("/secret", {"secret": "mine"}),
    ],
)
async def test_an_invalid_token_request_is_refused(api: Client, pointer: str, fields: dict[str, Any]) -> None:
    response = await api.post("/tokens", json={"name": "x", "scopes": ["tasks:read"], **fields})
    fault(response, pointer)


async def test_tokens_created_by_other_processes_are_found_in_time(gateway: Gateway) -> None:
    tokens = Tokens(gateway.store, gateway.clock, refresh_seconds=Seconds(0.001))
    secret, row = new_token("late", tenant="t", scopes=["*"], max_priority=1, now=gateway.clock.now())
    following = asyncio.create_task(tokens.keep_fresh(asyncio.Event()))
    await gateway.store.put_token(row, by="test")
    await until(lambda: tokens.identify(secret) is not None)
    following.cancel()


async def test_health_and_readiness_are_open(gateway: Gateway) -> None:
    anybody = gateway.with_secret(None)
    assert (await anybody.get("/healthz")).json() == {"status": "ok"}
    assert (await anybody.get("/readyz")).json() == {
        "status": "ready",
        "parts": {
            "process": "ok",
            "store": "ok",
            "disk": "ok",
            "world": "ok",
            "executor": "ok",
            "nodes": "ok",
            "clock": "ok",
        },
    }


async def test_a_monitor_may_send_head_requests(gateway: Gateway, api: Client) -> None:
    for client, path in ((gateway.with_secret(None), "/healthz"), (api, "/tasks")):
        head, whole = await client.request("HEAD", path), await client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
    assert (await api.request("HEAD", "/shutdown")).status_code == 405, "it has no GET"


async def test_readiness_names_the_part_that_does_not_work(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> None:
        raise StoreUnavailable("refused")

    anybody = gateway.with_secret(None)
    monkeypatch.setattr(gateway.store, "head", away)
    gateway.executor["state"] = "connecting"
    gateway.age = 99
    response = await anybody.get("/readyz")
    assert response.status_code == 503
    assert response.json()["parts"] == {
        "process": "ok",
        "store": "unavailable",
        "disk": "ok",
        "world": "stale",
        "executor": "connecting",
        "nodes": "ok",
        "clock": "ok",
    }
    assert (await anybody.get("/healthz")).status_code == 200


async def test_a_process_is_ready_while_its_databases_clock_is_contradicted(gateway: Gateway) -> None:
    gateway.is_clock_contradicted = True
    response = await gateway.with_secret(None).get("/readyz")
    assert (response.status_code, response.json()["parts"]["clock"]) == (200, "contradicted")


async def test_the_openapi_document_needs_no_token_and_is_the_published_one(gateway: Gateway) -> None:
    assert (await gateway.with_secret(None).get("/openapi.json")).json() == DOCUMENT
    for path in ("/docs", "/redoc"):
        problem(await gateway.admin.get(path), 404, "not-found")


async def test_a_shutdown_is_passed_on(gateway: Gateway, api: Client) -> None:
    assert (await api.post("/shutdown")).json() == {"stopping": True, "stop_cluster": False}
    assert (await api.post("/shutdown", json={"stop_cluster": True})).status_code == 202
    assert gateway.shutdowns == [False, True]
    fault(await api.post("/shutdown", json={"stop_cluster": "yes"}), "/stop_cluster")
    assert gateway.shutdowns == [False, True]


async def test_of_two_requests_for_one_token_name_one_succeeds(api: Client) -> None:
    body = {"name": "ci", "scopes": ["tasks:read"]}
    answers = await asyncio.gather(*(api.post("/tokens", json=body) for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [201, 409]
    [made] = [answer.json() for answer in answers if answer.status_code == 201]
    listed = await api.get("/tasks", headers={"Authorization": f"Bearer {made['token']}"})
    assert listed.status_code == 200
