"""`gpubroker down` on a joined Ray ends what is ours there, also of a service that was killed before."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters.ray.head.head import HeadState, running_head, stop_head

from tests.e2e.lab.conftest import a_home
from tests.e2e.ray_lab import agents_of, guest_environment, is_there, lab_options
from tests.e2e.service_process import BrokerProcess, GatewayProcess, ServiceProcess, environment, until
from tests.patience import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[HeadState, Path]]:
    with a_home() as home:
        try:
            yield asyncio.run(running_head(lab_options(home))), home
        finally:
            asyncio.run(stop_head(home))


def joining(head: HeadState, **settings: Any) -> dict[str, Any]:
    return {"ray": {"address": head.address, "cluster": "guest", "spares": 1, "warm_runners": 0}, **settings}


def at_work(service: ServiceProcess, folder: Path) -> int:
    """The process of a run."""
    broker, pid = service.broker, folder / "pid"
    broker.submit(["sh", "-c", f"echo $$ > {pid}; sleep 600"])
    until(lambda: pid.exists() and pid.read_text().strip() != "", "a run is at work")
    return int(pid.read_text())


def down(process: ServiceProcess, env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "gpubroker_server", "down", "--config", str(process._config)]
    ended = subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_what_a_killed_service_left_is_ended(tmp_path: Path, head: tuple[HeadState, Path]) -> None:
    state, home = head
    env = guest_environment(home)
    service = ServiceProcess(tmp_path / "data", env, **joining(state)).start()
    run = at_work(service, tmp_path)
    service.kill_9()
    assert agents_of(state)
    assert is_there(run)
    said = down(service, env)
    assert f"1 node agent and all runs of it on {state.address} ended; that Ray goes on" in said
    until(lambda: not agents_of(state) and not is_there(run), "nothing of it is left")


def test_what_a_broker_without_http_left_is_ended_unless_another_one_leads(
    tmp_path: Path, head: tuple[HeadState, Path], postgres_url: str
) -> None:
    state, home = head
    env = guest_environment(home)
    settings = joining(state, database_url=postgres_url, blob_dir=str(tmp_path / "objects"))
    one, two = (BrokerProcess(tmp_path / name, env, **settings) for name in ("one", "two"))
    with GatewayProcess(tmp_path / "gateway", env, **settings) as gateway, one, two:
        run = at_work(gateway, tmp_path)
        assert "leads on this database; its node agents and runs" in down(one, env)
        assert agents_of(state)
        assert is_there(run)
        assert "1 node agent and all runs of it" in (said := down(two, env))
        assert "no service has run" not in said
        until(lambda: not agents_of(state) and not is_there(run), "nothing of it is left")
