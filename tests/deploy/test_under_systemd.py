"""The units under a real systemd, with real Ray: what an operator's restart, stop and kill do to runs.

Needs root, and a machine with systemd installed: it boots that in namespaces of its own.
"""

import subprocess
import tempfile
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from gpubroker_server.adapters.sql.store import migrate

from tests.deploy.programs import ROOT
from tests.places import short_place
from tests.postgres import a_server_of_its_own

SECONDS = 400


@pytest.mark.evidence
def test_restarts_under_systemd_leave_ray_and_its_runs_alive() -> None:
    boot = ROOT / "tests/deploy/drill/boot.sh"
    with a_server_of_its_own() as server, tempfile.TemporaryDirectory(dir=short_place()) as folder:
        migrate(server.url, "head")
        [sockets] = parse_qs(urlsplit(server.url).query)["host"]
        Path(sockets).chmod(0o755)
        url = server.url.replace(sockets, "/run/postgresql")
        told = subprocess.run(
            ["bash", str(boot), str(ROOT), folder, sockets, url],
            check=False, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        lines = (Path(folder) / "result").read_text(encoding="utf-8").splitlines()
        log = (Path(folder) / "log").read_text(encoding="utf-8")
    assert dict(line.split(" ", 1) for line in lines) == {
        "unit": "active",
        "result": "5",
        "restarted": "yes",
        "restarts-after-kill": "1",
        "state-and-attempt": "succeeded 1 ",
        "starts": "1",
        "ray-after-stop": "2",
        "ray-after-down": "0",
        "unit-after-down": "inactive",
        "gateway": "active",
        "gateway-accepts": "1",
        "gateway-result": "success",
        "over": "yes",
    }, told.stdout + told.stderr + log
