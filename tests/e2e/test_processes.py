"""Two gateways and a broker on one PostgreSQL and a real Ray, as users meet them."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hands import Hands
from tests.e2e.service_process import BrokerProcess, GatewayProcess, ServiceProcess, until
from tests.patience import PATIENCE_SECONDS
from tests.postgres import OwnServer, a_server_of_its_own

STALE_SECONDS = 1.5


@pytest.fixture
def server() -> Iterator[OwnServer]:
    with a_server_of_its_own() as server:
        yield server


def answer(gateway: ServiceProcess, path: str) -> tuple[int, str]:
    """Status and code, asked once, where the SDK would ask again."""
    known = json.loads((gateway.data_dir / "client.json").read_text(encoding="utf-8"))
    headers = {"Authorization": f"Bearer {known['token']}"}
    found = httpx.get(f"{gateway.url}{path}", headers=headers, timeout=PATIENCE_SECONDS)
    return found.status_code, found.json().get("code", "")


def test_any_gateway_answers_for_all_and_says_when_it_cannot(tmp_path: Path, server: OwnServer) -> None:
    settings: dict[str, Any] = {
        "database_url": server.url,
        "blob_dir": str(tmp_path / "objects"),
        "limits": {"stale_seconds": STALE_SECONDS},
        "ray": {"spares": 1, "warm_runners": 0},
    }
    leader = BrokerProcess(tmp_path / "broker", **settings)
    a, b = (GatewayProcess(tmp_path / name, **settings) for name in ("a", "b"))
    processes: list[ServiceProcess] = [leader, a, b]
    try:
        with ThreadPoolExecutor() as together:
            list(together.map(lambda process: process.start(), processes))
        large = a.broker.submit("tests.e2e.work:add", "x" * 100_000, "y")
        assert b.broker.result(large) == "x" * 100_000 + "y"
        held = Hands(a.broker, tmp_path).at_work("held", gpus=2)
        b.broker.cancel(held, grace_seconds=0)
        assert a.broker.wait(held).state == "cancelled"

        server.stop()
        until(lambda: answer(b, "/gpus") == (503, "follower-stale"), "the other gateway is too old")
        assert answer(b, f"/tasks/{large.id}") == (503, "store-unavailable")
        server.start()
        until(lambda: answer(b, "/gpus")[0] == 200, "it knows the cluster again")
        after = b.broker.submit("tests.e2e.work:add", 3, 4)
        assert a.broker.result(after) == 7
    finally:
        for process in processes:
            process.stop()
    assert leader.ended() == 0
