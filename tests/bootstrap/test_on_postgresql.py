"""The real service on a real PostgreSQL that is taken away from it, and one that is taken already."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bootstrap.pressed import FULL_AT_THREE, pressures, refusal, wait_in
from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.postgres import OwnServer, a_server_of_its_own

STALE_SECONDS = 1.5


@pytest.fixture
def server() -> Iterator[OwnServer]:
    with a_server_of_its_own() as server:
        yield server


@pytest.fixture
def service(tmp_path: Path, server: OwnServer) -> Iterator[ServiceProcess]:
    limits = {"stale_seconds": STALE_SECONDS}
    with ForkedService(tmp_path / "data", database_url=server.url, limits=limits, **WAITING) as running:
        yield running


def ask(service: ServiceProcess, method: str, path: str, body: Any = None) -> httpx.Response:
    """Once, where the SDK would ask again."""
    known = json.loads((service.data_dir / "client.json").read_text(encoding="utf-8"))
    headers = {"Authorization": f"Bearer {known['token']}"}
    return httpx.request(
        method, f"{known['url']}{path}", json=body, headers=headers, timeout=PATIENCE_SECONDS
    )


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("code", "")


def a_task(seconds: float = 0.0) -> dict[str, Any]:
    return {"run": {"entrypoint": "tests.e2e.work:add", "kwargs": {"seconds": seconds}}}


@pytest.mark.provokes("database-unreachable")
@pytest.mark.parametrize("how", ["fast", "immediate"], ids=["it says goodbye", "it crashes"])
def test_the_service_outlives_its_database_server_and_loses_nothing(
    service: ServiceProcess, server: OwnServer, how: str
) -> None:
    before = service.broker.submit("tests.e2e.work:add", cpu=0.5)
    service.broker.wait(before.id)
    ends_meanwhile = ask(service, "POST", "/tasks", a_task(seconds=1.0)).json()["id"]
    goes_on = ask(service, "POST", "/tasks", a_task(seconds=3600.0)).json()["id"]
    until(lambda: service.broker.get(goes_on).state == "running", "the long one runs")
    term = service.broker.stats().leader.term

    server.stop(how)
    assert code_of(ask(service, "POST", "/tasks", a_task())) == (503, "store-unavailable")
    assert code_of(ask(service, "GET", f"/tasks/{goes_on}")) == (503, "store-unavailable")
    until(lambda: code_of(ask(service, "GET", "/stats")) == (503, "follower-stale"), "the picture is too old")
    assert ask(service, "GET", "/healthz").status_code == 200
    assert ask(service, "GET", "/readyz").status_code == 503
    found = ask(service, "GET", "/diagnostics").json()["items"]
    assert "database-unreachable" in {one["kind"] for one in found}
    server.start()

    until(lambda: ask(service, "GET", "/readyz").status_code == 200, "the service is ready again")
    broker = service.broker
    assert broker.wait(ends_meanwhile, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
    assert broker.get(before.id).state == "succeeded"
    assert broker.get(goes_on).state == "running"
    after = broker.submit("tests.e2e.work:add", cpu=0.5)
    assert broker.wait(after.id, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
    # A server that is back within the lease finds the same leader.
    assert term is not None
    assert (broker.stats().leader.term or 0) >= term
    assert "Traceback" not in service.log()


def test_a_second_serve_on_one_database_stands_by_and_takes_over(
    tmp_path: Path, service: ServiceProcess, server: OwnServer
) -> None:
    objects = str(service.data_dir / "blobs")
    with ForkedService(tmp_path / "other", database_url=server.url, blob_dir=objects, **WAITING) as other:
        until(lambda: str(other.broker.stats().leader.holder).endswith(f":{service.pid}"), "one leads")
        task = other.broker.submit("tests.e2e.work:add", cpu=0.5)
        assert service.broker.wait(task.id, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
        assert service.terminate() == 0
        until(lambda: str(other.broker.stats().leader.holder).endswith(f":{other.pid}"), "the other leads")
        task = other.broker.submit("tests.e2e.work:add", cpu=0.5)
        assert other.broker.wait(task.id, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"


def test_standby_goes_on_with_the_backpressure_of_a_killed_leader(tmp_path: Path, server: OwnServer) -> None:
    settings = {"database_url": server.url, "blob_dir": str(tmp_path / "blobs"), **WAITING, **FULL_AT_THREE}
    with (
        ForkedService(tmp_path / "data", **settings) as service,
        ForkedService(tmp_path / "other", **settings) as other,
    ):
        waiting = [wait_in(other) for _ in range(3)]
        until(lambda: refusal(other, 5) is not None, "the gateway of the standby refuses background work")
        other.broker.cancel(waiting.pop())
        assert str(other.broker.stats().leader.holder).endswith(f":{service.pid}")
        service.kill_9()
        refused = []

        def is_led() -> bool:
            refused.append(refusal(other, 5))
            return str(other.broker.stats().leader.holder).endswith(f":{other.pid}")

        until(is_led, "the standby leads")
        assert all(one is not None and one.code == "backpressure" for one in refused)
        for task in waiting:
            other.broker.cancel(task)
        until(lambda: refusal(other, 5) is None, "no task waits any more")
        until(lambda: pressures(other)[-1] == "RELEASED", "the log says so")
        assert pressures(other) == ["ACTIVATED", "RELEASED"]


def test_a_killed_service_does_not_keep_its_database_from_the_next_one(service: ServiceProcess) -> None:
    task = service.broker.submit("tests.e2e.work:add", cpu=0.5)
    service.kill_9()
    service.start()
    assert service.broker.wait(task.id, timeout_seconds=PATIENCE_SECONDS).state == "succeeded"
