"""Nodes that fall silent on real Ray: found in time, and given back by proof or by an operator's word."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Broker, Task
from msgspec import Struct

from tests.e2e.hands import PATIENCE_SECONDS, SMALL, Hands
from tests.e2e.ray_lab import Lab, guest_environment
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import GIB, BrokerProcess, GatewayProcess, ServiceProcess, until

FOUND_SECONDS = 8.0
STOPPED_SECONDS = 10.0


class Site(Struct, frozen=True):
    """A gateway and two brokers on one PostgreSQL and two nodes."""

    broker: Broker
    leader: ServiceProcess
    standby: ServiceProcess

    def leads(self, process: ServiceProcess) -> bool:
        return str(self.broker.stats().leader.holder).endswith(f":{process.pid}")


@pytest.fixture
def frozen(second_node: RayNode) -> Iterator[RayNode]:
    """A node that may stand still, and goes on after the test."""
    yield second_node
    if second_node.is_there:
        second_node.thaw()


def is_ready(broker: Broker, name: str = "n2") -> bool:
    return next(node.ready for node in broker.nodes() if node.name == name)


def proofs(broker: Broker, task: Task) -> list[str]:
    """By which its memory was released."""
    released = [event for event in broker.events(task) if event.kind == "lease.released"]
    return [event.fields["proof"] for event in released]


def test_frozen_node_is_found_in_time_and_its_memory_returns_by_proof(
    cluster: Broker, frozen: RayNode, hands: Hands
) -> None:
    run = hands.at_work("run", gpu_mb=4096, **SMALL)
    frozen.freeze()
    began = time.monotonic()
    until(lambda: not is_ready(cluster), "the node is found silent")
    found_seconds = time.monotonic() - began
    print(f"a node that stood still was found after {found_seconds:.1f} s")
    assert found_seconds <= FOUND_SECONDS
    assert cluster.get(run).state == "pending", "it may start elsewhere"
    [stuck] = cluster.quarantine().items
    assert (stuck.id, stuck.node, stuck.node_ready) == (run.id, "n2", False)
    assert stuck.awaits[0] == "agent_restarted"
    frozen.thaw()
    until(lambda: cluster.quarantine().items == (), "the agent has proven it gone", PATIENCE_SECONDS)
    assert proofs(cluster, run) == ["process_absent"]
    hands.end(run)
    assert cluster.get(run).attempt == 2


def test_a_leader_that_stood_still_itself_gives_nobody_up(
    two_nodes: ServiceProcess, cluster: Broker, hands: Hands
) -> None:
    runs = [hands.at_work("here", gpu_mb=4096, **SMALL), hands.at_work("there", gpu_mb=4096)]
    before = cluster.stats().position
    os.kill(two_nodes.pid, signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    os.kill(two_nodes.pid, signal.SIGCONT)
    assert cluster.result(cluster.submit("tests.e2e.work:add", 1, 2), timeout_seconds=PATIENCE_SECONDS) == 3
    assert [(task.state, task.attempt) for task in map(cluster.get, runs)] == [("running", 1)] * 2
    closed = [event for event in cluster.events(after=before) if event.kind == "node.seen"]
    assert closed == [], "no node was given up"
    hands.end(*runs)


@pytest.fixture
def site(shared_lab: Lab, second_node: RayNode, postgres_url: str, tmp_path: Path) -> Iterator[Site]:
    settings: dict[str, Any] = {
        "database_url": postgres_url,
        "blob_dir": str(tmp_path / "objects"),
        "ray": {"address": shared_lab.head.address, "cluster": "stopped", "spares": 1, "warm_runners": 0},
        "simulated_devices": [{"kind": "sim-24g", "memory_mb": 24 * GIB}],
    }
    env = guest_environment(shared_lab.options.data_dir)
    with ExitStack() as stack:
        gateway = stack.enter_context(GatewayProcess(tmp_path / "gateway", env, **settings))
        leader, standby = (
            stack.enter_context(BrokerProcess(tmp_path / name, env, **settings)) for name in ("one", "two")
        )
        yield Site(gateway.broker, leader, standby)


@pytest.mark.evidence
def test_standby_leads_when_a_leader_freezes_and_nobody_is_given_up(site: Site, tmp_path: Path) -> None:
    broker, hands = site.broker, Hands(site.broker, tmp_path)
    until(lambda: len(broker.nodes()) == 2, "both nodes are there")
    runs = [hands.at_work(node.name, gpu_mb=4096, nodes={"node": [node.name]}) for node in broker.nodes()]
    before = broker.stats()
    assert site.leads(site.leader)
    os.kill(site.leader.pid, signal.SIGSTOP)
    try:
        time.sleep(STOPPED_SECONDS)
        assert broker.result(broker.submit("tests.e2e.work:add", 1, 2)) == 3
        assert site.leads(site.standby)
    finally:
        os.kill(site.leader.pid, signal.SIGCONT)
    time.sleep(STOPPED_SECONDS)
    assert site.leads(site.standby), "who slept has stood back"
    assert before.leader.term is not None
    assert broker.stats().leader.term == before.leader.term + 1
    assert [(task.state, task.attempt) for task in map(broker.get, runs)] == [("running", 1)] * 2
    assert all(node.ready for node in broker.nodes())
    assert broker.quarantine().items == ()
    told = [event for event in broker.events(after=before.position) if event.key in {run.id for run in runs}]
    assert told == [], "nothing befell the runs"
    hands.end(*runs)


def test_an_operators_word_gives_back_the_memory_of_a_machine_that_is_gone(
    cluster: Broker, second_node: RayNode, hands: Hands
) -> None:
    run = hands.at_work("run", gpu_mb=4096, **SMALL)
    second_node.lose()
    until(lambda: len(cluster.quarantine().items) == 1, "its memory waits for proof")
    released = cluster.release_quarantine(run, "pulled its plug")
    assert (released.id, released.gpu_mb, released.quarantine) == (run.id, 4096, ())
    [gpu] = [gpu for gpu in cluster.gpus() if gpu.node == "n2" and gpu.kind == "sim-small"]
    assert (gpu.leased_mb, gpu.stale, gpu.raw["used_mb"]) == (0, True, None), "nobody has measured it since"
    assert proofs(cluster, run) == ["statement"]
    second_node.start()
    hands.end(run)
    assert cluster.get(run).attempt == 2
