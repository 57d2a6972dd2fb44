"""What Ray says of nodes is believed. The last file here: a third node stays known after it."""

from collections.abc import Iterator

import pytest
from gpubroker import Broker

from tests.e2e.hands import Hands
from tests.e2e.ray_lab import Lab, guest_environment
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import until


@pytest.fixture
def third_node(shared_lab: Lab, second_node: RayNode) -> Iterator[RayNode]:
    with RayNode(shared_lab.head.address, "n3", guest_environment(shared_lab.options.data_dir)) as node:
        yield node


def ready(broker: Broker) -> set[str]:
    return {node.name for node in broker.nodes() if node.ready}


def test_two_of_three_nodes_that_ray_says_are_dead_are_given_up_without_a_persons_word(
    cluster: Broker, second_node: RayNode, third_node: RayNode, hands: Hands
) -> None:
    until(lambda: len(cluster.nodes()) == 3 and "n3" in ready(cluster), "three nodes are there")
    lost = {"n2": second_node, "n3": third_node}
    small = {"gpu_mb": 4096, "kinds": ["sim-small"]}
    runs = [hands.at_work(f"on-{name}", **small, prefer_nodes={"node": [name]}) for name in lost]
    assert [run.node for run in runs] == list(lost)
    for node in lost.values():
        node.lose()
    until(lambda: not ready(cluster) & set(lost), "both are given up")
    assert cluster.stats().detection["state"] == "watching"
    for run in runs:
        until(lambda run=run: cluster.get(run).state == "running", "it runs elsewhere")
        assert cluster.get(run).node not in lost
        cluster.release_quarantine(run, "pulled its plug")
    hands.end(*runs)
