"""Worker sets beside two brokers on PostgreSQL and two Ray nodes: a gateway with a Ray driver of its own
takes calls, one without says so, a worker leaves a node that is lost or drained, and the next leader goes on
with the set. And an array that loses a node and its leader."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gpubroker import Array, Broker, CallFailed, Refused
from gpubroker_server.adapters.ray.head.head import running_head, stop_head

from tests.e2e.lab.conftest import a_home
from tests.e2e.ray_lab import guest_environment, lab_options
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import GIB, BrokerProcess, GatewayProcess, until
from tests.e2e.work import lines_of
from tests.patience import PATIENCE_SECONDS
from tests.postgres import PostgresServer

COUNTERS: dict[str, Any] = {"cpu": 0.1, "max_count": 2, "prefer_nodes": {"node": ["n2"]}}
ITEMS = 1200
"""They last until the node is missed and the next broker leads."""


def on_two_nodes(broker: Broker, witness: Path) -> Array:
    """An array with a worker at work on each."""
    witness.touch()
    kwargs = {"witness": str(witness), "pause_seconds": 0.05}
    options: dict[str, Any] = {"max_parallel": 2, "cpu": 0.1, "placement": "spread"}
    array = broker.submit_array("tests.e2e.work:note_item", range(ITEMS), kwargs=kwargs, **options)
    until(lambda: len({line.split()[0] for line in lines_of(str(witness))}) == 2, "both workers are at work")
    assert len({broker.get(worker.id).node for worker in broker.array(array).workers}) == 2
    return array


def assert_all_done(broker: Broker, array: Array) -> None:
    until(lambda: broker.array(array).state == "succeeded", "every item is done")
    found = [(item.number, item.result) for item in broker.array_items(array)]
    assert found == [(number, number**2) for number in range(ITEMS)]


ON_NODES: dict[str, Any] = {"simulated_devices": [{"kind": "sim-24g", "memory_mb": 24 * GIB}]}


@pytest.mark.evidence
def test_workers_are_called_and_share_an_array_on_any_node_and_leader(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    with a_home() as home:
        url = postgres_server.new_database()
        head = asyncio.run(running_head(lab_options(home)))
        env = guest_environment(home)
        shared: dict[str, Any] = {"database_url": url, "blob_dir": str(tmp_path / "objects")}
        joined = {"address": head.address, "cluster": "called", "spares": 1, "warm_runners": 0}
        ray: dict[str, Any] = {"ray": joined}
        try:
            with (
                RayNode(head.address, "n2", env) as node,
                GatewayProcess(tmp_path / "calls", env, **shared, **ray) as calls,
                GatewayProcess(tmp_path / "plain", env, **shared) as plain,
                BrokerProcess(tmp_path / "broker", env, **shared, **ray, **ON_NODES) as leader,
                BrokerProcess(tmp_path / "other", env, **shared, **ray, **ON_NODES),
            ):
                broker = calls.broker
                until(lambda: len([n for n in broker.nodes() if n.ready]) == 2, "two nodes answer")
                made = plain.broker.create_worker_set("tests.e2e.work:Counter", **COUNTERS)
                handle = broker.workers(made, timeout_seconds=PATIENCE_SECONDS, pickled=False)
                assert (handle.add(1), handle.add(1)) == (1, 2)
                assert broker.worker_set(made).workers[0].node == "n2"
                with pytest.raises(Refused, match="this gateway has no Ray driver") as refused:
                    plain.broker.workers(made, pickled=False).add(1)
                assert refused.value.code == "no-ray-driver"

                array = on_two_nodes(broker, tmp_path / "witness")
                node.kill()
                with pytest.raises(CallFailed) as lost:
                    handle.add(3)
                assert lost.value.code == "worker-lost"
                assert handle.add(5) == 5, "a new object, elsewhere"
                [moved] = [one for one in broker.worker_set(made).workers if one.state == "running"]
                assert (moved.node != "n2", moved.attempt, moved.failures) == (True, 2, 0)

                calls.driver().kill()
                until(lambda: "no Ray driver process; starting another" in calls.log(), "it is missed")
                assert handle.add(1) == 6, "another driver carries the call"

                leader.kill_9()
                assert handle.add(1) == 7, "no leader is needed for a call"
                broker.scale_worker_set(made, 2)
                until(lambda: broker.worker_set(made).states == {"running": 2}, "the other broker leads")
                assert_all_done(broker, array)
                broker.scale_worker_set(made, 1)
                until(lambda: broker.worker_set(made).states == {"running": 1, "held": 1}, "one has left")

                broker.drain(str(moved.node), "a fan")
                until(lambda: broker.worker_set(made).states == {"pending": 1, "held": 1}, "it waits")
                broker.uncordon(str(moved.node))
                assert handle.add(1) == 1, "a new object"
                [back] = [one for one in broker.worker_set(made).workers if one.state == "running"]
                assert (back.id, back.attempt, back.failures) == (moved.id, 3, 0)
                broker.end_worker_set(made)
                until(lambda: broker.worker_set(made).state == "over", "the set is over")
        finally:
            asyncio.run(stop_head(home))
            postgres_server.drop(url)
