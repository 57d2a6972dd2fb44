"""A folder of a user, sent to a service that runs tasks as another user: what belongs to whom."""

import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpubroker import Broker

from tests.e2e.service_process import ServiceProcess

USER = "nobody"
LOOK = """
import os
from pathlib import Path

import helper


def look():
    Path("made").mkdir()
    Path("made/by").write_text(str(os.getuid()))
    os.symlink("/etc/shadow", "made/shadow")
    above = Path.cwd().parent
    reaches = os.access(above, os.R_OK | os.W_OK), os.access(above.parent / "uploads", os.X_OK)
    return helper.VALUE, os.getuid(), Path("helper.py").stat().st_uid, *reaches
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    home = tmp_path_factory.mktemp("service")
    user = USER if os.geteuid() == 0 else ""
    work = Path("/dev/shm") / f"gpubroker-test-{os.getpid()}"
    work.mkdir(mode=0o711)
    work.chmod(0o711)
    ray = {"work_dir": str(work), "spares": 2}
    try:
        with ServiceProcess(home / "data", task_user=user, ray=ray) as service:
            yield service.broker
    finally:
        shutil.rmtree(work)  # uploads are kept for the next service on this data directory


def test_run_owns_its_copy_and_reaches_no_other(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    task = broker.submit("look:look", upload=tmp_path, outputs=["made/**"])
    value, uid, owner, lists_others, enters_cache = broker.result(task)
    expected = pwd.getpwnam(USER).pw_uid if os.geteuid() == 0 else os.geteuid()
    assert (value, uid, owner) == (7, expected, expected)
    if os.geteuid() == 0:
        assert (lists_others, enters_cache) == (False, False)
    [path] = broker.download_outputs(task, tmp_path / "results")
    assert path.read_text() == str(expected), "and the link to what the user may not read is left out"
    assert "1 that are links" in broker.task_outputs(task).items[0].message


def test_ranks_of_a_gang_each_have_a_copy_and_outputs(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text('echo "$RANK" > rank\n')
    task = broker.submit(
        ["sh", "run.sh"], upload=tmp_path, outputs=["rank"], bundles=[{"count": 2, "cpu": 0.1}]
    )
    assert broker.result(task) == {"exit_code": 0}
    paths = broker.download_outputs(task, tmp_path / "results")
    assert [path.relative_to(tmp_path / "results").as_posix() for path in paths] == ["rank", "rank-1/rank"]
    assert [path.read_text() for path in paths] == ["0\n", "1\n"]
