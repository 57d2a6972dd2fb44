"""Tasks with an environment of their own, on real Ray and with real uv: every kind of run, built once."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uv
from gpubroker import Broker, Refused, TaskFailed

from tests.client.command_line import command_line
from tests.e2e.environment_work import add, count, die, leave, python, rank, stay, where
from tests.e2e.service_process import PATIENCE_SECONDS, ServiceProcess, until
from tests.e2e.wheels import PACKAGE

PACKAGES = {"requirements": [f"{PACKAGE}==1.0"]}
PYTHON = [sys.version_info.major, sys.version_info.minor]
LOCKED = f"""[project]
name = "trial"
version = "0"
requires-python = ">=3.11"
dependencies = ["{PACKAGE}"]
"""


def built_in(prefix: str) -> bool:
    return "/environments/built/" in prefix


def result(broker: Broker, *target: Any, **options: Any) -> Any:
    return broker.result(broker.submit(*target, **options), timeout_seconds=PATIENCE_SECONDS)


def test_functions_and_commands_run_in_packages_that_are_built_once(broker: Broker) -> None:
    answer, prefix, version = result(broker, where, environment=PACKAGES)
    assert (answer, version) == (42, PYTHON)
    assert built_in(prefix)
    task = broker.submit(
        ["python", "-c", "import answerlib; print(answerlib.where()[1])"], environment=PACKAGES
    )
    broker.result(task, timeout_seconds=PATIENCE_SECONDS)
    assert "".join(broker.logs(task)).strip() == prefix
    shown = broker.get(task).environment
    assert shown is not None
    assert shown.requirements == (f"{PACKAGE}==1.0",)
    setup = "".join(broker.logs(task, stream="setup"))
    assert setup.count("$ uv venv") == 1
    assert f"+ {PACKAGE}==1.0" in setup


def test_entrypoints_find_modules_of_the_operator_and_of_the_environment(broker: Broker) -> None:
    assert result(broker, f"{PACKAGE}:twice", 2, environment=PACKAGES) == 84
    assert result(broker, "tests.e2e.environment_work:add", 1, environment="answers") == 43


def test_arrays_and_worker_sets_run_in_the_environment(broker: Broker) -> None:
    found = broker.map(add, range(4), environment=PACKAGES, max_parallel=2, cpu=0.1)
    assert list(found) == [42, 43, 44, 45]
    made = broker.create_worker_set(f"{PACKAGE}:Adder", 40, environment=PACKAGES, cpu=0.1)
    value, prefix = broker.workers(made, timeout_seconds=PATIENCE_SECONDS, pickled=False).add(2)
    assert value == 42
    assert built_in(prefix)


def test_a_gang_meets_in_the_environment(broker: Broker) -> None:
    task = broker.submit(rank, bundles=[{"cpu": 0.1, "count": 2}], environment=PACKAGES)
    assert broker.result(task, timeout_seconds=PATIENCE_SECONDS) == [0, "2", 42]


def test_a_project_runs_by_its_lock_file(
    broker: Broker,
    service: ServiceProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))
    (tmp_path / "pyproject.toml").write_text(LOCKED)
    (tmp_path / "train.py").write_text("import answerlib\nprint(answerlib.ANSWER)\n")
    wheels = service.data_dir.with_name("wheels")
    lock = (uv.find_uv_bin(), "lock", "--offline", "--find-links", str(wheels), "--project", str(tmp_path))
    subprocess.run(lock, check=True, capture_output=True)  # our own
    task = broker.submit(["python", "train.py"], upload=tmp_path, environment=tmp_path)
    broker.result(task, timeout_seconds=PATIENCE_SECONDS)
    assert "".join(broker.logs(task)) == "42\n"
    gpubroker = command_line(monkeypatch, capsys)
    place = f"--upload {tmp_path} --environment {tmp_path}/uv.lock"
    ended = gpubroker(f"submit {place} --wait -- python train.py")
    assert ended.code == 0, ended


def test_a_profile_brings_its_environment(broker: Broker) -> None:
    task = broker.submit(["python", "-c", "import answerlib"], profile="science")
    broker.result(task, timeout_seconds=PATIENCE_SECONDS)
    shown = broker.get(task).environment
    assert shown is not None
    assert shown.name == "answers"


def test_packages_that_cannot_be_had_fail_every_waiting_task_once(broker: Broker) -> None:
    environment = {"requirements": [f"{PACKAGE}==7"]}
    tasks = [broker.submit(["true"], environment=environment) for _ in range(3)]
    for task in tasks:
        with pytest.raises(TaskFailed, match=f"no version of {PACKAGE}==7") as failure:
            broker.result(task, timeout_seconds=PATIENCE_SECONDS)
        assert failure.value.kind == "environment"


def test_an_interpreter_that_no_node_has_fails_the_task_with_a_remedy(broker: Broker) -> None:
    task = broker.submit(["true"], environment={"python": "/nowhere/bin/python"})
    with pytest.raises(
        TaskFailed, match="there is no /nowhere/bin/python on node local; name an interpreter"
    ):
        broker.result(task, timeout_seconds=PATIENCE_SECONDS)


def test_an_interpreter_of_the_node_runs_the_task(broker: Broker) -> None:
    program = os.path.realpath(sys.executable)
    found = result(broker, python, environment={"python": program})
    assert os.path.realpath(found) == program


def test_a_function_of_another_python_is_refused_at_submit(broker: Broker) -> None:
    other = f"3.{sys.version_info.minor + 1}"
    with pytest.raises(Refused, match=f"has Python {other}"):
        broker.submit(where, environment={"python": other, **PACKAGES})


def test_a_process_that_dies_in_the_environment_ends_the_run_as_any_other(broker: Broker) -> None:
    for call, args, said in ((die, (signal.SIGKILL,), "signal SIGKILL"), (leave, (), "exit code 3")):
        with pytest.raises(TaskFailed, match=said):
            result(broker, call, *args, environment=PACKAGES)


def test_a_run_in_an_environment_saves_its_state_and_resumes(broker: Broker, tmp_path: Path) -> None:
    started = tmp_path / "started"

    task = broker.submit(count, str(started), environment=PACKAGES, grace_seconds=20, max_retries=1)
    until(started.exists, "it runs")
    broker.drain("local")
    until(lambda: broker.get(task).state == "pending", "it has left")
    broker.uncordon("local")
    assert broker.result(task, timeout_seconds=PATIENCE_SECONDS) == 2


def test_a_stop_kills_the_environments_process_after_the_grace_period(broker: Broker, tmp_path: Path) -> None:
    started = tmp_path / "pid"

    task = broker.submit(stay, str(started), environment=PACKAGES)
    until(lambda: started.exists() and started.read_text(), "it runs")
    broker.cancel(task, grace_seconds=0.1)
    until(lambda: not Path(f"/proc/{started.read_text()}").exists(), "it is killed")
    until(lambda: broker.get(task).state == "cancelled", "it is cancelled")
