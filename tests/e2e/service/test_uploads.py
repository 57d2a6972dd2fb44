"""Directories that travel with tasks, on real Ray: unpacked once, and a copy for each run."""

import json
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, Refused, Submission, TaskFailed, WrongArgument

from tests.client.command_line import command_line
from tests.e2e.service_process import ServiceProcess, until

TRAIN = """
import json, os, sys
from pathlib import Path
from helper import VALUE
Path("data/seen").write_text("by this run")
print(json.dumps([VALUE, os.getcwd(), sorted(os.listdir("data"))]))
"""


HELPER = """
VALUE = 42


def twice(x):
    return 2 * x + VALUE - 42


class Adder:
    def __init__(self, start):
        self.sum = start

    def add(self, number):
        self.sum += number
        return self.sum
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a program, a module of its own, data that are ignored, and an empty directory."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / ".gitignore").write_text("*.log\n")
    (folder / ".gpubrokerignore").write_text("data/large.bin\n")
    (folder / "data" / "large.bin").write_bytes(b"x" * 1000)
    (folder / "data" / "small.txt").write_text("kept")
    (folder / "noise.log").write_text("noise")
    (folder / "helper.py").write_text(HELPER)
    (folder / "train.py").write_text(TRAIN)
    (folder / "run.sh").write_text("#!/bin/sh\nfind . | sort\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("data/small.txt")
    return folder


def printed(broker: Broker, task: Any) -> str:
    until(lambda: broker.get(task).is_finished, "the task ends")
    return "".join(broker.logs(task, stream="stdout"))


def test_command_runs_in_a_copy_of_what_is_sent(broker: Broker, project: Path) -> None:
    task = broker.submit(["./run.sh"], upload=project)
    assert broker.result(task) == {"exit_code": 0}
    assert printed(broker, task).split() == [
        ".", "./.gitignore", "./.gpubrokerignore", "./data", "./data/small.txt", "./empty", "./helper.py",
        "./link", "./run.sh", "./train.py",
    ]  # fmt: skip
    stored = {one.id for one in broker.objects()}
    assert broker.get(task).upload in stored
    assert broker.put_directory(project).id == broker.get(task).upload


def test_runs_of_one_upload_share_no_file_and_leave_none(broker: Broker, project: Path) -> None:
    tasks = broker.submit_many([Submission(["python", "train.py"], upload=project) for _ in range(3)])
    seen = []
    for task in tasks:
        assert isinstance(task, str)
        broker.result(task)
        seen.append(json.loads(printed(broker, task)))
    assert [value for value, _, _ in seen] == [42, 42, 42]
    assert [files for _, _, files in seen] == [["seen", "small.txt"]] * 3, "none sees what another wrote"
    directories = {directory for _, directory, _ in seen}
    assert len(directories) == 3
    until(lambda: not any(map(Path.exists, map(Path, directories))), "the copies are gone with their runs")


def test_function_and_entrypoint_of_the_folder_run(
    broker: Broker, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    helper = __import__("helper")
    assert broker.result(broker.submit(helper.twice, 4, upload=project)) == 8
    assert broker.result(broker.submit("helper:twice", 5, upload=project)) == 10
    assert list(broker.map(helper.twice, [1, 2], upload=project, cpu=0.1)) == [2, 4]
    assert broker.result(broker.submit(helper.twice, 4, modules=["helper"])) == 8
    with pytest.raises(TaskFailed, match="helper") as failed:
        broker.result(broker.submit(helper.twice, 4))
    for part in ('upload="."', 'modules=["helper"]'):
        assert part in str(failed.value)


def test_upload_of_the_command_line(
    service: ServiceProcess,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))
    gpubroker = command_line(monkeypatch, capsys)
    monkeypatch.chdir(project)
    assert gpubroker("submit --wait --upload -- python train.py").code == 0
    assert gpubroker("submit --wait --upload helper:twice --arg 3").out.strip() == "6"
    assert gpubroker("submit --wait --upload data -- test -e small.txt").code == 0
    assert gpubroker("submit --upload nowhere -- true").code == 2


def test_what_cannot_be_sent_is_refused_with_its_name(broker: Broker, project: Path) -> None:
    (project / "out").symlink_to("/etc/passwd")
    with pytest.raises(WrongArgument, match=r"out leads to /etc/passwd.*gpubrokerignore"):
        broker.submit(["true"], upload=project)
    with pytest.raises(Refused, match="give upload or working_directory"):
        broker.submit(["true"], upload=broker.put(b"no archive"), working_directory="/tmp")
    damaged = broker.submit(["true"], upload=broker.put(b"no archive"))
    with pytest.raises(TaskFailed, match="archive cannot be read"):
        broker.result(damaged)


def test_simulated_submit_sends_nothing(broker: Broker, project: Path) -> None:
    (project / "new.txt").write_text("not sent")
    before = {one.id for one in broker.objects()}
    for target in (["true"], "helper:twice"):
        seen = broker.simulate(target, upload=project, outputs=["runs/**"], gpu_mb=1000)
        assert seen.verdict == "starts"
    assert {one.id for one in broker.objects()} == before


def test_workers_make_objects_of_classes_in_the_folder(broker: Broker, project: Path) -> None:
    workers = broker.create_worker_set("helper:Adder", 5, upload=project, cpu=0.1)
    assert broker.call_worker(workers, "add", 2) == 7
    broker.end_worker_set(workers)
    until(lambda: list(broker.worker_sets()) == [], "the set is over")
