"""What a command says while the service of its data directory starts."""

import os
import signal
from pathlib import Path

import pytest
from gpubroker import Broker, Unreachable
from gpubroker.transport.starting import starting_for_seconds
from gpubroker_server.bootstrap.starting import StartingFile

from tests.chaos.forked import ForkedService
from tests.client.command_line import Run
from tests.client.recorded_service import RecordedService, page
from tests.e2e.service_process import until


@pytest.fixture
def data_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(tmp_path))
    return tmp_path


def test_a_first_start_is_named_instead_of_no_service(data_dir: Path) -> None:
    with StartingFile(data_dir), pytest.raises(Unreachable, match=f"is starting in {data_dir}") as said:
        Broker()
    assert said.value.code == "starting"
    with pytest.raises(Unreachable, match="no gpubroker service is known"):
        Broker()


def test_a_command_says_that_it_waits_for_a_start(
    service: RecordedService, run: Run, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUBROKER_URL")
    (data_dir / "client.json").write_text(f'{{"url": "{service.url}", "token": "t"}}')
    service.reply_with(page(), page())
    with StartingFile(data_dir) as starting:
        assert "is starting, for 0 s now; waiting for it" in run("ps").err
        starting.started()
        assert "starting" not in run("ps").err
    assert list(data_dir.glob("starting-*")) == []


def test_the_file_of_a_killed_start_says_nothing(data_dir: Path) -> None:
    child = os.fork()
    if child == 0:
        with StartingFile(data_dir):
            signal.pause()
    until(lambda: starting_for_seconds(data_dir) is not None, "the start is known")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(data_dir.glob("starting-*.lock"))) == 1
    assert starting_for_seconds(data_dir) is None
    with StartingFile(data_dir):
        assert len(list(data_dir.glob("starting-*.lock"))) == 1, "the next start has removed it"


def test_a_service_that_serves_is_no_longer_starting(tmp_path: Path) -> None:
    with ForkedService(tmp_path / "data", engine="simulated") as running:
        assert starting_for_seconds(running.data_dir) is None
        assert list(running.data_dir.glob("starting-*")) == []
