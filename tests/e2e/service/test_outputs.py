"""Files that runs leave are collected per attempt, also of failed and killed ones, on real Ray."""

import os
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, NotCollected

from tests.client.command_line import command_line
from tests.e2e.service_process import ServiceProcess, is_running, until
from tests.patience import PATIENCE_SECONDS


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "input.txt").write_text("in")
    return folder


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def test_files_that_match_are_collected_and_downloaded(broker: Broker, project: Path, tmp_path: Path) -> None:
    script = """
        mkdir -p runs/1/deep other; echo a > runs/1/a; echo b > runs/1/deep/b; chmod 700 runs/1/a
        echo no > other/c; echo m > model.pt; ln -s /etc/passwd runs/out
    """
    task = broker.submit(shell(script), upload=project, outputs=["runs/**", "*.pt"])
    assert broker.result(task) == {"exit_code": 0}
    target = tmp_path / "results"
    names = sorted(str(path.relative_to(target)) for path in task.outputs.download(target))
    assert names == ["model.pt", "runs/1/a", "runs/1/deep/b"]
    assert (target / "runs/1/deep/b").read_text() == "b\n"
    assert os.access(target / "runs/1/a", os.X_OK)
    [seen] = task.outputs.list().items
    assert (seen.attempt, seen.rank, seen.state, seen.files) == (1, 0, "collected", 3)
    assert seen.message == "left out: 1 that are links"
    assert list(task.outputs.download(target)), "files that are there are replaced"


def test_failed_attempts_are_collected_each_by_itself(broker: Broker, project: Path, tmp_path: Path) -> None:
    script = 'echo "$GPUBROKER_ATTEMPT" > attempt; exit 3'
    task = broker.submit(shell(script), upload=project, outputs=["attempt"], max_retries=1)
    until(lambda: broker.get(task).is_finished, "both attempts have failed")
    for attempt in (1, 2):
        [path] = broker.download_outputs(task, tmp_path / str(attempt), attempt=attempt)
        assert path.read_text() == f"{attempt}\n"


def test_files_of_a_killed_run_are_collected(broker: Broker, project: Path, tmp_path: Path) -> None:
    script = "trap '' TERM; echo begun > state; while :; do sleep 0.05; done"
    task = broker.submit(shell(script), upload=project, outputs=["state"], gpu_mb=1000)
    until(lambda: is_running(broker, task), "the task runs")
    until(lambda: list_of(broker, task), "it is listed")
    broker.cancel(task, grace_seconds=0.5)
    broker.wait(task, timeout_seconds=PATIENCE_SECONDS)
    [path] = broker.download_outputs(task, tmp_path / "results")
    assert path.read_text() == "begun\n"


def test_preempted_attempt_and_the_next_one_are_collected(
    broker: Broker, project: Path, tmp_path: Path
) -> None:
    go_on = tmp_path / "enough"
    script = f'echo "$GPUBROKER_ATTEMPT" > state; while [ ! -e {go_on} ]; do sleep 0.05; done'
    options: Any = {"gpus": 2, "priority": "background", "grace_seconds": 30}
    task = broker.submit(shell(script), upload=project, outputs=["state"], **options)
    until(lambda: is_running(broker, task), "the task runs")
    urgent = broker.submit("tests.e2e.work:add", 20, 22, gpus=2, priority="critical")
    assert broker.result(urgent, timeout_seconds=PATIENCE_SECONDS) == 42
    until(lambda: broker.get(task).attempt == 2, "the task is back")
    go_on.touch()
    assert broker.result(task, timeout_seconds=PATIENCE_SECONDS) == {"exit_code": 0}
    for attempt in (1, 2):
        [path] = broker.download_outputs(task, tmp_path / str(attempt), attempt=attempt)
        assert path.read_text() == f"{attempt}\n"


def list_of(broker: Broker, task: Any) -> bool:
    return [one.state for one in broker.task_outputs(task).items] == ["pending"]


def test_directory_of_the_nodes_is_collected_and_stays(broker: Broker, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    task = broker.submit(shell("echo x > x"), working_directory=str(work), outputs=["x"])
    broker.result(task)
    [path] = broker.download_outputs(task, tmp_path / "results")
    assert path.read_text() == "x\n"
    assert (work / "x").exists()


def test_reason_is_told_where_there_is_nothing_to_download(broker: Broker, project: Path) -> None:
    without = broker.submit(shell("true"))
    broker.result(without)
    with pytest.raises(NotCollected, match="submit it with outputs"):
        broker.download_outputs(without)
    nothing = broker.submit(shell("true"), upload=project, outputs=["none/**"])
    broker.result(nothing)
    with pytest.raises(NotCollected, match=r"no file matched none/\*\*"):
        broker.download_outputs(nothing)


def test_outputs_on_the_command_line(
    service: ServiceProcess,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))
    gpubroker = command_line(monkeypatch, capsys)
    monkeypatch.chdir(project)
    submitted = gpubroker("submit --wait --upload --outputs runs -- sh -c 'mkdir runs; echo 1 > runs/a'")
    assert submitted.code == 0
    downloaded = gpubroker(f"outputs last -d {tmp_path / 'results'}")
    assert downloaded.out.split() == [str(tmp_path / "results" / "runs" / "a")]
    listed = gpubroker("outputs last")
    assert "collected" not in listed.err
    assert " 1 " in listed.out
