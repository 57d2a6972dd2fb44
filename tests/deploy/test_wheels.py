"""Both distributions as users get them: installed somewhere else, and used there."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpubroker import Broker

from tests.deploy.wheels import Place, build, sizes
from tests.e2e.released import WHEELS
from tests.e2e.service_process import environment, until
from tests.patience import PATIENCE_SECONDS

RELEASED = {
    "gpubroker": "e5149795cf015f9f1bf24677f712f55b43c7f8bb72586029648e8164bb25c0df",
    "gpubroker_server": "7f8da18cf7b30ba8a727a83379b82c49626a28883edfddeb00c3ef9d1ee22826",
}
"""SHA-256 of the wheels of 0.2.0."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path / "venv")
    shutil.rmtree(tmp_path / "venv")  # pytest would keep three of 330 MiB


@contextmanager
def serving(
    place: Place, data_dir: Path, *words: str, client: str = "client.json"
) -> Iterator[dict[str, str]]:
    command = [str(place.folder / "bin/gpubroker"), *words, "--data-dir", str(data_dir)]
    with (place.folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=place.folder, env=environment())
    try:
        file = data_dir / client
        until(lambda: file.exists() or process.poll() is not None, "it says where it listens")
        assert process.poll() is None, (place.folder / "log").read_text(encoding="utf-8")
        yield json.loads(file.read_text(encoding="utf-8"))
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(PATIENCE_SECONDS)


def test_the_wheels_of_the_last_release_are_those_that_were_cut() -> None:
    """What is upgraded from them is what users have."""
    found = {wheel.name.partition("-")[0]: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in WHEELS}
    assert found == RELEASED


def test_the_demo_runs_from_what_pip_installs_and_without_any_file(
    wheels: Sequence[Path], place: Place, tmp_path: Path
) -> None:
    place.install(wheels, "ray")
    place.run("pip", "check")
    found = (
        "import gpubroker, gpubroker_server, ray, sqlalchemy as s; print(gpubroker, gpubroker_server, ray, s)"
    )
    assert place.run("python", "-c", found).count(f" from '{place.folder}/") == 4
    data = tmp_path / "data"
    with serving(place, data, "serve", "--demo", "--port", "0"):
        known = {"GPUBROKER_DATA_DIR": str(data)}
        fit = ("gpubroker.example:fit", "-i", "epochs=1", "-i", "epoch_seconds=0.1", "--gpu-memory", "18GiB")
        assert '"epoch": 1' in place.run("gpubroker", "submit", "--wait", *fit, **known)
        assert '"epoch": 1' in place.run("gpubroker", "result", "last", **known)
        assert "2 GPUs (simulated)" in place.run("gpubroker", "gpus", **known)
        stopped = place.run("gpubroker", "down", "--data-dir", str(data))
        assert "stopped" in stopped
        assert "local Ray" in stopped


def test_gateway_runs_without_ray_and_a_broker_names_the_missing_extra(
    wheels: Sequence[Path], place: Place, tmp_path: Path, empty_postgres_url: str
) -> None:
    place.install_linked(wheels, "postgres")
    place.run("pip", "check")
    missing = (
        "import importlib.util as u; print([n for n in ('ray', 'grpc', 'psycopg') if not u.find_spec(n)])"
    )
    assert place.run("python", "-c", missing).strip() == "['ray', 'grpc']"
    server = ("--database-url", empty_postgres_url)
    with (
        serving(place, tmp_path / "data", "gateway", "--port", "0", *server) as client,
        Broker(client["url"], client["token"]) as broker,
    ):
        task = broker.submit(["true"], cpu=0.1)
        assert broker.get(task.id).state == "pending"
    assert "pip install 'gpubroker-server[ray]'" in refusal(place, "broker", *server)


def test_without_extras_the_database_is_cared_for_and_missing_ones_named(
    wheels: Sequence[Path], place: Place, tmp_path: Path
) -> None:
    place.install_linked(wheels)
    place.run("pip", "check")
    kept, server = ("--data-dir", str(tmp_path / "data")), ("--database-url", "postgresql://nobody@/none")
    assert "now at" in place.run("gpubroker", "migrate", *kept)
    assert "holds everything" in place.run("gpubroker", "backup", str(tmp_path / "backup"), *kept)
    assert "pip install 'gpubroker-server[postgres]'" in refusal(place, "migrate", *server)
    assert "pip install 'gpubroker-server[ray]'" in refusal(place, "serve", *kept)
    servers = '[{"name": "t", "http_url": "http://127.0.0.1:1", "grpc_url": "http://127.0.0.1:2"}]'
    settings = {"ENGINE": "simulated", "TRITON__SERVERS": servers, "TRITON__GRPC_PORT": "1"}
    spoken = {f"GPUBROKER_{name}": value for name, value in settings.items()}
    assert "pip install 'gpubroker-server[triton]'" in refusal(place, "serve", *kept, **spoken)
    assert sum(size for _, size in sizes(place)) < 120 * 2**20


def refusal(place: Place, *words: str, **variables: str) -> str:
    command = [str(place.folder / "bin/gpubroker"), *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment(**variables), timeout=PATIENCE_SECONDS
    )
    assert ended.returncode == 2, ended.stderr
    return ended.stderr
