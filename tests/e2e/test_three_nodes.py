"""Two gateways and two brokers on PostgreSQL and three Ray nodes, of which two lose their power."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from gpubroker_server.adapters.ray.head.head import running_head, stop_head

from tests.alerts import Prometheus
from tests.e2e.hands import Hands
from tests.e2e.lab.conftest import a_home
from tests.e2e.ray_lab import guest_environment, lab_options
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import GIB, BrokerProcess, GatewayProcess, ServiceProcess, until
from tests.postgres import PostgresServer

NODE, PAUSED = "gpubroker_node_ready", "gpubroker_silent_nodes"
QUARANTINE, OVERUSE = "gpubroker_gpu_memory_quarantined_bytes", "gpubroker_gpu_memory_overused_bytes"


class Site:
    def __init__(self, stack: ExitStack, home: Path, folder: Path, url: str) -> None:
        head = asyncio.run(running_head(lab_options(home)))
        stack.callback(lambda: asyncio.run(stop_head(home)))
        env = guest_environment(home)
        self.nodes = {n: stack.enter_context(RayNode(head.address, n, env)) for n in ("n2", "n3")}
        settings: dict[str, Any] = {
            "database_url": url,
            "blob_dir": str(folder / "objects"),
            "ray": {"address": head.address, "cluster": "three", "spares": 1, "warm_runners": 0},
            "simulated_devices": [{"kind": "sim-24g", "memory_mb": 24 * GIB}],
            "policy": {"sample_period_seconds": 0.5},
        }
        started = (
            stack.enter_context(kind(folder / name, env, **settings))
            for kind, name in (
                (GatewayProcess, "a"), (GatewayProcess, "b"), (BrokerProcess, "one"), (BrokerProcess, "two"),
            )
        )  # fmt: skip
        *self.gateways, self.leader, self.standby = started
        self.prometheus = Prometheus(*self.gateways)
        self.hands = Hands(self.gateways[0].broker, folder)
        until(lambda: len(self.ready()) == 3, "three nodes answer")
        self.prometheus.until()

    def ready(self) -> list[str]:
        return [node.name for node in self.gateways[1].broker.nodes() if node.ready]


@pytest.fixture
def site(tmp_path: Path, postgres_server: PostgresServer) -> Iterator[Site]:
    url = postgres_server.new_database()
    with ExitStack() as stack:
        stack.callback(lambda: postgres_server.drop(url))
        home = stack.enter_context(a_home())
        yield Site(stack, home, tmp_path, url)


def parts_of(gateway: ServiceProcess) -> tuple[int, str]:
    ready = httpx.get(f"{gateway.url}/readyz")
    return ready.status_code, ready.json()["parts"]["nodes"]


@pytest.mark.evidence
def test_alerts_name_lost_nodes_and_service_resumes_when_ray_confirms_them(
    site: Site,
) -> None:
    """Ray says that the nodes are dead."""
    broker, prometheus = site.gateways[1].broker, site.prometheus
    runs = [
        site.hands.at_work(f"on-{name}", gpu_mb=4096, prefer_nodes={"node": [name]}) for name in site.nodes
    ]
    for node in site.nodes.values():
        node.kill()
    until(lambda: prometheus.soon() >= {NODE, PAUSED}, "both are missed, and nobody can say why")
    assert parts_of(site.gateways[0]) == (200, "paused: n2, n3 silent")
    assert "paused: n2, n3 silent" in broker.explain(runs[0]).message
    prometheus.until(NODE, QUARANTINE)
    assert parts_of(site.gateways[0]) == (200, "ok")
    until(lambda: all(broker.get(run).state == "running" for run in runs), "both run on the third")

    for node in site.nodes.values():
        node.start()
    prometheus.until()
    assert len(site.ready()) == 3
    site.leader.kill_9()
    until(lambda: str(broker.stats().leader.holder).endswith(f":{site.standby.pid}"), "the other one leads")
    site.leader.start()
    prometheus.until()

    env = {"SIMULATED_GPU_MB": "9000"}
    greedy = broker.submit(["sleep", "600"], gpu_mb=4096, env=env)
    prometheus.until(OVERUSE)
    broker.cancel(greedy, grace_seconds=0)
    prometheus.until()
    site.hands.end(*runs)
    assert prometheus.fired <= {NODE, PAUSED, QUARANTINE, OVERUSE}, "nothing else, all the time"
