"""What stops a start, and what a start leaves on disk. The process is the real one; its engine only waits.

Most are forked from an interpreter that has loaded everything; one is started as its users start it.
"""

import json
import os
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import structlog
from gpubroker_server.bootstrap.start_checks import prepare_data_dir

from tests.bootstrap.refusals import WAITING, refusal
from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ROOT, ServiceProcess, environment, until


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ForkedService(tmp_path / "data", **WAITING) as running:
        yield running


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("task_user", "nobody-of-this-name", "no user 'nobody-of-this-name'"),
        ("task_path", ["/nowhere/at/all"], "/nowhere/at/all is not a directory"),
    ],
)
def test_tasks_that_could_only_fail_are_not_waited_for(
    tmp_path: Path, setting: str, value: object, says: str
) -> None:
    chosen: dict[str, Any] = {setting: value}
    assert says in refusal(ForkedService(tmp_path / "data", **chosen))


def test_a_dashboard_without_what_it_needs_is_refused_with_what_to_install(tmp_path: Path) -> None:
    """As here, where Ray is installed without it."""
    with pytest.raises(ModuleNotFoundError):
        import_module("aiohttp_cors")
    said = refusal(ForkedService(tmp_path / "data", ray={"dashboard": True}))
    assert "ray.dashboard needs more to be installed: pip install 'ray[default]'; or set it to false" in said


def test_a_disk_root_that_is_a_link_is_refused_with_its_real_path(tmp_path: Path) -> None:
    (real := tmp_path / "real").mkdir()
    (tmp_path / "logs").symlink_to(real)
    roots = [{"path": str(tmp_path / "logs"), "class": "logs"}]
    said = refusal(ForkedService(tmp_path / "data", fleet={"disk": {"roots": roots}}, **WAITING))
    assert f"{tmp_path}/logs is a symbolic link" in said
    assert f"its real path, {real}" in said


