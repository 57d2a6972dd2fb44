"""Several processes on one PostgreSQL: two that speak, one that decides; their engine only waits."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from gpubroker import Broker

from tests.bootstrap.refusals import WAITING, refusal
from tests.chaos.forked import ForkedBroker, ForkedGateway, ForkedService
from tests.e2e.service_process import GIB, ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.postgres import PostgresServer, reset

SETTINGS: dict[str, Any] = {**WAITING, "policy": {"sample_period_seconds": 0.5}}
LONG = {"seconds": 3600.0}
TIME = re.compile("_at$|_seconds$|^as_of$|^utilization$")


class Site:
    """A broker and two gateways with a data directory each, and one directory for large objects."""

    def __init__(self, home: Path, url: str) -> None:
        self.settings = {**SETTINGS, "database_url": url, "blob_dir": str(home / "objects")}
        self.leader = ForkedBroker(home / "broker", **self.settings)
        self.gateways = [ForkedGateway(home / name, **self.settings) for name in ("a", "b")]

    def __enter__(self) -> "Site":
        with ThreadPoolExecutor() as together:
            list(together.map(lambda process: process.start(), self.processes))
        until(lambda: all(g.broker.stats().leader.term for g in self.gateways), "both hear of the leader")
        until(lambda: all(free(g.broker) for g in self.gateways), "both see the devices")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.terminate()

    @property
    def processes(self) -> list[ServiceProcess]:
        return [self.leader, *self.gateways]

    @property
    def brokers(self) -> tuple[Broker, Broker]:
        a, b = self.gateways
        return a.broker, b.broker


def free(broker: Broker) -> bool:
    gpus = broker.gpus()
    return bool(gpus) and all(not gpu.stale and gpu.leased_mb == 0 for gpu in gpus)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer) -> Iterator[Site]:
    url = postgres_server.new_database()
    with Site(tmp_path_factory.mktemp("site"), url) as site:
        yield site
    postgres_server.drop(url)


def ask(gateway: ServiceProcess, path: str, body: Any = None) -> Any:
    known = json.loads((gateway.data_dir / "client.json").read_text(encoding="utf-8"))
    headers = {"Authorization": f"Bearer {known['token']}"}
    method = "GET" if body is None else "POST"
    answer = httpx.request(
        method, f"{known['url']}{path}", json=body, headers=headers, timeout=PATIENCE_SECONDS
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_one_gateway_takes_in_ends_at_the_other(site: Site) -> None:
    a, b = site.brokers
    task = a.submit("tests.e2e.work:add", cpu=0.5)
    assert b.wait(task.id, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
    assert b.result(task.id) is None


def test_an_answer_is_held_back_at_a_gateway_that_does_not_lead(site: Site) -> None:
    known = json.loads((site.gateways[0].data_dir / "client.json").read_text(encoding="utf-8"))
    body = {"run": {"entrypoint": "tests.e2e.work:add", "kwargs": {"seconds": 0.2}}}
    headers = {"Authorization": f"Bearer {known['token']}", "Prefer": "wait=20"}
    answer = httpx.post(f"{known['url']}/tasks", json=body, headers=headers, timeout=PATIENCE_SECONDS)
    assert (answer.status_code, answer.json()["state"]) == (201, "succeeded")


def test_a_task_of_one_gateway_is_cancelled_at_the_other(site: Site) -> None:
    a, b = site.brokers
    task = a.submit("tests.e2e.work:add", kwargs=LONG, gpu_mb=GIB)
    until(lambda: b.get(task.id).state == "running", "it runs")
    assert b.cancel(task.id, grace_seconds=0).state in {"stopping", "cancelled"}
    assert a.wait(task.id, timeout_seconds=PATIENCE_SECONDS).state == "cancelled"


def test_a_token_made_at_one_gateway_is_known_at_the_other(site: Site) -> None:
    a, b = site.gateways
    secret = a.broker.create_token("guest", scopes=["tasks:read"]).token
    until(lambda: knows(b, secret), "the other gateway knows the token", 2.0)
    b.broker.revoke_token("guest")
    until(lambda: not knows(a, secret), "the other gateway has forgotten it", 2.0)


def knows(gateway: ServiceProcess, secret: str) -> bool:
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.get(f"{gateway.url}/tasks", headers=headers).is_success


def test_gateways_show_the_leader(site: Site) -> None:
    stats = ask(site.gateways[0], "/stats")
    assert stats["leader"]["holder"].endswith(f":{site.leader.pid}")
    assert stats["executor"]["address"] == "simulated"


@pytest.mark.provokes("no-leader")
def test_gateway_is_ready_without_a_leader_and_shows_what_one_publishes(
    tmp_path: Path, postgres_url: str
) -> None:
    settings = {**SETTINGS, "database_url": postgres_url, "blob_dir": str(tmp_path / "objects")}
    with ForkedGateway(tmp_path / "gateway", **settings) as gateway:
        ready = ask(gateway, "/readyz")
        assert ready["status"] == "ready"
        assert (ready["parts"]["leader"], ready["parts"]["executor"]) == ("none", "unknown")
        assert [one["kind"] for one in ask(gateway, "/diagnostics")["items"]] == ["no-leader"]
        last = [gateway.broker.submit("tests.e2e.work:add", kwargs=LONG, gpus=1) for _ in range(3)][-1]
        with ForkedService(tmp_path / "leader", **settings) as leader:
            until(lambda: leader.broker.stats().tasks.running == 2, "both devices are taken")
            for path in ("/gpus", "/nodes", "/stats", f"/tasks/{last.id}/explain", f"/tasks/{last.id}"):
                until(partial(tell_the_same, gateway, leader, path), f"both tell the same of {path}")
            wish = {"resources": {"gpu_mb": GIB}, "run": {"command": ["true"]}}
            until(lambda: tell_the_same(gateway, leader, "/tasks/simulate", wish), "both foresee the same")
            until(
                lambda: [gpu["used_mb"] for gpu in ask(gateway, "/gpus")["items"]] == [24 * GIB] * 2,
                "the gateway has the samples of both runs",
            )
    reset(postgres_url)


def tell_the_same(a: ServiceProcess, b: ServiceProcess, path: str, body: Any = None) -> bool:
    return bool(timeless(ask(a, path, body)) == timeless(ask(b, path, body)))


def timeless(view: Any) -> Any:
    """Without what depends on the moment at which it was told, and the history, which each process has for
    itself."""
    match view:
        case dict():
            kept = {
                name: value for name, value in view.items() if not (TIME.search(name) or name == "history")
            }
            return {name: timeless(value) for name, value in kept.items()}
        case list():
            return [timeless(one) for one in view]
    return view


@pytest.mark.parametrize("kind", [ForkedGateway, ForkedBroker])
def test_a_sqlite_file_has_one_process(tmp_path: Path, kind: type[ServiceProcess]) -> None:
    said = refusal(kind(tmp_path / "data", **WAITING))
    assert "gpubroker serve" in said
    assert "--database-url" in said


def test_a_process_with_another_directory_of_objects_is_refused(site: Site, tmp_path: Path) -> None:
    settings = {**site.settings, "blob_dir": str(tmp_path / "elsewhere")}
    said = refusal(ForkedGateway(tmp_path / "data", **settings))
    assert str(tmp_path / "elsewhere") in said
    assert "blob_dir" in said
