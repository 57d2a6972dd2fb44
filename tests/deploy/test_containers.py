"""Both images as podman builds and runs them, as a user of no rights on a root that it cannot write.

Needs root, and Debian's packages podman, crun and mmdebstrap. The base images are stand-ins, as no registry
is asked: a Debian 12 with its Python, and uv from its wheel.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.deploy.programs import ROOT
from tests.postgres import a_server_of_its_own

SECONDS = 1200
SCRIPTS = ROOT / "tests/deploy/containers"
TASK = "[10001,false,false]"
"""Its user, and that it can write neither the root nor the code."""


@pytest.mark.evidence
@pytest.mark.timeout(2 * SECONDS)
def test_both_images_are_built_and_run_tasks_on_a_read_only_root() -> None:
    with a_server_of_its_own() as server, tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        folder = Path(place)
        [sockets] = parse_qs(urlsplit(server.url).query)["host"]
        Path(sockets).chmod(0o755)
        run("build.sh", str(ROOT), place)
        for image in ("server", "gateway"):
            first, second = (layers(folder / f"layers-{image}-{turn}") for turn in (1, 2))
            assert first[:-1] == second[:-1], "all layers below our packages"
            assert first[-1] != second[-1]
        told = run("run.sh", place, sockets, server.url.replace(sockets, "/run/postgresql"))
        lines = (folder / "result").read_text(encoding="utf-8").splitlines()
        print((folder / "sizes").read_text(encoding="utf-8"))
    assert dict(line.split(" ", 1) for line in lines) == {
        "refused": "2 1",
        "nothing-runs": "1",
        "health-server": "yes",
        "says": "gpubroker: http://127.0.0.1:8470 answers",
        "first-process": "tini",
        "user": "10001 10001",
        "licence": "MIT License",
        "task": TASK,
        "zombies": "0",
        "stopped-server": "0",
        "kept": TASK,
        "migrated": "the database is now at",
        "health-gateway": "yes",
        "health-broker": "yes",
        "broker-says": "gpubroker: broker (process N) runs",
        "ray-in-gateway": "None",
        "task-over-gateway": TASK,
        "stopped-gateway": "0",
        "stopped-broker": "0",
        "health-node": "yes",
        "over": "yes",
    }, told


def run(script: str, *words: str) -> str:
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), *words], check=False, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def layers(file: Path) -> Sequence[str]:
    found: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return found
