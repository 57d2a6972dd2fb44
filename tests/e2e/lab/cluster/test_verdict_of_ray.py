"""What Ray says of nodes is believed. The last file here: a third node stays known after it."""

from collections.abc import Iterator
from functools import partial

import pytest
from gpubroker import Broker

from tests.e2e.hands import Hands
from tests.e2e.ray_lab import Lab, guest_environment
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import is_running, until


@pytest.fixture
def third_node(shared_lab: Lab, second_node: RayNode) -> Iterator[RayNode]:
    with RayNode(shared_lab.head.address, "n3", guest_environment(shared_lab.options.data_dir)) as node:
        yield node


def ready(broker: Broker) -> set[str]:
    return {node.name for node in broker.nodes() if node.ready}


def test_two_of_three_nodes_that_ray_says_are_dead_are_given_up_unasked(
    cluster: Broker, second_node: RayNode, third_node: RayNode, hands: Hands
) -> None:
    until(lambda: len(cluster.nodes()) == 3 and "n3" in ready(cluster), "three nodes are there")
    until(lambda: not any(gpu.stale for gpu in cluster.gpus()), "and their GPUs are measured")
    lost = {"n2": second_node, "n3": third_node}
    small = {"gpu_mb": 4096, "kinds": ["sim-small"]}
    runs = [hands.at_work(f"on-{name}", **small, prefer_nodes={"node": [name]}) for name in lost]
    assert [run.node for run in runs] == list(lost)
    for node in lost.values():
        node.lose()
    until(lambda: not ready(cluster) & set(lost), "both are given up")
    assert cluster.stats().detection.state == "watching"
    for run in runs:
        until(partial(is_running, cluster, run), "it runs elsewhere")
        assert cluster.get(run).node not in lost
        cluster.release_quarantine(run, "pulled its plug")
    hands.end(*runs)


def test_a_ray_node_without_cpus_gets_no_agent(
    cluster: Broker, shared_lab: Lab, second_node: RayNode
) -> None:
    """A broker's own node, through which it talks to Ray."""
    joins = shared_lab.head.address, guest_environment(shared_lab.options.data_dir)
    with RayNode(joins[0], "of-a-broker", joins[1], cpus=0):
        with RayNode(joins[0], "n4", joins[1]):
            until(lambda: "n4" in ready(cluster), "the node that joined after it is ready")
        until(lambda: "n4" not in ready(cluster), "and lost again")
        assert "of-a-broker" not in {node.name for node in cluster.nodes()}
