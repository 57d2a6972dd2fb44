"""Where a request comes from: what proxies say of it is believed of those that the operator trusts."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from gpubroker_server.gateway.app import create_app
from gpubroker_server.http.proxies import TrustedProxies
from gpubroker_server.settings.loading import SettingsRefused, load_settings
from structlog.testing import capture_logs

from tests.gateway import call_stage, inference_stage
from tests.gateway.harness import Gateway, a_body

LAB = TrustedProxies(["127.0.0.1", "10.0.0.0/8", "fd00::/8"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.7", [b"203.0.113.9"], "192.0.2.7"),  # anyone may write the header
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", [b"203.0.113.9"], "203.0.113.9"),
        ("::ffff:127.0.0.1", [b"203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", [b"198.51.100.1, 203.0.113.9"], "203.0.113.9"),  # the first is the client's own word
        ("127.0.0.1", [b"203.0.113.9, 10.1.2.3"], "203.0.113.9"),
        ("127.0.0.1", [b"203.0.113.9", b"10.1.2.3"], "203.0.113.9"),
        ("127.0.0.1", [b"10.9.9.9, 10.1.2.3"], "10.9.9.9"),
        ("fd00::1", [b"[2001:db8::7]:4711"], "2001:db8::7"),
        ("127.0.0.1", [b"203.0.113.9:51000"], "203.0.113.9"),
        ("127.0.0.1", [b"203.0.113.9, unknown, 10.1.2.3"], "10.1.2.3"),
        ("127.0.0.1", [b"<script>"], "127.0.0.1"),
        ("", [b"203.0.113.9"], ""),
    ],
)
def test_the_client_is_the_last_address_that_no_trusted_proxy_has(
    peer: str, forwarded: list[bytes], client: str
) -> None:
    assert LAB.client_of(peer, forwarded) == client


def test_a_proxy_that_is_no_address_is_refused_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(SettingsRefused, match="neither an address nor a network; write such as 127"):
        load_settings(data_dir=tmp_path, trusted_proxies=["proxy.lab"])
    assert load_settings(data_dir=tmp_path, trusted_proxies="127.0.0.1,10.0.0.0/8").trusted_proxies == (
        "127.0.0.1",
        "10.0.0.0/8",
    )


@pytest.mark.parametrize(("trusted", "client"), [((), "127.0.0.1"), (("127.0.0.1",), "203.0.113.9")])
async def test_the_access_log_has_the_address_of_the_client(
    gateway: Gateway, trusted: tuple[str, ...], client: str
) -> None:
    gateway.change(access_log=True, trusted_proxies=trusted)
    transport = httpx.ASGITransport(create_app(gateway.parts), client=("127.0.0.1", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as asks:
        with capture_logs() as lines:
            await asks.get("/healthz", headers={"X-Forwarded-For": "203.0.113.9"})
    assert [line["client"] for line in lines] == [client]


async def test_requests_to_models_are_logged_with_the_address_of_the_client() -> None:
    trusted = {"access_log": True, "proxies": TrustedProxies(["127.0.0.1"])}
    async with inference_stage.a_stage(inference_stage.Heard(), of_plane=trusted) as stage:
        with capture_logs() as lines:
            await stage.ask("POST", inference_stage.INFER, b"{}", X_Forwarded_For="203.0.113.9")
            await stage.ask("POST", inference_stage.INFER, b"{}")
    over_http = [line["client"] for line in lines if line["event"] == "answered"]
    assert over_http == ["203.0.113.9", "127.0.0.1"]
    async with call_stage.a_stage(call_stage.Heard(), of_plane=trusted) as calls:
        with capture_logs() as lines:
            await calls.ask(call_stage.INFER, b"", (*calls.own, ("x-forwarded-for", "2001:db8::7")))
            await calls.ask(call_stage.INFER, b"")
            await calls.refusal(call_stage.INFER, b"", metadata=())
    assert [line["client"] for line in lines if line["event"] == "answered"] == [
        "2001:db8::7",
        "127.0.0.1",
        "127.0.0.1",
    ]


FRONT = ("127.0.0.1",)
PLACED = {"X-Forwarded-Prefix": "/lab/gpus/"}


@pytest.mark.parametrize(
    ("rules", "sent", "prefix"),
    [
        ({"root_path": "/gpubroker"}, {}, "/gpubroker"),
        ({"trusted_proxies": FRONT}, PLACED, "/lab/gpus"),
        ({"trusted_proxies": FRONT, "root_path": "/gpubroker"}, PLACED, "/lab/gpus"),
        ({}, PLACED, ""),  # nobody is trusted
        ({"trusted_proxies": FRONT}, {"X-Forwarded-Prefix": "//evil.example"}, ""),
        ({"trusted_proxies": FRONT}, {"X-Forwarded-Prefix": "https://evil.example"}, ""),
    ],
)
async def test_addresses_in_answers_begin_with_the_prefix_the_proxy_takes_off(
    gateway: Gateway, rules: dict[str, Any], sent: dict[str, str], prefix: str
) -> None:
    gateway.change(**rules)
    client = await gateway.client("a")
    client.headers.update(sent)
    task = await client.post("/tasks", json=a_body())
    place = f"{prefix}/tasks/{task.json()['id']}"
    assert (task.headers["location"], task.json()["urls"]["result"]) == (place, f"{place}/result")
    batch = (await client.post("/tasks/batch", json={"tasks": [a_body()]})).json()["items"][0]
    assert batch["url"] == f"{prefix}/tasks/{batch['id']}"
    lease = await client.post("/leases", json={"holder": "me", "gpu_mb": 1024})
    place = f"{prefix}/leases/{lease.json()['id']}"
    assert (lease.headers["location"], lease.json()["urls"]["self"]) == (place, place)
    token = await client.post("/tokens", json={"name": "b", "scopes": ["tasks:read"]})
    assert token.headers["location"] == f"{prefix}/tokens/b"
    assert (await client.get("/tasks/task_x")).json()["instance"] == f"{prefix}/tasks/task_x"
    servers = (await client.get("/openapi.json")).json()["servers"]
    assert [server["url"] for server in servers] == [prefix or "http://127.0.0.1:8470"]


async def test_a_prefix_that_the_proxy_does_not_take_off_is_named(gateway: Gateway) -> None:
    gateway.change(root_path="/gpubroker")
    client = await gateway.client("a")
    refused = await client.get("/gpubroker/tasks")
    assert (refused.status_code, refused.json()["detail"]) == (
        404,
        "there is nothing at /gpubroker/tasks: have the proxy take /gpubroker off the path",
    )


@pytest.mark.parametrize("wrong", ["gpubroker", "/gpubroker/", "/", "https://gpus.lab/x", "/a b"])
def test_a_root_path_that_is_none_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SettingsRefused, match="is not a path; write such as /gpubroker"):
        load_settings(data_dir=tmp_path, root_path=wrong)
