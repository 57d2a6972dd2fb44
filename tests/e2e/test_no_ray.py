"""Where Ray cannot be had, people are told why and what to do, and everything else goes on."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from gpubroker_server.adapters.ray.head import head
from gpubroker_server.adapters.ray.head.head import (
    HeadNotStarted,
    HeadRefused,
    HeadState,
    read_state,
    running_head,
    stop_head,
    versions,
    write_state,
)
from gpubroker_server.adapters.ray.processes import boot_id, process_id

from tests.bound_by_modes import bound_by_modes
from tests.chaos.forked import ForkedServiceOnRay
from tests.e2e.ray_lab import command_lines, eventually, is_there, lab_options, slow_agents
from tests.e2e.service_process import ServiceProcess, until
from tests.patience import PATIENCE_SECONDS


@contextmanager
def running(service: ServiceProcess, begin: Callable[[], None] | None = None) -> Iterator[ServiceProcess]:
    """Serves, and is not ready, for want of Ray."""
    process = service.spawn(begin)
    try:
        listens = service.data_dir / "client.json"
        until(lambda: listens.exists() or process.poll() is not None, "the service listens")
        yield service
    finally:
        service.stop()
        assert process.wait(PATIENCE_SECONDS) == 0, service.log()


def what_is_said(service: ServiceProcess, part: str) -> str:
    """The message about the executor, which must come to hold this part. Everything else must work."""
    said = ""

    def comes() -> bool:
        nonlocal said
        executor = service.broker.stats().executor
        said = f"{executor.state}: {executor.message}"
        return part in said

    until(comes, f"people are told of {part}")
    url = service.broker.connection.url
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert httpx.get(f"{url}/readyz").status_code == 503
    task = service.broker.submit("tests.e2e.work:add", 1, 2)
    assert service.broker.get(task.id).state == "pending"
    return said


def broken_ray(folder: Path, what_it_does: str) -> str:
    """A PYTHONPATH on which Ray is something else."""
    package = folder / "broken" / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(what_it_does)
    return str(package.parent)


def test_the_status_of_a_head_that_cannot_start_quotes_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", broken_ray(tmp_path, "raise ImportError('this Ray is broken')"))
    with running(ForkedServiceOnRay(tmp_path / "data")) as service:
        said = what_is_said(service, "this Ray is broken")
    assert said.startswith("failed: the local Ray head did not start")
    assert str(tmp_path / "data" / "ray-head.log") in said
    assert "ray.address" in said


@pytest.mark.provokes("ray-unreachable")
def test_the_status_of_a_cluster_that_does_not_answer_names_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with running(ForkedServiceOnRay(tmp_path / "data", ray={"address": address})) as service:
        said = what_is_said(service, "nothing answers")
        [found] = [one for one in service.broker.diagnostics() if one.kind == "ray-unreachable"]
    assert (found.severity, f"Nothing starts: nothing answers at {address}" in found.cause) == (
        "critical",
        True,
    )
    assert said.startswith(f"failed: nothing answers at {address}, the configured ray.address")
    assert "start the head of the cluster there" in said


@pytest.mark.parametrize(("name", "mode"), [("ray-head.log", 0o400), ("ray-token", 0o000)])
def test_a_file_of_another_user_is_named_with_the_remedy(tmp_path: Path, name: str, mode: int) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    (data_dir / name).touch(mode=mode)
    with running(ForkedServiceOnRay(data_dir), bound_by_modes) as service:
        said = what_is_said(service, "Permission denied")
    assert said.startswith(f"failed: cannot start Ray: Permission denied: {data_dir / name}; give {data_dir}")
    assert f"uid {os.geteuid()}" in said
    assert "--data-dir" in said


def test_a_run_directory_that_cannot_be_written_is_reported_until_it_can(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "data" / "runs"
    runs.mkdir(parents=True, mode=0o500)
    with running(ForkedServiceOnRay(tmp_path / "data"), bound_by_modes) as service:
        said = what_is_said(service, "Permission denied")
        assert str(runs) in said
        runs.chmod(0o700)
        [waiting] = service.broker.list()
        assert service.broker.result(waiting.id, timeout_seconds=PATIENCE_SECONDS) == 3


async def test_a_head_that_takes_too_long_is_killed_before_another_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", broken_ray(tmp_path, "import time; time.sleep(600)"))
    monkeypatch.setattr(head, "START_SECONDS", 3.0)
    starting = asyncio.create_task(running_head(lab_options(tmp_path)))
    slow = await eventually(lambda: read_state(tmp_path))
    with pytest.raises(HeadRefused, match="did not start within 3 s"):
        await starting
    assert not is_there(slow.pid)
    assert command_lines(slow.temp_dir) == {}
    await eventually(lambda: not os.path.exists(slow.temp_dir))
    assert read_state(tmp_path) is None


async def test_head_whose_agents_load_slowly_says_why_it_ended_and_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", slow_agents(tmp_path, 25.0))
    options = lab_options(tmp_path)
    with pytest.raises(HeadNotStarted, match=r"lost raylet while it started \(Ray says: .*Timed out"):
        await running_head(options)
    log = (options.data_dir / "ray-head.log").read_text()
    assert "the last lines of Ray's raylet.out:" in log
    try:
        assert (await running_head(options, chooses_ports=True)).address
    finally:
        await stop_head(options.data_dir)


@pytest.fixture
def left_behind(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Stands for a head that has begun and is not up."""
    ray, python = versions()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as left:
        state = HeadState(*process_id(left.pid), boot_id(), "", str(tmp_path / "nowhere"), ray, python)
        write_state(tmp_path, state)
        yield left
        left.kill()


async def test_a_head_that_a_killed_service_was_starting_is_killed(
    left_behind: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", broken_ray(tmp_path, "raise ImportError"))
    with pytest.raises(HeadRefused):
        await running_head(lab_options(tmp_path))
    assert left_behind.wait(PATIENCE_SECONDS) == -signal.SIGKILL
