"""The directory in which a command runs, if the user names none: where the command line is used."""

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpubroker.cli.tasks import directory
from gpubroker.cli.tasks.directory import closed_part

from tests.chaos.forked import ForkedService
from tests.client.command_line import Run, command_line
from tests.client.recorded_service import FULL_ID, RecordedService, Reply, a_task, page
from tests.e2e.service_process import ServiceProcess

NOBODY = "nobody"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    home = tmp_path_factory.mktemp("service") / "data"
    with ForkedService(home, engine="simulated", task_user=NOBODY) as running:
        yield running


@pytest.fixture
def gpubroker(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(service.data_dir))
    return command_line(monkeypatch, capsys)


@pytest.fixture
def on_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel of this machine says the boot id of the simulated node."""
    says = tmp_path / "boot_id"
    says.write_text("simulated\n")
    monkeypatch.setattr(directory, "_BOOT_ID", says)


@pytest.mark.usefixtures("on_the_node")
def test_command_from_a_directory_closed_to_its_user_is_refused(
    gpubroker: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.chdir(closed)
    refused = gpubroker("submit -- true")
    assert refused.code == 2
    for part in (f"tasks run as user {NOBODY}", "may not enter", "--upload", "--dir DIR"):
        assert part in refused.err
    assert gpubroker("submit --dir /srv -- true").code == 0


def test_command_from_a_machine_that_is_no_node_names_no_directory(
    gpubroker: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.chdir(closed)
    assert gpubroker("submit -- true").code == 0


def test_closed_part_is_the_first_that_the_user_may_not_enter(tmp_path: Path) -> None:
    root = Path("/dev/shm") / f"gpubroker-{os.getpid()}-{tmp_path.name}"  # open to all
    inner = root / "closed" / "open"
    inner.mkdir(parents=True)
    try:
        root.chmod(0o755)
        (root / "closed").chmod(0o700)
        inner.chmod(0o755)
        assert closed_part(inner, NOBODY) == root / "closed"
        (root / "closed").chmod(0o711)
        assert closed_part(inner, NOBODY) is None
        own = pwd.getpwuid(os.geteuid()).pw_name
        (root / "closed").chmod(0o700)
        assert closed_part(inner, own) is None
        assert closed_part(inner, "no-such-user") is None
    finally:
        inner.rmdir()
        (root / "closed").rmdir()
        root.rmdir()


def test_first_node_of_a_service_that_has_just_started_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Otherwise the first command after a start runs in a directory of the service."""
    monkeypatch.setattr(directory, "_POLL_SECONDS", 0.001)
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    node = {"name": "n1", "task_user": pwd.getpwuid(os.geteuid()).pw_name}
    with RecordedService() as starting:
        (tmp_path / "client.json").write_text(json.dumps({"url": starting.url, "token": "gpb_secret"}))
        starting.reply_with(*[page()] * 5, *[Reply(200, {"items": [node]})] * 2, Reply(202, a_task(FULL_ID)))
        ended = command_line(monkeypatch, capsys)("submit -- true")
        assert (ended.code, "no node yet" in ended.err) == (0, True)
        assert starting.requests[-1].body["run"]["working_directory"] == str(tmp_path)


def test_first_node_that_comes_between_two_questions_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUBROKER_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    node = {"name": "n1", "task_user": pwd.getpwuid(os.geteuid()).pw_name}
    with RecordedService() as starting:
        (tmp_path / "client.json").write_text(json.dumps({"url": starting.url, "token": "gpb_secret"}))
        starting.reply_with(page(), *[Reply(200, {"items": [node]})] * 2, Reply(202, a_task(FULL_ID)))
        assert command_line(monkeypatch, capsys)("submit -- true").code == 0
        assert starting.requests[-1].body["run"]["working_directory"] == str(tmp_path)


def test_node_of_a_service_elsewhere_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RecordedService() as elsewhere:
        monkeypatch.setenv("GPUBROKER_URL", elsewhere.url)
        monkeypatch.setenv("GPUBROKER_TOKEN", "gpb_secret")
        elsewhere.reply_with(page(), Reply(202, a_task(FULL_ID)))
        assert command_line(monkeypatch, capsys)("submit -- true").code == 0
        assert [request.path for request in elsewhere.requests] == ["/nodes", "/tasks"]
