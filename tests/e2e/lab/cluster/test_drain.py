"""A node is closed, emptied and opened again, and one that joins is of use at once; on real Ray."""

import time
from pathlib import Path

from gpubroker import Broker
from gpubroker.wire.nodes import Node
from msgspec.structs import replace

from tests.e2e.hands import PATIENCE_SECONDS, SMALL, Hands
from tests.e2e.ray_node import RayNode
from tests.e2e.service_process import until
from tests.e2e.work import lines_of


def test_drained_node_hands_its_run_on_and_takes_nothing_until_uncordoned(
    cluster: Broker, second_node: RayNode, hands: Hands, tmp_path: Path
) -> None:
    """The run goes on from its checkpoint."""
    witness, enough = str(tmp_path / "steps"), tmp_path / "enough"
    run = cluster.submit(
        "tests.e2e.work:count", witness, str(enough), gpu_mb=4096, prefer_nodes={"node": ["n2"]}
    )
    Path(witness).touch()
    until(lambda: len(lines_of(witness)) > 5, "it counts")
    assert cluster.get(run).node == "n2"
    drained = cluster.drain("n2", "a fan is broken", deadline_seconds=60)
    assert (drained.cordoned, drained.cordon_reason) == (True, "a fan is broken")
    assert drained.drain is not None
    empty = replace(drained.drain, left=0, done=True)
    until(lambda: the_node(cluster).drain == empty, "it is empty")
    until(lambda: cluster.get(run).state == "running", "it runs elsewhere")
    again = cluster.get(run)
    assert (again.node == "n2", again.attempt, again.failures) == (False, 2, 0)
    enough.touch()
    counted = cluster.result(run, timeout_seconds=PATIENCE_SECONDS)
    assert lines_of(witness) == [str(step) for step in counted], "no step is lost, and none is done twice"
    waiting = hands.waiting("waiting", "NodeCordoned", gpu_mb=4096, **SMALL)
    assert the_node(cluster).ready
    assert cluster.uncordon("n2").drain is None
    hands.end(waiting)


def test_a_node_that_joins_is_of_use_at_once(cluster: Broker, second_node: RayNode, hands: Hands) -> None:
    second_node.lose()
    until(lambda: not the_node(cluster).ready, "it has left")
    waiting = hands.hold("waiting", gpu_mb=4096, **SMALL)
    second_node.start()
    joined = time.monotonic()
    until(lambda: cluster.get(waiting).state == "running", "what waited for it runs there")
    print(f"a run started {time.monotonic() - joined:.1f} s after its node had joined")
    hands.end(waiting)


def the_node(broker: Broker) -> Node:
    return next(node for node in broker.nodes() if node.name == "n2")
