"""Triton's own load generator, in C++: it asks for metadata, configuration and statistics besides."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.service_process import ServiceProcess
from tests.patience import PATIENCE_SECONDS
from tests.triton.server import HOME, wheel

REQUESTS = 60


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two that it misses, which the server's wheel brings under longer names."""
    folder = tmp_path_factory.mktemp("libraries")
    for name, pattern in (("libb64.so.0d", "libb64-*.so.0d"), ("libcudart.so.12", "libcudart-*.so.12*")):
        [found] = Path(wheel()["libraries"]).glob(pattern)
        (folder / name).symlink_to(found)
    return folder


@pytest.mark.parametrize("form", ["binary", "json"])
def test_it_measures_a_model_through_the_broker(
    service: ServiceProcess, libraries: Path, tmp_path: Path, form: str
) -> None:
    told = tmp_path / "told.json"
    command = [
        str(HOME / "bin" / "perf_analyzer"), "-m", "identity_fp32", "-i", "http",
        "-u", service.url.removeprefix("http://"), "-H", f"Authorization: Bearer {service.token}",
        "--shape", "INPUT0:1,16", "--concurrency-range", "4", "--request-count", str(REQUESTS),
        "--input-tensor-format", form, "--output-tensor-format", form, "--profile-export-file", str(told),
    ]  # fmt: skip
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [experiment] = json.loads(told.read_text())["experiments"]
    assert len(experiment["requests"]) >= REQUESTS
