"""What the service says where the modes of files do not let it write."""

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.bootstrap.refusals import WAITING, refusal
from tests.bound_by_modes import bound_by_modes
from tests.chaos.forked import ForkedService
from tests.e2e.service_process import ServiceProcess

READ_ONLY = stat.S_IRUSR | stat.S_IXUSR


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A directory in which nothing can be made."""
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(READ_ONLY)
    yield folder
    folder.chmod(stat.S_IRWXU)


@contextmanager
def running(service: ServiceProcess) -> Iterator[ServiceProcess]:
    service.start(bound_by_modes)
    try:
        yield service
    finally:
        service.stop()


@pytest.mark.parametrize("below", ["", "data"], ids=["it is there", "it would have to be made"])
def test_a_data_directory_without_write_access_is_named(tmp_path: Path, locked: Path, below: str) -> None:
    said = refusal(ForkedService(tmp_path / "data", **WAITING, data_dir=str(locked / below)), bound_by_modes)
    assert f"cannot write to the data directory {locked / below}: Permission denied" in said
    assert "--data-dir" in said


def test_a_directory_in_which_no_database_may_be_made_is_named(tmp_path: Path, locked: Path) -> None:
    url = f"sqlite:///{locked}/gpubroker.db"
    said = refusal(ForkedService(tmp_path / "data", **WAITING, database_url=url), bound_by_modes)
    assert f"cannot open the database {locked}/gpubroker.db: Permission denied" in said
    assert "give this user access" in said
    assert list(locked.iterdir()) == []


@pytest.mark.parametrize("mode", [0o400, 0o000], ids=["read only", "nothing"])
def test_a_database_that_may_not_be_written_is_named_and_kept(tmp_path: Path, mode: int) -> None:
    service = ForkedService(tmp_path / "data", **WAITING)
    with running(service):
        task = service.broker.submit("tests.e2e.work:add", 1, 2, cpu=0.5)
        service.broker.wait(task.id)
    path = tmp_path / "data" / "gpubroker.db"
    before = path.read_bytes()
    path.chmod(mode)
    said = refusal(service, bound_by_modes)
    assert f"cannot open the database {path}" in said
    assert "give this user access" in said
    path.chmod(0o600)
    assert path.read_bytes() == before
    with running(service):
        assert service.broker.get(task.id).state == "succeeded"


def test_objects_that_cannot_be_written_are_refused_and_the_service_stays(tmp_path: Path) -> None:
    with running(ForkedService(tmp_path / "data", **WAITING)) as service:
        first = submit(service, "x")
        assert first.status_code == 202
        objects = tmp_path / "data" / "blobs"
        objects.chmod(READ_ONLY)
        answer = submit(service, "y")
        assert (answer.status_code, answer.json()["code"]) == (503, "store-unavailable")
        assert "disk" in answer.json()["detail"]
        objects.chmod(stat.S_IRWXU)
        assert submit(service, "y").status_code == 202
        assert service.broker.wait(first.json()["id"]).state == "succeeded"


def submit(service: ServiceProcess, letter: str) -> httpx.Response:
    """A task whose arguments are too large for a row; asked once, where the SDK would ask again."""
    known = json.loads((service.data_dir / "client.json").read_text(encoding="utf-8"))
    body = {"run": {"entrypoint": "tests.e2e.work:add", "args": [letter * 100_000]}}
    headers = {"Authorization": f"Bearer {known['token']}"}
    return httpx.post(f"{known['url']}/tasks", json=body, headers=headers)
