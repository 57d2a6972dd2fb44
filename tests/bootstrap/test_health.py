"""`gpubroker health`: each kind of process is asked by what it has; one that hangs or is gone is noticed."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from gpubroker_server.bootstrap.broker_file import ages_of_brokers
from gpubroker_server.bootstrap.diagnosis.health import health_of

from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedBroker, ForkedGateway, ForkedService
from tests.e2e.service_process import ROOT, ServiceProcess, environment, until
from tests.patience import PATIENCE_SECONDS
from tests.postgres import PostgresServer


def health(*words: str, **variables: str) -> tuple[int, str]:
    """The exit code, and the one line that it prints."""
    told = subprocess.run(
        [sys.executable, "-m", "gpubroker_server", "health", *words],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=ROOT, env=environment(**variables),
    )  # fmt: skip
    [line] = (told.stdout + told.stderr).splitlines()
    assert line.startswith("gpubroker: ")
    assert bool(told.stdout) is (told.returncode == 0)
    return told.returncode, line


def write_client_file(data_dir: Path, text: str) -> None:
    data_dir.mkdir(exist_ok=True)
    (data_dir / "client.json").write_text(text)


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """Another program at an address of this machine."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_service_is_asked_on_the_port_it_took_and_found_by_its_settings(tmp_path: Path) -> None:
    config = tmp_path / "data.yaml"
    with ForkedService(tmp_path / "data", **WAITING) as service:
        found = health("--config", str(config), http_proxy="http://127.0.0.1:9")
        assert found == (0, f"gpubroker: {service.url} answers")
        assert health("serve", GPUBROKER_DATA_DIR=str(service.data_dir)) == found
        os.kill(service.pid, signal.SIGKILL)
        service.ended()
        code, line = health("--config", str(config))
        assert code == 1
        assert f"no healthy answer from {service.url}: " in line


def test_gateway_and_broker_are_told_apart_by_their_data_directories(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    url = postgres_server.new_database()
    settings: dict[str, Any] = {**WAITING, "database_url": url, "blob_dir": str(tmp_path / "objects")}
    with (
        ForkedBroker(tmp_path / "b", **settings) as broker,
        ForkedGateway(tmp_path / "a", **settings) as gateway,
    ):
        assert health("--data-dir", str(gateway.data_dir)) == (0, f"gpubroker: {gateway.url} answers")
        alive = (0, f"gpubroker: broker (process {broker.pid}) runs")
        assert health("--data-dir", str(broker.data_dir)) == alive
        assert health("broker", "--data-dir", str(broker.data_dir)) == alive
        assert not health_of(gateway.data_dir, "broker").is_alive
        assert not health_of(broker.data_dir, "gateway").is_alive
        hangs_and_goes_on(broker)
        broker.terminate()
        gone = health_of(broker.data_dir, "broker")
        assert gone.sentence == f"no process of gpubroker runs with the data directory {broker.data_dir}"
    postgres_server.drop(url)


def hangs_and_goes_on(broker: ServiceProcess) -> None:
    file = broker.data_dir / f"broker-{broker.pid}.lock"
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 60))  # as if it had stood for a minute
        hung = health_of(broker.data_dir, None)
        assert not hung.is_alive
        assert hung.sentence.startswith(f"broker (process {broker.pid}) hangs: its last sign is 6")
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    until(lambda: health_of(broker.data_dir, None).is_alive, "it has renewed its file")


def test_the_file_of_a_broker_that_was_killed_counts_for_nothing_and_stays(tmp_path: Path) -> None:
    """To remove it could remove that of a broker that is just starting under the same number."""
    left = tmp_path / "broker-1.lock"
    left.touch()
    assert list(ages_of_brokers(tmp_path)) == []
    assert not health_of(tmp_path, None).is_alive
    assert left.exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"token": "gpb_x"}'])
def test_a_damaged_client_file_is_named(tmp_path: Path, text: str) -> None:
    write_client_file(tmp_path, text)
    found = health_of(tmp_path, None)
    assert not found.is_alive
    assert f"{tmp_path / 'client.json'} does not say where the service is" in found.sentence


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, "", "answers 404; is gpubroker there?"),
        (200, "hello", "no healthy answer from"),
        (200, '["ok"]', "not as gpubroker does"),
        (200, '{"status": "up"}', "not as gpubroker does"),
    ],
)
def test_another_program_on_the_port_is_not_taken_for_gpubroker(
    tmp_path: Path, status: int, body: str, said: str
) -> None:
    with answering(status, body) as url:
        write_client_file(tmp_path, json.dumps({"url": url, "token": "gpb_x"}))
        found = health_of(tmp_path, "gateway")
    assert not found.is_alive
    assert said in found.sentence


def test_a_process_that_listens_without_answering_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker_server.bootstrap.diagnosis.health.ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        write_client_file(tmp_path, json.dumps({"url": f"http://127.0.0.1:{mute.getsockname()[1]}"}))
        found = health_of(tmp_path, None)
    assert not found.is_alive
    assert "timed out" in found.sentence


def test_a_node_is_its_raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/e2e/lab asks a real one."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert health_of(tmp_path, "node").sentence.endswith("raylet: No such file or directory")


@pytest.mark.parametrize("variables", [{"GPUBROKER_PORT": "many"}, {"GPUBROKER_CONFIG": "/nowhere.yaml"}])
def test_wrong_settings_are_told_and_are_no_health(variables: Mapping[str, str]) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "gpubroker_server", "health"],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=ROOT, env=environment(**variables),
    )  # fmt: skip
    assert told.returncode == 1
    assert "nowhere" in told.stderr or "many" in told.stderr


def test_it_is_light() -> None:
    """It runs every few seconds in every container."""
    health = "gpubroker_server.bootstrap.diagnosis.health"
    imported = f"import sys, gpubroker_server.__main__, {health}; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", imported], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert {"fastapi", "httpx", "psutil", "ray", "sqlalchemy", "structlog"}.isdisjoint(ran.stdout.split())