def test_processes_that_start_at_once_may_have_one_data_directory(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as starting:
        list(starting.map(prepare_data_dir, [tmp_path / "data"] * 400))
    assert list((tmp_path / "data").iterdir()) == []


def test_an_address_that_others_reach_needs_their_names_for_it(tmp_path: Path) -> None:
    """As in the image, whose other commands listen on nothing and need none."""
    said = refusal(ForkedService(tmp_path / "data", **WAITING, host="0.0.0.0"))
    assert "host is 0.0.0.0, which other machines reach, and allowed_hosts is empty" in said
    assert "GPUBROKER_ALLOWED_HOSTS=gpus.example.org" in said
    command = [sys.executable, "-m", "gpubroker_server", "migrate", "--data-dir", str(tmp_path / "data")]
    subprocess.run(command, check=True, env=environment(GPUBROKER_HOST="0.0.0.0"), cwd=ROOT)


def test_the_first_start_makes_an_admin_token_that_only_its_owner_can_read(service: ServiceProcess) -> None:
    path = service.data_dir / "client.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(service.data_dir.stat().st_mode) == 0o700
    [token] = service.broker.tokens()
    assert (token.name, token.tenant, token.max_priority) == ("admin", "default", 100)


def test_a_second_start_keeps_the_token_and_the_tasks(service: ServiceProcess) -> None:
    task = service.broker.submit("tests.e2e.work:add", 1, 2, cpu=0.5)
    service.broker.wait(task.id)
    before = json.loads((service.data_dir / "client.json").read_text())["token"]
    assert service.terminate() == 0
    service.start()
    assert json.loads((service.data_dir / "client.json").read_text())["token"] == before
    assert service.broker.get(task.id).state == "succeeded"


def test_waiting_tasks_of_a_withdrawn_entrypoint_are_named_and_fail(tmp_path: Path) -> None:
    in_an_hour = datetime.fromtimestamp(time.time() + 3600.0, UTC)
    with ForkedService(tmp_path / "data", **WAITING) as service:
        waiting = service.broker.submit("tests.e2e.work:add", 1, 2, cpu=0.5, not_before=in_an_hour)
        assert "does not allow any more" not in service.log()
    with ForkedService(tmp_path / "data", **WAITING | {"entrypoints": ["other:*"]}) as service:
        named = "1 waiting task names an entrypoint that the setting entrypoints does not allow any more"
        until(lambda: f"{named}: tests.e2e.work:add (1)." in service.log(), "the start says so")
        service.broker.change(waiting.id, not_before=None)
        ended = service.broker.wait(waiting.id)
    assert ended.error is not None
    assert ended.error.kind == "entrypoint_not_allowed"
    assert "Have the operator allow it" in ended.error.message


def test_a_lost_token_file_is_replaced_by_one_with_a_new_admin_token(service: ServiceProcess) -> None:
    assert service.terminate() == 0
    (service.data_dir / "client.json").unlink()
    service.start()
    names = {token.name for token in service.broker.tokens()}
    assert "admin" in names
    assert len(names) == 2


def test_a_second_serve_on_one_file_is_refused_and_names_the_first(service: ServiceProcess) -> None:
    said = refusal(ForkedService(service.data_dir, **WAITING))
    assert str(service.pid) in said
    assert service.broker.stats().tasks.pending == 0


def test_a_port_in_use_is_refused_with_another_way_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(ForkedService(tmp_path / "data", port=port, **WAITING))
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said
    assert f"process {os.getpid()}" in said


def test_a_database_of_another_program_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE orders (id)")
    before = path.read_bytes()
    said = refusal(ForkedService(tmp_path / "data", database_url=f"sqlite:///{path}", **WAITING))
    assert "theirs.db" in said
    assert "--database-url" in said
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, and long enough to be taken for one\n" * 40)
    said = refusal(ForkedService(tmp_path / "data", database_url=f"sqlite:///{path}", **WAITING))
    assert "notes.txt" in said
    assert path.read_text().startswith("not a database")


def test_a_data_directory_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refusal(ForkedService(tmp_path / "other", data_dir=str(tmp_path / "file" / "data"), **WAITING))
    assert str(tmp_path / "file" / "data") in said
    assert "--data-dir" in said


def test_a_wrong_setting_stops_the_start(tmp_path: Path) -> None:
    service = ForkedService(tmp_path / "data", prot=1)
    refusal(service)
    assert "prot" in service.log()


def test_a_database_server_that_is_away_is_refused_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"postgresql://nobody@127.0.0.1:{port}/none"
    service = ForkedService(tmp_path / "data", database_url=url, **WAITING)
    assert "--database-url" in refusal(service)
    assert str(port) in service.log()


def test_down_without_a_service_says_so(tmp_path: Path) -> None:
    config = ForkedService(tmp_path / "data", **WAITING)
    config.stop()
    assert not (tmp_path / "data").exists()


def test_sigterm_ends_the_service_within_its_time_and_without_complaint(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "data", **WAITING).start()
    assert service.terminate() == 0
    assert "Traceback" not in service.log()


def test_the_greeting_says_where_to_go_next(service: ServiceProcess) -> None:
    greeting = service.log()
    assert str(service.data_dir / "client.json") in greeting
    assert "gpubroker gpus" in greeting


def test_a_command_of_the_server_explains_itself() -> None:
    asked = subprocess.run(["gpubroker", "serve", "--help"], capture_output=True, text=True, check=True)
    assert "--data-dir" in asked.stdout


@pytest.mark.parametrize("inside", ["", "client.json"])
def test_an_open_data_directory_is_set_to_0700_with_a_line_of_the_log(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o755)
    if inside:
        (folder / inside).touch()
    with structlog.testing.capture_logs() as lines:
        prepare_data_dir(folder)
        prepare_data_dir(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    [line] = lines
    assert (line["path"], line["fault"]) == (str(folder), "it had mode 755")
    assert "is set to mode 0700" in line["event"]


@pytest.mark.parametrize(("mode", "inside"), [(0o755, "notes.txt"), (0o1777, "client.json")])
def test_a_directory_of_others_stays_as_it_is_and_the_log_says_so(
    tmp_path: Path, mode: int, inside: str
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    (folder / inside).touch()
    with structlog.testing.capture_logs() as lines:
        prepare_data_dir(folder)
    assert folder.stat().st_mode & 0o7777 == mode
    assert "not this user's alone" in lines[0]["fault"]
