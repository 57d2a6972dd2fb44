"""SIGTERM at any instant: what was acknowledged is stored once, what was refused is not, and in time."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ROOT, ServiceProcess, until
from tests.patience import PATIENCE_SECONDS

SUBMITS = 500
CLIENTS = 20
DRAIN_SECONDS = 5.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    home = tmp_path_factory.mktemp("drain") / "data"
    with ForkedService(home, drain_seconds=DRAIN_SECONDS, **WAITING) as running:
        yield running


def a_body(name: str, seconds: float = 0.0) -> dict[str, Any]:
    run = {"entrypoint": "tests.e2e.work:add", "kwargs": {"seconds": seconds}}
    return {"run": run, "name": name, "resources": {"cpu": 0.01}}


def headers_of(service: ServiceProcess) -> dict[str, str]:
    known = json.loads((service.data_dir / "client.json").read_text(encoding="utf-8"))
    return {"Authorization": f"Bearer {known['token']}"}


class Submits:
    """Five hundred, each asked for once, whatever comes of it."""

    def __init__(self, service: ServiceProcess, name: str) -> None:
        self.accepted: dict[str, str] = {}
        """Name -> the id that was answered."""
        self.refused: set[str] = set()
        """An answer that is no acceptance."""
        self._service = service
        self._names = [f"{name}-{number}" for number in range(SUBMITS)]

    async def send(self, stop_after: int) -> None:
        """Ask the service to end once so many are accepted."""
        process = psutil.Process(self._service.pid)
        gate = asyncio.Semaphore(CLIENTS)

        async def submit(client: httpx.AsyncClient, name: str) -> None:
            async with gate:
                try:
                    answer = await client.post("/tasks", json=a_body(name))
                except httpx.TransportError:
                    return  # nobody was told anything
            if answer.status_code == 202:
                self.accepted[name] = answer.json()["id"]
                if len(self.accepted) == stop_after:
                    process.terminate()
            else:
                self.refused.add(name)

        url, headers = self._service.url, headers_of(self._service)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_SECONDS) as client:
            await asyncio.gather(*(submit(client, name) for name in self._names))

    def check(self) -> None:
        stored: dict[str, list[str]] = {}
        for task in self._service.broker.list(limit=100_000):
            stored.setdefault(task.name, []).append(task.id)
        for name in self._names:
            assert len(stored.get(name, [])) <= 1
            if name in self.accepted:
                assert stored[name] == [self.accepted[name]]
        assert not self.refused & stored.keys()


@pytest.mark.parametrize("stop_after", [1, 100, 400])
def test_service_stopped_amid_submits_has_accepted_ones_once_and_no_other(
    service: ServiceProcess, stop_after: int
) -> None:
    submits = Submits(service, f"stopped-after-{stop_after}")
    asyncio.run(submits.send(stop_after))
    asked_to_end_at = time.monotonic()
    assert len(submits.accepted) >= stop_after
    assert service.ended() == 0
    assert time.monotonic() - asked_to_end_at < DRAIN_SECONDS
    service.start()
    submits.check()


def test_waiting_requests_are_answered_and_readiness_fails_before_closing(
    tmp_path: Path,
) -> None:
    """The listener closes after the readiness probe has failed."""
    settings: dict[str, Any] = {"drain_seconds": DRAIN_SECONDS, "drain_notice_seconds": 3.0}
    with ForkedService(tmp_path / "data", **WAITING, **settings) as service:
        drain_with_notice(service)


def drain_with_notice(service: ServiceProcess) -> None:
    url, headers = service.url, headers_of(service)
    task = httpx.post(f"{url}/tasks", json=a_body("waits", seconds=3600.0), headers=headers).json()["id"]
    with ThreadPoolExecutor(1) as hands:
        ask = {"params": {"timeout_seconds": 50}, "headers": headers, "timeout": 60.0}
        waiting = hands.submit(httpx.get, f"{url}/tasks/{task}/wait", **ask)  # type: ignore[arg-type]
        until(lambda: service.broker.get(task).state == "running", "it runs")
        began = time.monotonic()
        psutil.Process(service.pid).terminate()
        until(lambda: httpx.get(f"{url}/readyz").json()["parts"]["process"] == "draining", "it says so")
        meanwhile = httpx.post(f"{url}/tasks", json=a_body("meanwhile"), headers=headers)
        assert meanwhile.status_code == 202
        answer = waiting.result(DRAIN_SECONDS)
    assert (answer.status_code, answer.json()["state"]) == (202, "running")
    assert service.ended() == 0
    assert time.monotonic() - began < DRAIN_SECONDS
    service.start()
    assert service.broker.wait(meanwhile.json()["id"], timeout_seconds=PATIENCE_SECONDS).state == "succeeded"


def test_what_does_not_come_to_its_end_is_ended_in_time() -> None:
    code = (
        "import time; from gpubroker_server.bootstrap.commands import ExitDeadline, configure_logs; "
        "configure_logs('INFO', 'console'); ExitDeadline(0.2).begin(); time.sleep(60)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert ran.returncode == 1
    assert "stopping took longer than 0.2 s" in ran.stderr
