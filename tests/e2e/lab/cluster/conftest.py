"""One service on two Ray nodes for all tests in this folder.

The head is that of the tests that need only an executor: it has two nodes here, and one again for those.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker

from tests.chaos.forked import ForkedServiceOnRay
from tests.e2e.hands import Hands
from tests.e2e.ray_lab import Lab, guest_environment
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import GIB, ServiceProcess, until

CLUSTER: dict[str, Any] = {
    "simulated_devices": [
        {"kind": "sim-small", "memory_mb": 24 * GIB},
        {"kind": "sim-big", "memory_mb": 80 * GIB},
        {
            "kind": "sim-split",
            "memory_mb": 40 * GIB,
            "instances": [{"kind": "sim-slice", "memory_mb": 10 * GIB, "count": 2}],
        },
    ],
    "kinds": {"sim-small": {"power": 1}, "sim-big": {"power": 5, "context_mb": 512}},
    "entrypoints": ["tests.e2e.work:*", "tests.e2e.late:*"],
    "task_env": {"EXPERIMENT_PATH": "/mnt/experiments", "WANDB_HOST": "https://wandb.lab"},
    "nodes": {
        "n2": {
            "labels": {"disk": "fast"},
            "memory_mb": 8192,
            "reserve_memory_mb": 4096,
            "reserve_mb": {"1": 2048},
        }
    },
    "pools": {
        "fast": {"nodes": {"disk": ["fast"]}, "kinds": ["sim-big"]},
        "narrow": {"gpu_mb": 12_000},
        "whole": {"kinds": ["sim-small"], "fractions": False},
        "shared": {"cpu": 2, "gpus": 1, "memory_mb": 2000, "custom": {"scratch_gb": 10}},
    },
    "policy": {
        "gang_start_seconds": 6,
        "custom_limits": {"licence": {"limit": 2, "priority_threshold": 40}, "scratch_gb": 100},
        "max_running": {"tenants": {"guest": 1}, "labels": {"run=*": 1}},
        "tenants": {"greedy": {"weight": 0.25}, "guest": {}},
        "usage_half_life_seconds": 5,
        "streams": {"release": 4, "nightly": 0.5},
    },
}
"""Of each thing that an operator may name there is one."""


ENV_OF_N2 = {f"FILLER_{number}": "of whoever started the node" for number in range(5000)} | {
    "DATABASE_PASSWORD": "planted-on-n2",
    "PROXY_OF_THE_SITE": "for all",
}


@pytest.fixture(scope="package")
def _second_node(shared_lab: Lab) -> Iterator[RayNode]:
    env = ENV_OF_N2 | guest_environment(shared_lab.options.data_dir)
    with RayNode(shared_lab.head.address, "n2", env) as node:
        yield node


@pytest.fixture
def second_node(_second_node: RayNode) -> Iterator[RayNode]:
    """A test may lose it."""
    yield _second_node
    if not _second_node.is_there:
        _second_node.start()


@pytest.fixture(scope="package")
def _two_nodes(
    shared_lab: Lab, _second_node: RayNode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    joined = {"address": shared_lab.head.address, "spares": 2, "cpu": 4}
    joined |= {"inherit_env": ["PROXY_OF_THE_SITE"]}
    home = tmp_path_factory.mktemp("cluster") / "data"
    with ForkedServiceOnRay(
        home, guest_environment(shared_lab.options.data_dir), ray=joined, **CLUSTER
    ) as running:
        until(lambda: len(running.broker.nodes()) == 2, "both nodes are there")
        yield running


@pytest.fixture
def two_nodes(_two_nodes: ServiceProcess) -> Iterator[ServiceProcess]:
    """A service on n2 and a node that has this machine's name, each with the devices that CLUSTER names."""
    yield _two_nodes
    _two_nodes.clear()


@pytest.fixture
def cluster(two_nodes: ServiceProcess) -> Broker:
    return two_nodes.broker


@pytest.fixture
def hands(cluster: Broker, tmp_path: Path) -> Hands:
    return Hands(cluster, tmp_path)
