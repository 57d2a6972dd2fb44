"""Commands run where the user stands, on real Ray."""

from pathlib import Path

import pytest
from gpubroker import Broker, TaskFailed

from tests.client.command_line import command_line
from tests.e2e.service_process import ServiceProcess


def test_command_runs_where_the_user_stands(
    service: ServiceProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))
    gpubroker = command_line(monkeypatch, capsys)
    (tmp_path / "script.sh").write_text("pwd > witness")
    monkeypatch.chdir(tmp_path)
    assert gpubroker("submit --wait -- sh script.sh").code == 0
    assert (tmp_path / "witness").read_text().strip() == str(tmp_path.resolve())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert gpubroker("submit --wait --dir elsewhere -- sh ../script.sh").code == 0
    assert (elsewhere / "witness").read_text().strip() == str(elsewhere.resolve())


def test_directory_that_the_node_lacks_ends_the_run_with_what_to_do(broker: Broker) -> None:
    task = broker.submit(["true"], working_directory="/no/such/directory", max_retries=3)
    with pytest.raises(TaskFailed, match="does not exist there") as failed:
        broker.result(task)
    assert failed.value.kind == "no_directory"
    for part in ("node local", "/no/such/directory", "--dir DIR", "--upload DIR"):
        assert part in str(failed.value)
    assert broker.get(task).attempt == 1
