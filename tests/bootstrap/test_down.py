"""`gpubroker down`: it stops what is its own, and leaves alone what may still be in use."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpubroker_server.adapters.ray.head.head import HeadState, versions, write_state
from gpubroker_server.adapters.ray.processes import boot_id, process_id
from gpubroker_server.bootstrap.down import StillRunning, stop_everything
from gpubroker_server.bootstrap.start_checks import own_host
from gpubroker_server.settings.loading import load_settings

from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ROOT, ServiceProcess
from tests.patience import PATIENCE_SECONDS

WAITING: dict[str, Any] = {"engine": "simulated"}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir(mode=0o700)
    return tmp_path / "data"


@pytest.fixture
def service(data_dir: Path) -> Iterator[ServiceProcess]:
    with ForkedService(data_dir, **WAITING) as running:
        yield running


@pytest.fixture
def head(data_dir: Path, tmp_path: Path) -> Iterator[psutil.Process]:
    """A process that the data directory knows as its local Ray."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    known = process_id(process.pid)
    temp_dir = tmp_path / "ray"
    temp_dir.mkdir()
    state = HeadState(known.pid, known.start_ticks, boot_id(), "127.0.0.1:1", str(temp_dir), *versions())
    write_state(data_dir, state)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def down(data_dir: Path) -> str:
    """What it did, as the command does it. Raises StillRunning."""
    return "\n".join(stop_everything(load_settings(data_dir=data_dir)))


def test_down_does_not_import_the_service() -> None:
    imported = "import sys, gpubroker_server.__main__, gpubroker_server.bootstrap.down; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", imported], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert {"fastapi", "ray", "sqlalchemy", "uvicorn"}.isdisjoint(ran.stdout.split())


def is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def write_client_file(data_dir: Path, url: str, token: str = "gpb_x") -> None:
    (data_dir / "client.json").write_text(json.dumps({"url": url, "token": token}))


def test_a_service_that_refuses_to_stop_keeps_its_local_ray(
    service: ServiceProcess, head: psutil.Process
) -> None:
    known = json.loads((service.data_dir / "client.json").read_text())
    write_client_file(service.data_dir, known["url"], "gpb_of_another_service")
    words = [sys.executable, "-m", "gpubroker_server", "down", "--data-dir", str(service.data_dir)]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=ROOT)
    assert refused.returncode == 1
    assert "refused to stop: 401" in refused.stderr
    assert is_there(head)
    write_client_file(service.data_dir, known["url"], known["token"])
    assert service.broker.stats().tasks.pending == 0

    serving = psutil.Process(service.pid)
    said = down(service.data_dir)
    assert f"service on {known['url']} stopped" in said
    assert not is_there(serving)
    assert f"local Ray (process {head.pid}) stopped" in said
    assert not is_there(head)


def test_a_service_that_has_closed_its_port_is_waited_for(
    data_dir: Path, head: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker_server.bootstrap.down.CLOSE_SECONDS", -19.5)  # and drain_seconds is 20
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    write_client_file(data_dir, url)
    hold = (
        "import sys; from pathlib import Path; from gpubroker_server.bootstrap.broker_file import *;"
        "hold_service_file(Path(sys.argv[1]), sys.argv[2]); print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", hold, str(data_dir), url]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as ending:
        assert ending.stdin is not None
        assert ending.stdout is not None
        assert ending.stdout.readline() == b"held\n"
        with pytest.raises(StillRunning, match=rf"\(process {ending.pid}\) .* still ending"):
            down(data_dir)
        assert is_there(head)
        ending.stdin.close()
        ending.wait(PATIENCE_SECONDS)
        assert f"no service answers on {url}" in down(data_dir)
    assert not is_there(head)


def test_a_process_that_listens_without_answering_is_not_stopped(
    data_dir: Path, head: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubroker_server.bootstrap.down.ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        write_client_file(data_dir, f"http://127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(StillRunning, match="does not answer"):
            down(data_dir)
    assert is_there(head)


def test_the_local_ray_of_a_service_that_is_gone_is_stopped(data_dir: Path, head: psutil.Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    write_client_file(data_dir, url)
    assert f"no service answers on {url}" in down(data_dir)
    assert not is_there(head)


@pytest.mark.parametrize("damaged", ["{", "[]", "{}"])
def test_a_damaged_client_file_is_named_and_nothing_is_stopped(
    data_dir: Path, head: psutil.Process, damaged: str
) -> None:
    (data_dir / "client.json").write_text(damaged)
    with pytest.raises(StillRunning, match=r"client\.json does not say where the service is"):
        down(data_dir)
    assert is_there(head)


def test_a_service_on_another_address_is_found_by_its_own_machine(tmp_path: Path) -> None:
    elsewhere: dict[str, Any] = {"host": "127.0.0.2", "allowed_hosts": ["gpus.example"], **WAITING}
    with ForkedService(tmp_path / "data", **elsewhere) as service:
        assert service.broker.connection.url.startswith("http://127.0.0.2:")
        assert service.broker.stats().tasks.pending == 0


@pytest.mark.parametrize(
    ("bound", "called"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("127.0.0.1", "127.0.0.1"), ("10.0.0.5", "10.0.0.5")],
)
def test_an_address_that_stands_for_all_is_called_by_loopback(bound: str, called: str) -> None:
    assert own_host(bound) == called
