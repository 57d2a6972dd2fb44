"""Ray's dashboard, from an environment of its own: the tester's has Ray without it."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from tests.e2e.service_process import ROOT, ServiceProcess, until

INSTALL_SECONDS = 300.0


@pytest.fixture
def python(tmp_path: Path) -> Iterator[str]:
    """Of an environment like the tester's, with all that the dashboard needs besides."""
    uv = ROOT / ".tools/bin/uv"
    own = os.environ | {"UV_PROJECT_ENVIRONMENT": str(tmp_path / "venv")}
    python = tmp_path / "venv/bin/python"
    for words in (
        ["sync", "--frozen"],
        ["pip", "install", "--python", str(python), f"ray[default]=={version('ray')}"],
    ):
        command = [str(uv) if uv.exists() else "uv", *words, "-q"]
        subprocess.run(command, check=True, cwd=ROOT, env=own, timeout=INSTALL_SECONDS)
    yield str(python)
    shutil.rmtree(tmp_path / "venv")  # pytest would keep three of 600 MiB


@pytest.mark.evidence
def test_it_answers_those_who_have_the_token_and_goes_with_its_ray(tmp_path: Path, python: str) -> None:
    ray = {"dashboard": True, "spares": 1, "warm_runners": 0}
    service = ServiceProcess(tmp_path / "data", ray=ray)
    service.python = python
    with service:
        broker = service.broker
        assert broker.result(broker.submit("tests.e2e.work:add", 1, 2)) == 3
        said = re.search(
            r"dashboard is at (http://127\.0\.0\.1:\d+); it asks for the token in (.+)", service.log()
        )
        assert said is not None, service.log()
        nodes, token = f"{said[1]}/nodes?view=summary", Path(said[2]).read_text(encoding="utf-8")
        assert httpx.get(said[1]).status_code == 200
        assert httpx.get(nodes).status_code == 401
        until(lambda: nodes_in(nodes, token) == ["127.0.0.1"], "it knows the node")
    with pytest.raises(httpx.ConnectError):
        httpx.get(said[1])


def nodes_in(url: str, token: str) -> list[str]:
    told = httpx.get(url, headers={"Authorization": f"Bearer {token}"}).raise_for_status().json()
    return [node["ip"] for node in told["data"]["summary"]]
